# SPDX-License-Identifier: Apache-2.0
"""One rank of ``wavemare bench wave``: told by a file what to measure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wavemare.bench.answer import answer
from wavemare.bench.rounds import rotated
from wavemare.bench.wave.disturbance import Patience
from wavemare.bench.wave.links import adjusted_mbit, ask_for_links, link_mbit, sent_bytes
from wavemare.bench.wave.live import LiveBytes
from wavemare.bench.wave.record import StepRecorder, median_seconds
from wavemare.bench.wave.report import Sample, Setting, build_result, exposed_share
from wavemare.bench.wave.request import BASELINE, SYSTEMS, TICK_TOCK, WaveRequest
from wavemare.bench.wave.show import draw_memory
from wavemare.bench.wave.slices import ask_for_short_slices
from wavemare.bench.wave.systems import HALVES, Systems, check_gradients
from wavemare.bench.wave.trace import save_trace
from wavemare.failure import run_main
from wavemare.observe import Screen
from wavemare.pipeline.clock.simulate import Costs
from wavemare.pipeline.clock.timeline import Event

__all__ = ["main"]

_TRIALS = 2
_CLOSE = 0.02


def main() -> None:
    """Measure what the request asks for; rank 0 leaves the result."""
    ask_for_short_slices()  # before gloo starts its threads
    answer(WaveRequest, measure)


def measure(request: WaveRequest) -> dict[str, Any]:
    """Check, measure memory and then times; return the result of rank 0."""
    torch.set_num_threads(1)
    screen = Screen(rank=dist.get_rank())
    systems = Systems(request)
    screen.note("comparing gradients and memory")
    bitwise, kept = _examine(systems)
    if request.memory is not None and dist.get_rank() == 0:
        curves = {name: live.curve for name, live in kept.items()}
        draw_memory(curves, TICK_TOCK, Path(request.memory))
    bench = _Bench(request, systems, screen)
    split_loss = bench.split_loss()
    settings = bench.measure()
    save_trace(request, systems)
    return build_result(
        request,
        settings,
        num_segments=systems.num_segments,
        split_loss=split_loss,
        peaks={name: live.peak for name, live in kept.items()},
        bitwise=bitwise,
        repeated=bench.patience.repeated,
        disturbed=bench.patience.disturbed,
    )


class _Bench:
    """Measures over links of several speeds, of which the first are as fast as they go.

    Args:
        request: What to measure.
        systems: What is measured.
        screen: Shows the progress.

    Attributes:
        patience: Decides which steps count.
    """

    def __init__(self, request: WaveRequest, systems: Systems, screen: Screen) -> None:
        self._request = request
        self._systems = systems
        self._screen = screen
        count = request.micro_batches * systems.sums_per_micro_batch
        self._sent = sent_bytes(count * request.carry_bytes, request.ranks)
        self.patience = Patience(request.patience)
        self._compute_s = self._median_compute(BASELINE)

    def split_loss(self) -> float:
        """Return how much longer halves of micro-batches compute than wholes: 0.1 for 10 %."""
        return self._median_compute(HALVES) / self._compute_s - 1

    def measure(self) -> list[Setting]:
        """Measure all systems at all shares, which take turns, too."""
        request = self._request
        speeds = {percent: self._find_speed(percent / 100) for percent in request.exposed}
        samples: dict[int, dict[str, list[Sample]]] = {
            percent: {name: [] for name in SYSTEMS} for percent in speeds
        }
        before: dict[int, list[Event]] = {percent: [] for percent in speeds}
        total = request.warmups + request.rounds
        for turn in range(total):
            self._screen.note(f"round {turn + 1} of {total}")
            for percent, mbit in speeds.items():
                self._ask(mbit)
                for name in rotated(SYSTEMS, turn):
                    sample, events = self._step(name)
                    if turn >= request.warmups:
                        samples[percent][name].append(sample)
                        before[percent] += events if name == BASELINE else []
        return [
            Setting(percent, mbit, samples[percent], self._costs(before[percent]))
            for percent, mbit in speeds.items()
        ]

    def _find_speed(self, share: float) -> float | None:
        """Return the links' speed at which a share is exposed, which is tried, and mended once."""
        if not share:
            return None
        mbit = link_mbit(share, self._compute_s, self._sent)
        self._ask(mbit)
        trials = self._trials(BASELINE)
        if abs(exposed_share(trials) - share) > _CLOSE:
            mbit = adjusted_mbit(
                mbit,
                share,
                self._sent,
                compute_s=median(trial.compute_s for trial in trials),
                waiting_s=median(trial.waiting_s for trial in trials),
            )
        self._screen.note(f"{share:.0%} exposed: links of {mbit:.0f} Mbit/s")
        return mbit

    def _costs(self, events: list[Event]) -> Costs:
        """Return what accumulation's passes and collectives cost, mean over the ranks."""
        table = torch.tensor(median_seconds(events, self._systems.num_segments))
        forward, backward, output, gradient = map(tuple, _mean(table).tolist())
        return Costs(
            forward_s=forward, backward_s=backward, sum_output_s=output, sum_gradient_s=gradient
        )

    def _ask(self, mbit: float | None) -> None:
        dist.barrier()
        if self._request.links is not None and dist.get_rank() == 0:
            ask_for_links(Path(self._request.links), mbit)
        dist.barrier()

    def _median_compute(self, name: str) -> float:
        return median(sample.compute_s for sample in self._trials(name))

    def _trials(self, name: str) -> Sequence[Sample]:
        return [self._step(name)[0] for _ in range(_TRIALS)]

    def _step(self, name: str) -> tuple[Sample, list[Event]]:
        """Run a step, again if other programs have disturbed it; return its events on this rank."""
        while True:
            recorder = StepRecorder()
            seconds = self._run(name, recorder)
            if self.patience.accepts():
                break
        compute_s, waiting_s = _mean(
            torch.tensor([recorder.compute_s, recorder.waiting_s])
        ).tolist()
        return Sample(seconds, compute_s, waiting_s), recorder.events

    def _run(self, name: str, recorder: StepRecorder) -> float:
        """Run a step from a barrier to the end of the slowest rank; return its seconds."""
        self._systems.clear()
        dist.barrier()
        self.patience.begin()
        started = time.perf_counter()
        self._systems.step(name, recorder.record)
        slowest = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest)


def _mean(values: Tensor) -> Tensor:
    """Return the mean over the ranks."""
    total = values.double()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def _examine(systems: Systems) -> tuple[dict[str, bool], dict[str, LiveBytes]]:
    """Run a step of each system: compare its gradients with accumulation's, and count its bytes.

    Returns:
        For each system whether the gradients are equal bit for bit, and what autograd kept.
    """
    bitwise, kept = {}, {}
    expected = None
    for name in SYSTEMS:  # the first one is the baseline
        live = LiveBytes(systems.model)
        with live.hooks():
            own = systems.gradients(name, live.record)
        expected = own if expected is None else expected
        bitwise[name], kept[name] = check_gradients(name, own, expected), live
    return bitwise, kept


if __name__ == "__main__":
    run_main(main)
