# SPDX-License-Identifier: Apache-2.0
"""Part ``waves``: how much of a collective's time two waves hide, and what they cost without one.

One rank runs a model that is split by tensors, so that the passes and their order are those of the
engine. In place of each all-reduce a kernel on a stream of its own spins for as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.request import ACCUMULATION
from benchmarks.gpu.timing import Scene, make_rows
from benchmarks.wave.request import SYSTEMS, TICK_TOCK, WaveRequest
from benchmarks.wave.systems import Systems

_BACKEND = "spin"
_SHARE = 0.25
"""Of an accumulation step in which only collectives run."""
_CYCLES = 10**8
_TRIALS = 3


class _Work:
    """A collective that is done after some seconds.

    Args:
        done: Waits for its end; on a GPU the current stream waits, not the host.
    """

    def __init__(self, done: Callable[[], Any]) -> None:
        self._done = done

    def wait(self, *_: Any) -> bool:
        """Wait for its end."""
        self._done()
        return True


class SpinGroup(dist.ProcessGroup):
    """A process group of one rank whose all-reduces take as long as one likes.

    Attributes:
        seconds: What an all-reduce takes, from the end of the work that is queued before it.
    """

    def __init__(self, *_: Any) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self.seconds = 0.0
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._rate = _cycle_rate() if torch.cuda.is_available() else 0.0

    def allreduce(self, tensors: Any, *_: Any) -> Any:
        """Leave the tensors as they are, and take the time."""
        if not self.seconds:
            return _Work(lambda: None)
        if not tensors[0].is_cuda:
            return _Work(partial(_sleep_until, time.perf_counter() + self.seconds))
        stream, event = self._stream, torch.cuda.Event()
        assert stream is not None
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            _spin(round(self.seconds * self._rate))
            event.record(stream)
        return _Work(lambda: torch.cuda.current_stream().wait_event(event))

    def allgather(self, outputs: Any, inputs: Any, *_: Any) -> Any:
        """Copy the tensors."""
        for (output,), own in zip(outputs, inputs, strict=True):
            output.copy_(own)
        return _Work(lambda: None)

    def broadcast(self, tensors: Any, *_: Any) -> Any:
        """Leave the tensors as they are."""
        return _Work(lambda: None)

    def getBackendName(self) -> str:
        """Return the name under which torch knows it."""
        return _BACKEND


def _cycle_rate() -> float:
    """Return the cycles that a GPU spins in a second."""
    spent = []
    for _ in range(_TRIALS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        _spin(_CYCLES)
        end.record()
        end.synchronize()
        spent.append(begin.elapsed_time(end) / 1e3)
    return _CYCLES / median(spent)


def _spin(cycles: int) -> None:
    """Spin in one thread of the device, on the current stream."""
    torch.cuda._sleep(cycles)


def _sleep_until(end: float) -> None:
    time.sleep(max(0.0, end - time.perf_counter()))


def measure(scene: Scene) -> Iterator[dict[str, Any]]:
    """Yield the rows, of a step.

    ``share`` of the case with collectives is the part of what they cost accumulation that a system
    hides. In the case without them ``ratio`` is what waves cost.
    """
    if _BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(_BACKEND, SpinGroup, devices=["cpu", "cuda"])
    group: Any = dist.new_group([0], backend=_BACKEND)
    size = {"layers": 4, "hidden": 2048, "heads": 16, "sequence": 512, "batch": 4}
    tiny = {"layers": 2, "hidden": 32, "heads": 2, "sequence": 16, "batch": 2, "vocabulary": 64}
    request = WaveRequest.of(exposed=(0,), **(tiny if scene.job.tiny else size))
    dtype = torch.bfloat16 if scene.on_gpu else torch.float32
    systems = Systems(request, group=group, dtype=dtype)
    equal = _compare(systems)
    calls = {name: partial(_step, systems, group, name, 0.0) for name in SYSTEMS}
    without = scene.rounds(calls)
    compute_s = median(times.device_s for times in without[ACCUMULATION])
    sums = request.micro_batches * systems.sums_per_micro_batch
    each_s = compute_s * _SHARE / (1 - _SHARE) / sums
    calls = {name: partial(_step, systems, group, name, each_s) for name in SYSTEMS}
    spun = scene.rounds(calls)
    added = {
        name: median(t.device_s for t in spun[name]) - median(t.device_s for t in without[name])
        for name in SYSTEMS
    }
    exposed_s = added[ACCUMULATION]
    hidden = {name: 1 - added[name] / exposed_s for name in SYSTEMS if exposed_s > 0}
    yield from make_rows("waves", "no collectives", without, equal=equal)
    spin_s = dict.fromkeys(SYSTEMS, each_s)
    yield from make_rows("waves", f"{_SHARE:.0%} exposed", spun, share=hidden, spin_s=spin_s)


def _step(systems: Systems, group: Any, name: str, seconds: float) -> None:
    group.seconds = seconds
    systems.clear()
    systems.step(name)


def _compare(systems: Systems) -> dict[str, bool]:
    """Return whether tick-tock's gradients are accumulation's to the last bit."""
    found = []
    for name in (ACCUMULATION, TICK_TOCK):
        systems.clear()
        systems.step(name)
        found.append(systems.gradients())
    return {TICK_TOCK: all(map(torch.equal, *found))}
