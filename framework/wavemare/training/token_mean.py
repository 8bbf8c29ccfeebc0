# SPDX-License-Identifier: Apache-2.0
"""Losses that are means over the labels of a whole optimizer step, on all engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from wavemare.engine.pipe.micro_batch import to_device
from wavemare.hf.steps import StepLoss, weighted_labels
from wavemare.models import TransformerPipeline


class TokenMean(Iterator[Any]):
    """Micro-batches of a causal model, weighted by their labels.

    DeepSpeed averages over micro-batches and data ranks. That average becomes the mean over all
    labels of the step other than -100, however they are spread.

    Args:
        engine: Of `wavemare.initialize`; a pipeline's loss function is replaced.
        batches: Micro-batches by name, without end.
    """

    def __init__(self, engine: Any, batches: Iterator[Any]) -> None:
        self._engine, self._batches = engine, batches
        self._step: deque[Any] = deque()
        if isinstance(engine.module, TransformerPipeline) and engine.module.loss_fn is not None:
            engine.module.loss_fn = StepLoss(engine.module.loss_fn)

    def __next__(self) -> Any:
        if not self._step:
            count = self._engine.gradient_accumulation_steps()
            self._step.extend(self.weigh([next(self._batches) for _ in range(count)]))
        return self._step.popleft()

    def weigh(self, batches: Iterable[Any]) -> list[Any]:
        """Return the micro-batches of a step or an evaluation; all data ranks call this."""
        engine, batches = self._engine, list(batches)
        is_pipeline = isinstance(engine.module, TransformerPipeline)
        if is_pipeline and not engine.is_last_stage():
            return batches
        # Inputs stay on the host until they are checked there.
        own, group = to_device(batches, engine.device), engine.data_parallel_group
        labels = weighted_labels(own, len(own), shifts=True, group=group)
        if is_pipeline:
            inputs = [engine.module.split_batch(batch)[0] for batch in batches]
            return list(zip(inputs, labels, strict=True))
        # transformers divides the sum by the number. A cache would hide that rows are packed.
        return [
            {**batch, "num_items_in_batch": items, "use_cache": False}
            for batch, (_, _, items) in zip(batches, labels, strict=True)
        ]

    def loss(self, batches: Iterable[Any]) -> float:
        """Return the mean loss over the labels of a rank's micro-batches, and the other ranks'."""
        weighted = self.weigh(batches)
        return float(self._engine.eval_batch(iter(weighted), num_micro_batches=len(weighted)))
