# SPDX-License-Identifier: Apache-2.0
"""The thread of the collectives: order, handles, errors, and its end."""

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

from support.refusals import refuses
from wavemare.comm.collective_queue import CollectiveQueue
from wavemare.errors import CommError

CPU = torch.device("cpu")


@pytest.fixture
def worker():
    worker = CollectiveQueue("collectives under test")
    yield worker
    worker.close()
    assert not [thread for thread in threading.enumerate() if "under test" in thread.name]


def nothing(stats):
    return lambda: None


def fails(stats):
    raise ValueError("what went wrong")


def test_an_error_is_raised_by_each_wait_and_nothing_runs_after_it(worker):
    first = worker.submit(fails, CPU)
    ran = []
    second = worker.submit(lambda stats: ran.append, CPU)
    with refuses(CommError, "collective", "ValueError"):
        second.wait()
    assert not ran
    for _ in range(2):
        with pytest.raises(ValueError, match="what went wrong"):
            first.wait()
    assert first.done()


def test_a_lost_peer_stays_named(worker):
    def loses(stats):
        raise CommError("rank", "3", "it has gone", "Look there")

    worker.submit(loses, CPU)
    with refuses(CommError, "rank", "3") as caught:
        worker.submit(nothing, CPU).wait()
    assert (caught.value.key, caught.value.value) == ("rank", "3")


def test_callbacks_run_after_an_error_too(worker):
    gate, seen = threading.Event(), []

    def work(stats):
        gate.wait(300)
        raise ValueError("what went wrong")

    handle = worker.submit(work, CPU)
    handle.then(lambda done: seen.append(done.done()))
    gate.set()
    with pytest.raises(CommError):
        worker.submit(nothing, CPU).wait()
    assert seen == [True]


def test_a_callback_that_raises_breaks_what_comes_after_it_and_hangs_nobody(worker):
    gate = threading.Event()

    def callback(handle):
        raise ValueError("the callback's own fault")

    handle = worker.submit(lambda stats: lambda: gate.wait(300), CPU)
    handle.then(callback)
    gate.set()
    assert handle.wait() is True
    last = worker.submit(nothing, CPU)
    with refuses(CommError, "collective", "ValueError"):
        last.wait()


def test_results_are_given_back_with_their_handles(worker):
    tensor = torch.ones(3)
    gone = weakref.ref(tensor)
    handle = worker.submit(lambda stats, tensor=tensor: lambda: tensor, CPU)
    assert handle.wait() is tensor
    del handle, tensor
    # The thread must not hold what it did last while it waits for more.
    deadline = time.monotonic() + 300
    while gone() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert gone() is None


def test_queues_that_take_turns_run_in_the_order_of_their_calls():
    gate, order = threading.Event(), []
    first, second = (CollectiveQueue(f"turn {n} under test", in_turn=True) for n in range(2))
    alone = CollectiveQueue("no turn under test")
    slow = first.submit(lambda stats: lambda: order.append(gate.wait(300)), CPU)
    failing = second.submit(fails, CPU)
    last = first.submit(lambda stats: lambda: order.append("last"), CPU)
    alone.submit(lambda stats: lambda: order.append("alone"), CPU).wait()
    assert not failing.done()
    gate.set()
    last.wait()
    assert order == ["alone", True, "last"]
    assert slow.done()
    with pytest.raises(ValueError, match="what went wrong"):
        failing.wait()
    for each in (first, second, alone):
        each.close()


@pytest.mark.long
def test_a_collective_in_flight_ends_before_the_interpreter():
    program = (
        "import time, torch\n"
        "from wavemare.comm.collective_queue import CollectiveQueue\n"
        "def work(_):\n"
        "    time.sleep(1.0)\n"
        "    return lambda: print('finished', flush=True)\n"
        "CollectiveQueue('late').submit(work, torch.device('cpu'))\n"
    )
    words = [sys.executable, "-c", program]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "finished\n"
