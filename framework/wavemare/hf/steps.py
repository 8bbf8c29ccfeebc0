# SPDX-License-Identifier: Apache-2.0
"""Micro-batches as whole optimizer steps, each with its weight in the step's mean loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from wavemare.engine.checkpoint.random_state import drawn_alike
from wavemare.engine.labels import IGNORED, count_labels
from wavemare.models import TransformerPipeline
from wavemare.models.packed import whole_arguments


class StepFeed:
    """The micro-batches of an epoch, for the Trainer and for an engine that reads ahead.

    Iteration gives the engine's micro-batches: ``micro_batches`` for each step.

    Args:
        source: The Trainer's iterator over an epoch.
        micro_batches: Number per optimizer step; the last step of an epoch may read fewer.
        read: Prepares a batch as soon as it has been read.
        make: Makes the ``micro_batches`` micro-batches of a step from the batches read for it.
        seed: Seed of the run.
        epoch: Number of the epoch.
    """

    def __init__(
        self,
        source: Iterator[Any],
        *,
        micro_batches: int,
        make: Callable[[list[Any]], list[Any]],
        read: Callable[[Any], Any] = lambda batch: batch,
        seed: int,
        epoch: int = 0,
    ) -> None:
        self.source = source
        self._drawn = map(read, drawn_alike(source, seed, epoch=epoch))
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
    """Fill a short batch up to so many rows with its own, whose integer labels become -100.

    Rows of a flattened batch, which is one row with the positions of many, are no samples: it stays
    as it is.
    """
    count = max((len(v) for v in batch.values() if isinstance(v, Tensor) and v.ndim), default=rows)
    if count >= rows or (count == 1 and "position_ids" in batch):
        return dict(batch)
    index = torch.arange(rows) % count
    full = {
        name: value[index.to(value.device)]
        if isinstance(value, Tensor) and value.ndim and len(value) == count
        else value
        for name, value in batch.items()
    }
    return without_labels(full, count)


def without_labels(batch: Mapping[str, Any], first: int) -> dict[str, Any]:
    """Return a batch whose rows from this one on count for nothing; float labels stay.

    Their attention mask becomes zero, so that routers do not count them either.
    """
    changed = dict(batch)
    for name, value in (("labels", IGNORED), ("attention_mask", 0)):
        given = changed.get(name)
        if given is None or first >= len(given) or given.is_floating_point():
            continue
        changed[name] = given.clone()
        changed[name][first:] = value
    return changed


class MicroBatch(NamedTuple):
    """A micro-batch, with what its loss depends on beside it.

    Args:
        inputs: The batch by name.
        items: Number of labels of the step on all data ranks, as transformers counts them; None
            if it does not.
        weight: Of the loss in the mean over the engine's micro-batches; 0 for one that fills up a
            short step.
    """

    inputs: dict[str, Any]
    items: Tensor | None
    weight: float

    @property
    def whole(self) -> dict[str, Any]:
        """What the rank has read, by which the stages compare."""
        return self.inputs


class Unused:
    """In place of the labels on a stage that takes none: it only says what the rank has read.

    Args:
        whole: The batch by name.
    """

    def __init__(self, whole: dict[str, Any]) -> None:
        self.whole = whole


class _LossOfItems:
    """A pipeline's loss of outputs, and of labels with their number of items, or plain labels.

    Args:
        loss: Of outputs, labels and number of items.

    Attributes:
        main: The same.
    """

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        self.main = loss

    def __call__(self, outputs: Any, labelled: Any) -> Tensor:
        return self.main(outputs, *(labelled if isinstance(labelled, tuple) else (labelled,)))


class TokenMean:
    """The loss of a causal model as the mean over the labels of a step.

    DeepSpeed averages over micro-batches and data ranks. Micro-batches that `weigh_steps` or
    `weigh` has weighted by their labels make that average the mean over all labels of the step
    other than -100, however they are spread.

    Args:
        engine: Of `wavemare.initialize`; a pipeline's loss function is replaced.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        if isinstance(engine.module, TransformerPipeline) and engine.module.loss_fn is not None:
            head = engine.module.loss_fn
            if not isinstance(head, _LossOfItems):  # another one has replaced it before
                engine.module.loss_fn = _LossOfItems(head)

    def weigh_steps(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the micro-batches of whole steps, reading one step at a time.

        Args:
            batches: Micro-batches by name.
        """
        source = iter(batches)
        while True:
            count = self._engine.gradient_accumulation_steps()
            step = list(islice(source, count))
            if len(step) < count:
                return
            yield from self.weigh(step)

    def weigh(self, batches: Iterable[Any]) -> list[Any]:
        """Return the micro-batches of a step or an evaluation; all data ranks call this."""
        engine, batches = self._engine, list(batches)
        is_pipeline = isinstance(engine.module, TransformerPipeline)
        if is_pipeline and not engine.is_last_stage():
            return batches
        # Inputs stay on the host until they are checked there.
        labels = [batch["labels"].to(engine.device) for batch in batches]
        total = torch.stack([count_labels(one, shifts=True) for one in labels]).sum()
        group = engine.ranks.replica_group
        dist.all_reduce(total, group=group)
        items = total.clamp(min=1) / (len(batches) * dist.get_world_size(group))
        if is_pipeline:
            inputs = [engine.module.split_batch(batch)[0] for batch in batches]
            return [(one, (own, items)) for one, own in zip(inputs, labels, strict=True)]
        # The model divides its sum by the number. A cache would hide that rows are packed.
        more = {"num_items_in_batch": items, "use_cache": False}
        return [{**b, **whole_arguments(engine.module, b, engine.device), **more} for b in batches]
