"""The pipeline engines: DeepSpeed's, fed with Hugging Face batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed

from wavemare.engine.mixin import EngineMixin

__all__ = ["DualPipeVEngine", "PipelineEngine"]


class _NamedBatches:
    """Accepts a mapping where DeepSpeed's pipeline wants ``(inputs, labels)``."""

    def _next_batch(self) -> Any:
        batch = super()._next_batch()  # type: ignore[misc]
        if isinstance(batch, Mapping):
            return self.module.split_batch(batch)  # type: ignore[attr-defined]
        return batch


class PipelineEngine(EngineMixin, _NamedBatches, deepspeed.PipelineEngine):
    """``deepspeed.PipelineEngine`` (1F1B).

    ``train_batch`` returns, on every rank, the mean loss over micro-batches and data ranks.
    """


class DualPipeVEngine(EngineMixin, _NamedBatches, deepspeed.DualPipeVEngine):
    """``deepspeed.DualPipeVEngine``, chosen by a ``DualPipeVModule``."""
