"""The pipeline engines: DeepSpeed's, fed with Hugging Face batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed

from wavemare.engine.mixin import EngineMixin

__all__ = ["DualPipeVEngine", "PipelineEngine"]


class _Batches:
    """Accepts Hugging Face batches, and batches of another shape for evaluation."""

    def _next_batch(self) -> Any:
        batch = super()._next_batch()  # type: ignore[misc]
        if isinstance(batch, Mapping):
            return self.module.split_batch(batch)  # type: ignore[attr-defined]
        return batch

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as ``deepspeed.PipelineEngine.eval_batch``, whatever the shape of the batch.

        DeepSpeed tells the next stage a shape only once; here before and after an evaluation.
        """
        self.reset_activation_shape()  # type: ignore[attr-defined]
        try:
            return super().eval_batch(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.reset_activation_shape()  # type: ignore[attr-defined]


class PipelineEngine(EngineMixin, _Batches, deepspeed.PipelineEngine):
    """``deepspeed.PipelineEngine`` (1F1B).

    ``train_batch`` returns, on every rank, the mean loss over micro-batches and data ranks.
    """


class DualPipeVEngine(EngineMixin, _Batches, deepspeed.DualPipeVEngine):
    """``deepspeed.DualPipeVEngine``, chosen by a ``DualPipeVModule``."""
