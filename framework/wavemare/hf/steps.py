# SPDX-License-Identifier: Apache-2.0
"""Micro-batches as whole optimizer steps, and losses that are means over the labels of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from transformers.utils.generic import ModelOutput

from wavemare.engine.checkpoint.random_state import drawn_alike
from wavemare.engine.pipe.micro_batch import to_device
from wavemare.models import TransformerPipeline
from wavemare.models.families import SplitLoss

_IGNORED = -100


class StepFeed:
    """The micro-batches of an epoch, for the Trainer and for an engine that reads ahead.

    Iteration gives the engine's micro-batches: ``micro_batches`` for each step.

    Args:
        source: The Trainer's iterator over an epoch.
        micro_batches: Number per optimizer step; the last step of an epoch may read fewer.
        make: Makes the ``micro_batches`` micro-batches of a step from the batches read for it.
        seed: Seed of the run.
        epoch: Number of the epoch.
        data_rank: Rank among the data ranks.
    """

    def __init__(
        self,
        source: Iterator[Any],
        *,
        micro_batches: int,
        make: Callable[[list[Any]], list[Any]],
        seed: int,
        epoch: int = 0,
        data_rank: int = 0,
    ) -> None:
        self.source = source
        self._drawn = drawn_alike(source, seed, epoch=epoch, data_rank=data_rank)
        self._micro_batches = micro_batches
        self._make = make
        self._steps: dict[int, tuple[list[Any], list[Any]]] = {}  # what was read and made for each
        self._trained = self._given = 0

    def next_step(self) -> list[Any]:
        """Return the batches of the Trainer's next step; empty at the end of the epoch."""
        step = self._step(self._trained)
        self._steps.pop(self._trained - 1, None)
        self._trained += 1
        return step[0] if step is not None else []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        number, place = divmod(self._given, self._micro_batches)
        step = self._step(number)
        if step is None:
            raise StopIteration
        self._given += 1
        return step[1][place]

    def _step(self, number: int) -> tuple[list[Any], list[Any]] | None:
        if number not in self._steps:  # it is the next one that is read
            read = list(islice(self._drawn, self._micro_batches))
            if not read:
                return None
            self._steps[number] = read, self._make(read)
        return self._steps[number]


def fill_rows(batch: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Fill a short batch up to so many rows with its own, whose integer labels become -100."""
    count = max((len(v) for v in batch.values() if isinstance(v, Tensor) and v.ndim), default=rows)
    if count >= rows:
        return dict(batch)
    index = torch.arange(rows) % count
    full = {
        name: value[index.to(value.device)]
        if isinstance(value, Tensor) and value.ndim and len(value) == count
        else value
        for name, value in batch.items()
    }
    labels = full.get("labels")
    if labels is not None and not labels.is_floating_point():
        labels[count:] = _IGNORED
    return full


class StepLoss:
    """A micro-batch's part of the mean over all labels of an optimizer step.

    Labels come as (labels, weight, items): the micro-batch's mean is multiplied by ``weight``, and
    ``items`` is what a ``compute_loss_func`` divides its sum by. The mean over micro-batches and
    data ranks is then the mean over the step's labels. Plain labels have weight 1.

    Args:
        loss: The model's loss of (logits, labels), a mean over labels.
        smoother: transformers' label smoother, or None.
        shifts: Whether the smoother compares each position with the label after it.
        function: The Trainer's ``compute_loss_func``, or None.
    """

    def __init__(
        self,
        loss: Callable[..., Tensor],
        *,
        smoother: Any = None,
        shifts: bool = False,
        function: Callable[..., Tensor] | None = None,
    ) -> None:
        self.inner = loss
        self._smoother = smoother
        self._shifts = shifts
        self._function = function

    def __call__(self, logits: Any, labels: Any) -> Tensor:
        """Return the weighted loss of a micro-batch; scalar."""
        if not isinstance(labels, (tuple, list)):
            return self._mean(logits, labels)
        labels, weight, items = labels
        if self._function is None:
            return self._mean(logits, labels) * weight
        outputs = ModelOutput(logits=whole_logits(self, logits))
        return self._function(outputs, labels, num_items_in_batch=items) * (weight > 0)

    def _mean(self, logits: Any, labels: Tensor) -> Tensor:
        if self._smoother is None:
            return self.inner(logits, labels)
        return self._smoother((whole_logits(self, logits),), labels, shift_labels=self._shifts)


def whole_logits(loss: Any, logits: Any) -> Any:
    """Return the last stage's logits over the whole vocabulary, from tensor-parallel ranks."""
    inner = loss.inner if isinstance(loss, StepLoss) else loss
    logits = logits[0] if isinstance(logits, tuple) else logits  # beside the sums of routers
    return inner.gather(logits) if isinstance(inner, SplitLoss) else logits


def weighted_labels(
    batches: Sequence[Mapping[str, Any]], micro_batches: int, *, shifts: bool, group: Any = None
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return the labels of a step's micro-batches as `StepLoss` takes them.

    Args:
        batches: The batches that were read; micro-batches beyond them repeat them, with weight 0.
        micro_batches: Number per step.
        shifts: Whether labels are shifted, so that the first label of each row does not count.
        group: Data-parallel ranks whose labels count together; None for this rank alone.
    """
    labels = [batch["labels"] for batch in batches]
    counts = [_count(one, shifts) for one in labels]
    total = torch.stack(counts).sum()
    ranks = 1
    if group is not None:
        dist.all_reduce(total, group=group)
        ranks = dist.get_world_size(group)
    items = total.clamp(min=1) / (micro_batches * ranks)
    weighted = [
        # The mean over no label is NaN, also with weight 0.
        (torch.where(count > 0, one, torch.zeros_like(one)), count / items, items)
        for one, count in zip(labels, counts, strict=True)
    ]
    zero = torch.zeros_like(items)
    repeated = (weighted[n % len(batches)] for n in range(len(batches), micro_batches))
    return weighted + [(one, zero, items) for one, _, items in repeated]


def _count(labels: Tensor, shifts: bool) -> Tensor:
    counted = labels[..., 1:] if shifts else labels
    if counted.is_floating_point():
        return torch.tensor(float(len(labels)), device=labels.device)
    return (counted != _IGNORED).sum().to(torch.float32)


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
