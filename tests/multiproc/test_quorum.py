# SPDX-License-Identifier: Apache-2.0
"""Replicas meet in threads of one process, by torchft's lighthouse (``make test-elastic``)."""

import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from torch import distributed

from wavemare.engine.local_steps.meeting import Verdict, reason_of
from wavemare.engine.local_steps.wire import START, Header
from wavemare.errors import CommError, ConfigError

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(find_spec("torchft") is None, reason="needs torchft"),
]

BEGIN = Header(0, START, 3, 32, 5)
TURN = Header(4, 0, 3, 32, 5)


@pytest.fixture(scope="module", autouse=True)
def world():
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield import_module("wavemare.engine.local_steps.quorum").Members
    distributed.destroy_process_group()


@pytest.fixture
def come(world):
    """Return replicas that may meet, of which each call adds one."""
    from torchft.coordination import LighthouseServer

    limits = {"join_timeout_ms": 20_000, "heartbeat_timeout_ms": 1000, "quorum_tick_ms": 20}
    server = LighthouseServer(bind="[::]:0", min_replicas=1, **limits)
    address = f"http://localhost:{server.address().rsplit(':', 1)[1]}"
    there = []

    def one(replica, *, settings=2, state=None):
        there.append(
            world(
                address,
                replica=replica,
                replicas=2,
                least=1,
                timeout_s=20.0,
                state=lambda: {"header": list(TURN), "weights": state},
                digests=(1, settings),
            )
        )
        return there[-1]

    yield one
    for each in there:
        each.close()
    server.shutdown()


def together(*calls):
    """Call functions in threads of their own; return what they return, or raise what they raise."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def begin(*members):
    """Let replicas start together."""

    def one(each):
        while True:
            meeting = each.meet(BEGIN, trains=False, gives=False)
            if each.commit("" if meeting.goes else meeting.reason):
                return

    together(*[lambda each=each: one(each) for each in members])


def exchange(each, values, *, gives=True, trains=True):
    """Make an exchange; return the meeting, the mean, and whether it counts."""
    meeting = each.meet(TURN, trains=trains, gives=gives)
    if not meeting.goes:
        return meeting, None, each.commit(meeting.reason)
    reason, mean = "", None
    try:
        mean = each.link.send(meeting.header, torch.tensor(values)).wait()
    except CommError as error:
        reason = reason_of(error)
    return meeting, mean, each.commit(reason)


def test_those_that_give_have_their_mean(come):
    first, second = come(0), come(1)
    begin(first, second)
    found = together(
        lambda: exchange(first, [1.0, 2.0, 3.0]), lambda: exchange(second, [3.0, 4.0, 7.0])
    )
    for meeting, mean, counts in found:
        assert (meeting.verdict, meeting.givers, counts) == (Verdict.GO, 2, True)
        assert mean.tolist() == [2.0, 3.0, 5.0]
    bad = [float("nan")] * 3
    found = together(
        lambda: exchange(first, [1.0, 2.0, 3.0]), lambda: exchange(second, bad, gives=False)
    )
    assert [mean.tolist() for _, mean, _ in found] == [[1.0, 2.0, 3.0]] * 2
    assert [meeting.diverged for meeting, *_ in found] == [False, True]
    assert first.state_dict() == second.state_dict()


def test_one_that_has_just_come_takes_the_state_and_gives_nothing(come):
    weights = torch.arange(5.0)
    first, second = come(0, state=weights), come(1)
    begin(first, second)
    second.close()
    new = come(1)

    def comes():
        meeting = new.meet(BEGIN, trains=False, gives=False)
        return meeting, new.link.send(meeting.header, torch.ones(3)).wait(), new.commit()

    (old, mean, counts), (meeting, same, too) = together(
        lambda: exchange(first, [2.0, 4.0, 6.0]), comes
    )
    assert (old.goes, old.givers, counts, too) == (True, 1, True, True)
    assert old.state is None
    assert torch.equal(meeting.state["weights"], weights)
    assert meeting.header == TURN
    assert mean.tolist() == same.tolist() == [2.0, 4.0, 6.0]
    assert first.state_dict() == new.state_dict()


def test_one_with_other_settings_is_refused_and_the_other_goes_on(come):
    first, second = come(0), come(1, settings=3)
    refused = threading.Event()

    def other():
        try:
            second.meet(BEGIN, trains=False, gives=False)
        except ConfigError as error:
            refused.set()
            second.close()
            return error
        raise AssertionError

    def one():
        meeting = first.meet(BEGIN, trains=False, gives=False, hurries=True)
        while not meeting.goes:
            first.commit(meeting.reason)
            meeting = first.meet(BEGIN, trains=False, gives=False, hurries=refused.is_set())
        return first.commit()

    assert together(other, one) == [AnyError("replica"), True]


class AnyError:
    """Equal to an error that names this key."""

    def __init__(self, key):
        self.key = key

    def __eq__(self, error):
        return isinstance(error, ConfigError) and error.key == self.key

    __hash__ = None


@pytest.mark.parametrize("has_all", [False, True])
def test_an_exchange_that_one_leaves_counts_for_none(come, has_all):
    first, second = come(0), come(1)
    begin(first, second)

    def leaves():
        meeting = second.meet(TURN, trains=True, gives=True)
        if has_all:
            second.link.send(meeting.header, torch.ones(3)).wait()
        return meeting.goes, second.commit("it has failed here")

    (_, _, counts), left = together(lambda: exchange(first, [1.0, 2.0, 3.0]), leaves)
    assert (counts, left) == (False, (True, False))
    found = together(
        lambda: exchange(first, [1.0, 2.0, 3.0]), lambda: exchange(second, [3.0, 4.0, 7.0])
    )
    assert [counts for *_, counts in found] == [True, True]


def test_replicas_that_are_apart_follow_the_first_one(come):
    first, second = come(0, state="first"), come(1, state="second")
    begin(first, second)

    def apart(each, header):
        meeting = each.meet(header, trains=True, gives=True)
        each.commit(meeting.reason)
        return meeting.verdict

    late = TURN._replace(digest=6)
    assert together(lambda: apart(first, TURN), lambda: apart(second, late)) == [Verdict.FOLLOW] * 2
    found = together(
        lambda: exchange(first, [1.0, 2.0, 3.0]), lambda: exchange(second, [3.0, 4.0, 7.0])
    )
    assert [meeting.state and meeting.state["weights"] for meeting, *_ in found] == [None, "first"]
    assert [mean.tolist() for _, mean, _ in found] == [[1.0, 2.0, 3.0]] * 2


def test_one_that_begins_follows_one_that_has_trained(come):
    """Also if it is the first one, and has loaded a checkpoint of as many exchanges."""
    new, old = come(0, state="new"), come(1, state="old")
    begin(new, old)

    def begins():
        meeting = new.meet(BEGIN, trains=False, gives=False)
        new.commit(meeting.reason)
        return meeting.verdict

    def trains():
        meeting = old.meet(TURN, trains=True, gives=True)
        old.commit(meeting.reason)
        return meeting.verdict

    assert together(begins, trains) == [Verdict.FOLLOW] * 2

    def comes():
        meeting = new.meet(BEGIN, trains=False, gives=False)
        mean = new.link.send(meeting.header, torch.ones(3)).wait()
        return meeting, mean, new.commit()

    found = together(comes, lambda: exchange(old, [2.0, 4.0, 6.0]))
    assert [meeting.state and meeting.state["weights"] for meeting, *_ in found] == ["old", None]
    assert [mean.tolist() for _, mean, _ in found] == [[2.0, 4.0, 6.0]] * 2


def test_one_with_other_settings_that_comes_later_costs_the_other_one_exchange(come):
    first, second = come(0), come(1)
    begin(first, second)
    second.close()
    unlike = come(1, settings=3)

    def comes():
        with pytest.raises(ConfigError) as caught:
            unlike.meet(BEGIN, trains=False, gives=False)
        return caught.value.key

    (meeting, _, counts), key = together(lambda: exchange(first, [1.0, 2.0, 3.0]), comes)
    assert (meeting.goes, counts, key) == (False, False, "replica")
    unlike.close()
    meeting, mean, counts = exchange(first, [1.0, 2.0, 3.0])
    assert (meeting.goes, counts, mean.tolist()) == (True, True, [1.0, 2.0, 3.0])
