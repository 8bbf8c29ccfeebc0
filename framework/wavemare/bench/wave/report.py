# SPDX-License-Identifier: Apache-2.0
"""From what the ranks measured to the rows of the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

from wavemare.bench.wave.request import BASELINE, DOMINO, IN_PHASE, TICK_TOCK, WaveRequest
from wavemare.pipeline.clock.simulate import Costs
from wavemare.pipeline.wave.gain import Prediction, decide, predict

__all__ = ["Sample", "Setting", "build_result", "exposed_share"]


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
    """What was measured over links of one speed.

    Args:
        exposed: The percentage of accumulation's time that collectives should take.
        mbit: Speed of the links; None for as fast as they go.
        samples: All rounds of each system.
        costs: Of accumulation's passes and collectives.
    """

    exposed: int
    mbit: float | None
    samples: Mapping[str, Sequence[Sample]]
    costs: Costs


def exposed_share(samples: Sequence[Sample]) -> float:
    """Return the median share of the time in which collectives run and nothing else does."""
    return median(sample.waiting_s / sample.seconds for sample in samples)


def build_result(
    request: WaveRequest,
    settings: Sequence[Setting],
    *,
    num_segments: int,
    split_loss: float,
    peaks: Mapping[str, int],
    bitwise: Mapping[str, bool],
    repeated: int = 0,
    disturbed: int = 0,
) -> dict[str, Any]:
    """Return what is written to the file, but for command and machine.

    Args:
        request: What was asked for.
        settings: What came out.
        num_segments: Of the model, with the head.
        split_loss: How much longer two halves of a micro-batch take than the whole.
        peaks: For each system, the most bytes that autograd kept.
        bitwise: Whether each system's gradients are accumulation's, bit for bit.
        repeated: Steps that other programs disturbed and that did not count.
        disturbed: Those that did count.
    """
    rows: list[dict[str, Any]] = []
    auto = []
    for setting in settings:
        prediction = predict(
            setting.costs, num_segments, request.micro_batches, split_loss=split_loss
        )
        rows += _rows(request, setting, prediction)
        decision = decide(prediction, request.micro_batches)
        auto.append({"exposed": setting.exposed / 100, **decision._asdict()})
    return {
        "baseline": BASELINE,
        "request": asdict(request),
        "split_loss": split_loss,
        "steps": {"repeated": repeated, "disturbed": disturbed},
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


def _rows(request: WaveRequest, setting: Setting, prediction: Prediction) -> list[dict[str, Any]]:
    models = {
        BASELINE: prediction.accumulation,
        IN_PHASE: prediction.in_phase,
        DOMINO: prediction.domino,
        TICK_TOCK: prediction.tick_tock,
    }
    before = median(sample.seconds for sample in setting.samples[BASELINE])
    rows = []
    for name, samples in setting.samples.items():
        own = median(sample.seconds for sample in samples)
        rows.append(
            {
                "system": name,
                "ranks": request.ranks,
                "exposed": setting.exposed / 100,
                "measured_exposed": exposed_share(setting.samples[BASELINE]),
                "mbit": setting.mbit,
                "micro_batches": request.micro_batches,
                "median_s": own,
                "ratio": before / own,
                "model": prediction.accumulation.step_s / models[name].step_s,
                "waiting": exposed_share(samples),
                "compute_s": median(sample.compute_s for sample in samples),
                "rounds_s": [sample.seconds for sample in samples],
            }
        )
    return rows
