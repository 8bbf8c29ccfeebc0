# SPDX-License-Identifier: Apache-2.0
"""A rank of ``benchmarks wave``: compare gradients and memory, then measure times."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cluster.limits import ask
from benchmarks.ranks import interleaved, ratio_row
from benchmarks.traces import save_traces
from benchmarks.wave.links import adjusted_mbit, link_mbit, sent_bytes
from benchmarks.wave.request import BASELINE, DOMINO, IN_PHASE, SYSTEMS, TICK_TOCK, WaveRequest
from benchmarks.wave.saved_bytes import SavedBytes
from benchmarks.wave.systems import HALVES, StepRecorder, Systems, check_gradients
from wavemare.engine.launch.group import gather
from wavemare.observe import Screen
from wavemare.pipeline.clock.simulate import Costs, Event
from wavemare.pipeline.plan.plan import Kind
from wavemare.pipeline.wave.gain import costs_of_segments, decide, predict


def median_seconds(events: Iterable[Event]) -> dict[tuple[Kind, int], float]:
    """Return the median times of the parts of passes, and of the waits, by kind and place."""
    seconds: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for action, start_s, end_s in events:
        seconds[action.kind, action.stage].append(end_s - start_s)
    return {place: median(seconds[place]) for place in sorted(seconds)}


_TRIALS = 2
_CLOSE = 0.02


class Sample(NamedTuple):
    """One step of one system.

    Args:
        seconds: Of the slowest rank.
        compute_s: In passes, mean over the ranks.
        waiting_s: In waiting for collectives, mean over the ranks.
    """

    seconds: float
    compute_s: float
    waiting_s: float


@dataclass(frozen=True)
class Setting:
    """The measurements over links of one speed.

    Args:
        exposed: Wanted percentage of exposed collectives in accumulation.
        mbit: Speed of the links; None for no limit.
        samples: All rounds of each system.
        costs: Of accumulation's passes and collectives.
    """

    exposed: int
    mbit: float | None
    samples: Mapping[str, Sequence[Sample]]
    costs: Costs


def _waiting_s(samples: Sequence[Sample]) -> float:
    return median(sample.waiting_s for sample in samples)


def exposed_share(samples: Sequence[Sample]) -> float:
    """Return the median share of the time in which only collectives run."""
    return median(sample.waiting_s / sample.seconds for sample in samples)


def measure(request: WaveRequest) -> dict[str, Any]:
    """Check gradients, count memory, and measure all systems at all shares.

    Raises:
        CommError: Gradients differ from accumulation's.
    """
    torch.set_num_threads(1)
    screen = Screen(rank=dist.get_rank())
    systems = Systems(request)
    screen.note("comparing gradients and memory")
    bitwise, peaks = _examine(systems)
    bench = _Bench(request, systems)
    split_loss = bench.median_compute(HALVES) / bench.compute_s - 1
    mbit = {percent: bench.find_speed(percent / 100) for percent in request.exposed}
    for percent, speed in mbit.items():
        if speed is not None:
            screen.note(f"{percent} % exposed: links of {speed:.0f} Mbit/s")
    samples: dict[int, dict[str, list[Sample]]] = {
        percent: {name: [] for name in SYSTEMS} for percent in mbit
    }
    events: dict[int, list[Event]] = {percent: [] for percent in mbit}
    last: dict[tuple[str, str], list[Event]] = {}
    turns = [(percent, name) for percent in mbit for name in SYSTEMS]
    for timed, (percent, name) in interleaved(request, turns, screen.note):
        bench.shape(mbit[percent])
        sample, noted = bench.step(name)
        last[f"{percent}-percent", f"{name}, {percent} % exposed"] = noted
        if timed:
            samples[percent][name].append(sample)
            events[percent] += noted if name == BASELINE else []
    if request.trace is not None:
        traces = {key: gather(noted) for key, noted in last.items()}
        if dist.get_rank() == 0:
            save_traces(request.trace, traces)
    settings = []
    for percent, speed in mbit.items():
        costs, num_segments = bench.costs(events[percent])
        settings.append(Setting(percent, speed, samples[percent], costs))
    return build_result(
        request,
        settings,
        num_segments=num_segments,
        split_loss=split_loss,
        peaks=peaks,
        bitwise=bitwise,
    )


def build_result(
    request: WaveRequest,
    settings: Sequence[Setting],
    *,
    num_segments: int,
    split_loss: float,
    peaks: Mapping[str, int],
    bitwise: Mapping[str, bool],
) -> dict[str, Any]:
    """Return the result without command and machine.

    Args:
        request: The options.
        settings: The measurements.
        num_segments: Of the model, with the head.
        split_loss: How much longer two halves of a micro-batch take than the whole.
        peaks: For each system, the most bytes that autograd kept.
        bitwise: Whether each system's gradients are accumulation's, bit for bit.
    """
    rows: list[dict[str, Any]] = []
    auto = []
    for setting in settings:
        prediction = predict(
            setting.costs, num_segments, request.micro_batches, split_loss=split_loss
        )
        models = {
            BASELINE: prediction.accumulation,
            IN_PHASE: prediction.in_phase,
            DOMINO: prediction.domino,
            TICK_TOCK: prediction.tick_tock,
        }
        before = setting.samples[BASELINE]
        exposed_s = _waiting_s(before)
        for name, samples in setting.samples.items():
            seconds = [sample.seconds for sample in samples]
            rows.append(
                {
                    "system": name,
                    "ranks": request.ranks,
                    "compute": request.compute,
                    "exposed": setting.exposed / 100,
                    "measured_exposed": exposed_share(before),
                    "mbit": setting.mbit,
                    "micro_batches": request.micro_batches,
                    **ratio_row(seconds, [sample.seconds for sample in before]),
                    "model": prediction.accumulation / models[name],
                    "waiting": exposed_share(samples),
                    "hidden": 1 - _waiting_s(samples) / exposed_s if exposed_s else None,
                    "compute_s": median(sample.compute_s for sample in samples),
                }
            )
        decision = decide(prediction)
        auto.append({"exposed": setting.exposed / 100, **decision._asdict()})
    return {
        "baseline": BASELINE,
        "request": request.model_dump(mode="json", exclude={"trace"}),
        "split_loss": split_loss,
        "rows": rows,
        "auto": auto,
        "memory": [
            {
                "system": name,
                "peak_bytes": peak,
                "of_accumulation": peak / peaks[BASELINE],
                "of_in_phase": peak / peaks[IN_PHASE],
                "bitwise": bitwise[name],
            }
            for name, peak in peaks.items()
        ],
    }


class _Bench:
    """Measures steps over links that start without a limit.

    Attributes:
        compute_s: Seconds in passes of an accumulation step.
    """

    def __init__(self, request: WaveRequest, systems: Systems) -> None:
        self._shaped = any(request.exposed)
        self._systems = systems
        count = request.micro_batches * systems.sums_per_micro_batch
        self._sent = sent_bytes(count * request.activation_bytes, request.ranks)
        self._mbit: float | None = None
        self.compute_s = self.median_compute(BASELINE)

    def find_speed(self, share: float) -> float | None:
        """Return the speed at which a share is exposed; one trial corrects it."""
        if not share:
            return None
        mbit = link_mbit(share, self.compute_s, self._sent)
        self.shape(mbit)
        trials = [self.step(BASELINE)[0] for _ in range(_TRIALS)]
        if abs(exposed_share(trials) - share) <= _CLOSE:
            return mbit
        compute_s = median(trial.compute_s for trial in trials)
        waiting_s = median(trial.waiting_s for trial in trials)
        return adjusted_mbit(mbit, share, self._sent, compute_s=compute_s, waiting_s=waiting_s)

    def costs(self, events: list[Event]) -> tuple[Costs, int]:
        """Return what accumulation's segments cost, mean over the ranks, and how many there are."""
        medians = median_seconds(events)
        seconds = _mean(torch.tensor(list(medians.values()))).tolist()
        return costs_of_segments(dict(zip(medians, seconds, strict=True)))

    def shape(self, mbit: float | None) -> None:
        """Set the links' speed."""
        if not self._shaped or mbit == self._mbit:
            return
        dist.barrier()
        if dist.get_rank() == 0:
            ask(mbit)
        dist.barrier()
        self._mbit = mbit

    def median_compute(self, name: str) -> float:
        """Return the seconds in passes of a system's step."""
        return median(self.step(name)[0].compute_s for _ in range(_TRIALS))

    def step(self, name: str) -> tuple[Sample, list[Event]]:
        """Run a step from a barrier to the end of the slowest rank; return this rank's events."""
        recorder = StepRecorder()
        self._systems.clear()
        dist.barrier()
        started = time.perf_counter()
        self._systems.step(name, recorder)
        slowest = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        parts = _mean(torch.tensor([recorder.compute_s, recorder.waiting_s])).tolist()
        return Sample(float(slowest), *parts), recorder.events


def _mean(values: Tensor) -> Tensor:
    """Return the mean over the ranks."""
    total = values.double()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def _examine(systems: Systems) -> tuple[dict[str, bool], dict[str, int]]:
    """Run a step of each system; return whether gradients are bit-identical, and peak bytes."""
    bitwise, peaks = {}, {}
    expected = None
    for name in SYSTEMS:  # the first one is the baseline
        counted = SavedBytes(systems.model)
        systems.clear()
        systems.step(name, saved_tensors=counted.hooks)
        own = systems.gradients()
        expected = own if expected is None else expected
        bitwise[name], peaks[name] = check_gradients(name, own, expected), counted.peak
    return bitwise, peaks
