# SPDX-License-Identifier: Apache-2.0
"""Times of a call on the device and on the host, in interleaved rounds, and rows of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.gpu.request import GpuJob
from benchmarks.ranks import interleaved
from wavemare.engine.launch.group import gather


class Times(NamedTuple):
    """Of one call.

    Args:
        device_s: Seconds between two events on the device, before and after it; on a CPU, of the
            clock.
        host_s: Seconds until the call returned, without waiting for the device.
    """

    device_s: float
    host_s: float


@dataclass(frozen=True)
class Scene:
    """What each part gets.

    Args:
        job: The options.
        device: Of this rank.
        note: Shows a line.
    """

    job: GpuJob
    device: torch.device
    note: Callable[[str], None]

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def mark(self) -> Any:
        """Return an event behind all work of the current stream so far; on a CPU, the time."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two marks; waits for the later one."""
        if not self.on_gpu:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def timed(self, run: Callable[[], Any]) -> Times:
        """Time a call that begins on an idle device."""
        self.synchronize()
        begin, started = self.mark(), time.perf_counter()
        run()
        host_s = time.perf_counter() - started
        return Times(self.seconds(begin, self.mark()), host_s)

    def rounds(
        self,
        systems: Mapping[str, Callable[[], Any]],
        *,
        before: Callable[[], Any] = lambda: None,
        slowest: bool = False,
        number: int = 1,
    ) -> dict[str, list[Times]]:
        """Time systems in turns.

        Args:
            systems: What each one does, by name.
            before: Called before each call, untimed.
            slowest: Whether the slowest rank counts; all ranks call this.
            number: Units of work in a call; times are of one unit.
        """
        samples: dict[str, list[Times]] = {name: [] for name in systems}
        for is_timed, name in interleaved(self.job, list(systems), lambda line: None):
            before()
            times = self.timed(systems[name])
            if slowest:
                times = Times(*map(max, zip(*gather(times), strict=True)))
            if is_timed:
                samples[name].append(Times(times.device_s / number, times.host_s / number))
        return samples

    def meet(self) -> None:
        """Wait for all ranks, and for the device."""
        dist.barrier()
        self.synchronize()


def make_rows(
    part: str,
    case: str,
    samples: Mapping[str, Sequence[Times]],
    **figures: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """Yield a row for each system.

    Args:
        part: Of the benchmark.
        case: What the systems are compared in.
        samples: Of all systems.
        figures: More columns: each has values by the system's name.
    """
    for name, rounds in samples.items():
        yield {
            "part": part,
            "case": case,
            "system": name,
            "median_s": median(times.device_s for times in rounds),
            "host_s": median(times.host_s for times in rounds),
            "rounds_s": [times.device_s for times in rounds],
            **{key: values[name] for key, values in figures.items() if name in values},
        }
