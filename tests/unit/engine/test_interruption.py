# SPDX-License-Identifier: Apache-2.0
"""Ranks that stop after one and the same step, in every order that their steps may take."""

import os
import random
import signal
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
from deepspeed import accelerator
from torch.distributed import HashStore, TCPStore

from support.refusals import refuses
from wavemare.engine import Interruption
from wavemare.errors import ConfigError

# In one process every "rank" listens to a signal of its own.
SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH)


class FakeEvent:
    """An event of a device; it lists what happens."""

    happened: list[str]
    made = 0

    def __init__(self):
        FakeEvent.made += 1
        self.name = str(FakeEvent.made)

    def record(self):
        self.happened.append(f"record {self.name}")

    def synchronize(self):
        self.happened.append(f"wait {self.name}")


class FakeAccelerator:
    """A device that works while the process goes on."""

    def __init__(self, event):
        self.Event = event
        self.happened: list[str] = []

    def is_synchronized_device(self):
        return False

    def synchronize(self):
        self.happened.append("synchronize")


@pytest.fixture
def device(monkeypatch):
    def use(*, events=True):
        fake = FakeAccelerator(FakeEvent if events else None)
        FakeEvent.happened, FakeEvent.made = fake.happened, 0
        monkeypatch.setattr(accelerator, "get_accelerator", lambda: fake)
        return fake

    return use


@pytest.fixture(autouse=True)
def handlers():
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


def one(store=None, **changes):
    values = {"rank": 0, "signals": SIGNALS[:1], **changes}
    return Interruption(store=HashStore() if store is None else store, **values)


def simulate(seed, *, lead, ahead, told=None):
    """Let three ranks step in a random order that an engine of this lead allows.

    A rank other than 0 finishes step k, on its device, only once rank 0 has begun step k - lead;
    its process may ask about it when the device has finished step k - ahead.

    Args:
        seed: Decides the order, and when which rank gets its signal.
        lead: Of the engine.
        ahead: Steps by which processes are ahead of their devices.
        told: The lead that the ranks are told; by default the engine's.

    Returns:
        The step after which each rank stopped; None if it went on to the end.
    """
    rng, store, steps = random.Random(seed), HashStore(), 30
    ranks = [
        Interruption.of(
            SimpleNamespace(step_lead=lead if told is None else told),
            store=store,
            rank=rank,
            signals=[SIGNALS[rank]],
        )
        for rank in range(3)
    ]
    weights = [rng.choice([0.1, 1, 10]) for _ in ranks]
    asked, begun, stopped = [0, 0, 0], 0, [None, None, None]
    signalled = {rng.randrange(3), rng.randrange(3)}
    moment = rng.randrange(60)
    for rank in ranks:
        rank.__enter__()
    running = [0, 1, 2]
    for event in range(10_000):
        if event == moment:
            for rank in signalled:
                os.kill(os.getpid(), SIGNALS[rank])
        if not running:
            break
        rank = rng.choices(running, [weights[r] for r in running])[0]
        if rank == 0 and begun == asked[0]:
            begun += 1
            continue
        next_step = asked[rank] + 1
        # A rank that has stopped begins no further step; the others must not need one.
        if rank and begun < next_step - lead - ahead:
            continue
        asked[rank] = next_step
        if ranks[rank].stops_after(next_step):
            stopped[rank] = next_step
        if stopped[rank] or next_step == steps:
            running.remove(rank)
    for rank in ranks:
        rank.__exit__(None, None, None)
    assert not running, "a rank waits for a step that rank 0 never begins"
    return stopped


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("lead", [0, 1, 3])
def test_all_ranks_stop_after_the_same_step(device, lead, ahead):
    if ahead:
        device()
    results = [simulate(seed, lead=lead, ahead=ahead) for seed in range(150)]
    assert all(len(set(stops)) == 1 for stops in results)
    assert sum(stops[0] is not None for stops in results) > 75


def test_a_lead_that_is_too_small_is_named():
    wrong = 0
    for seed in range(60):
        try:
            stops = simulate(seed, lead=3, ahead=0, told=0)
        except ConfigError as error:
            wrong += error.key == "lead"
        else:
            # Never two steps; at most a rank had come to its end when the others were to stop.
            assert len(set(stops) - {None}) <= 1
    assert wrong > 10


def test_a_negative_lead_is_refused():
    with refuses(ConfigError, "lead", -1):
        one(lead=-1)


def test_handlers_are_put_back():
    noted: list[int] = []
    signal.signal(SIGNALS[0], lambda number, _: noted.append(number))
    with one() as interruption:
        os.kill(os.getpid(), SIGNALS[0])
        assert not interruption.stops_after(1)
        assert noted == []
    os.kill(os.getpid(), SIGNALS[0])
    assert noted == [SIGNALS[0]]


def test_after_a_stop_further_signals_do_no_harm():
    with one() as interruption:
        os.kill(os.getpid(), SIGNALS[0])
        assert not interruption.stops_after(1)
        os.kill(os.getpid(), SIGNALS[0])
        assert interruption.stops_after(2)
    assert signal.getsignal(SIGNALS[0]) is signal.SIG_IGN


def test_a_later_loop_begins_anew():
    store = HashStore()
    for _ in range(2):
        with one(store) as interruption:
            assert not interruption.stops_after(1)
            os.kill(os.getpid(), SIGNALS[0])
            assert not interruption.stops_after(2)
            assert interruption.stops_after(3)


def test_outside_the_main_thread_it_only_follows():
    store, before, stops = HashStore(), signal.getsignal(SIGNALS[0]), []

    def loop():
        with one(store, rank=1) as interruption:
            assert signal.getsignal(SIGNALS[0]) is before
            stops.extend(interruption.stops_after(step) for step in (1, 2))

    with one(store, signals=SIGNALS[1:2]) as first:
        os.kill(os.getpid(), SIGNALS[1])
        assert not first.stops_after(1)
        thread = threading.Thread(target=loop)
        thread.start()
        thread.join()
    assert stops == [False, True]


def test_a_lost_store_does_not_end_the_rank():
    limit = timedelta(seconds=60)
    master = TCPStore("127.0.0.1", 0, None, True, timeout=limit)
    client = TCPStore("127.0.0.1", master.port, None, False, timeout=limit)
    with one(client, rank=1) as interruption:
        assert not interruption.stops_after(1)
        del master
        os.kill(os.getpid(), SIGNALS[0])
        assert not any(interruption.stops_after(step) for step in (2, 3, 4))


def test_a_forked_child_ends_by_the_signal():
    with one() as interruption:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, b"x")
            while True:  # a signal that comes just before signal.pause() would not end that
                time.sleep(0.01)
        os.read(read, 1)
        os.kill(child, SIGNALS[0])
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == SIGNALS[0]
        assert not any(interruption.stops_after(step) for step in (1, 2, 3))
    os.close(read)
    os.close(write)


def test_the_process_stays_within_a_step_of_its_device(device):
    happened = device().happened
    with one() as interruption:
        for step in (1, 2, 3):
            interruption.stops_after(step)
    assert happened == ["record 1", "wait 1", "record 2", "wait 2", "record 3"]


def test_a_device_without_events_is_waited_for(device):
    fake = device(events=False)
    with one() as interruption:
        os.kill(os.getpid(), SIGNALS[0])
        assert [interruption.stops_after(step) for step in (1, 2)] == [False, True]
    assert fake.happened == ["synchronize"] * 2
