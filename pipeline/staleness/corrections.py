# SPDX-License-Identifier: Apache-2.0
"""The correction of a stage, by its name."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from wavemare.pipeline.staleness.correction import (
    Correction,
    EmaCorrection,
    ExactCorrection,
    NoCorrection,
)
from wavemare.pipeline.staleness.prediction import WeightPrediction
from wavemare.pipeline.staleness.staleness import ema_decay, ema_decay_from, resolve_mode

__all__ = ["make_correction"]


def make_correction(
    mode: str,
    parameters: Iterable[Tensor],
    max_staleness: int,
    decay_base: float | None = None,
) -> Correction:
    """Return the correction of one stage.

    Args:
        mode: One of `staleness.MODES`; "auto" takes copies up to a staleness of 2, the estimate
            beyond.
        parameters: See `Correction`.
        max_staleness: Largest staleness of the stage, in optimizer steps; at 0 there is nothing to
            correct.
        decay_base: PipeMare's D for the estimate; omitted, the decay is `ema_decay`'s.

    Raises:
        PlanError: There is no such mode, or a number is out of range.
        ModelError: Parameters share a part of their memory.
    """
    resolved = resolve_mode(mode, max_staleness)
    if resolved == "exact":
        return ExactCorrection(parameters, max_staleness)
    if resolved == "ema":
        decay = ema_decay(max_staleness)
        if decay_base is not None:
            decay = ema_decay_from(decay_base, max_staleness)
        return EmaCorrection(parameters, decay, max_staleness)
    if resolved == "predict":
        return WeightPrediction(parameters)
    return NoCorrection(parameters)
