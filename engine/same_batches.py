# SPDX-License-Identifier: Apache-2.0
"""Whether the ranks that hold one model read the same batches.

In a pipeline the first stage takes the inputs and the last stage the labels; with tensor
parallelism every rank takes both. A loader that shuffles by each process's own generator gives them
different samples. The model would learn from inputs and labels that do not belong together. Ranks
that began alike may also part later, where an epoch ends: a loader draws its order from generators
that dropout has moved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wavemare.engine.config.resolve import SECTION
from wavemare.engine.feature import Feature
from wavemare.engine.labels import IGNORED
from wavemare.engine.launch.group import gather
from wavemare.errors import DataError

if TYPE_CHECKING:
    from wavemare.engine.base import EngineMixin

Marks = tuple[float, float]
"""Digests of the inputs and of the labels of a micro-batch, whole numbers; 0 if not known."""
UNKNOWN: Marks = (0.0, 0.0)
COMPARED_EACH = 64
"""Steps or passes after which ranks compare at the latest, where that makes them wait."""
_SAMPLE = 4096
"""Elements of a tensor of which a digest is made."""
_STRIDE = 2_654_435_761
"""A prime: so samples lie in all columns, whatever the length of a row."""
_DIGEST_BYTES = 6
"""A float64 holds whole numbers of so many bytes."""


class SameBatches(Feature):
    """Compares micro-batches of an engine among the ranks of its model.

    In a pipeline the first activation of each step and evaluation carries the marks of its batch
    from the first stage to the last one, which compares them with its own: no rank waits for it.
    Ranks that split layers compare by a collective, see `is_due`; without stages also after each
    checkpoint and evaluation.

    Args:
        group: Ranks that all read, and meet in each pass; None if this one reads alone.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._passes = 0
        self._is_soon = False

    def before_forward(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Compare what the whole model gets in a forward pass of training."""
        self._passes += 1
        if self._is_soon or is_due(self._passes):
            self._is_soon = False
            batch = (inputs, keywords)
            self.read((batch, batch), may_wait=True)

    def compare_soon(self) -> None:
        """Compare what the next pass reads; all ranks call it."""
        self._is_soon = True

    def read(
        self, batch: tuple[Any, Any], *, may_wait: bool, uses: Sequence[int] = (0, 1)
    ) -> Marks:
        """Return the marks of a micro-batch that this rank has read, and compare them.

        Args:
            batch: Inputs and labels: tensors in mappings and sequences, or None.
            uses: Which of them the ranks that split layers use: 0 for inputs, 1 for labels.
            may_wait: Whether the host may wait for ranks that split layers, which all say so, and
                for a GPU that holds the batch.

        Raises:
            DataError: Ranks that split layers have different batches; on all of them.
        """
        marks = marks_of(*batch, on_device=may_wait)
        if may_wait and self._group is not None:
            ranks = torch.distributed.get_process_group_ranks(self._group)
            found = list(zip(ranks, gather(marks, self._group), strict=True))
            for part in uses:
                check([(rank, (each[part], each[part])) for rank, each in found])
        return marks


def attach_same_batches(engine: EngineMixin) -> SameBatches | None:
    """Return the comparison for an engine with our section; None if each rank reads for itself.

    Ranks that share sequences read parts of one batch.
    """
    group = engine.ranks.model_group
    if group is None or engine.sequence_parallel_size > 1 or SECTION not in engine.config:
        return None
    if engine.pipeline_parallelism:
        splits = engine.grid.get_slice_parallel_world_size() > 1
        group = engine.grid.get_slice_parallel_group() if splits else None
    return SameBatches(group)


def is_due(number: int) -> bool:
    """Whether ranks compare in a step or pass, though they wait: in 1, 2, 4, ... 64, 128, 192."""
    return not number & (number - 1) or not number % COMPARED_EACH


def check(found: Sequence[tuple[int, Marks]]) -> None:
    """Check that ranks of one model have read the same micro-batch.

    A rank may have a placeholder for the part that it does not need: nothing, or one value
    throughout. So only ranks that differ in both parts are an error.

    Args:
        found: Ranks and the marks of what they have read.

    Raises:
        DataError: Ranks have different batches.
    """
    of_inputs, of_labels = (
        _first_two([(rank, marks[part]) for rank, marks in found]) for part in (0, 1)
    )
    if of_inputs is None or of_labels is None:
        return
    one, other = of_inputs
    reason = f"ranks {one} and {other} hold one model, and read different batches"
    remedy = (
        "Let them draw alike, in each epoch: give the loader, or a data set or a collator that"
        " draws, a generator of the same seed on all ranks, or a DistributedSampler of"
        " engine.data_world_size and engine.data_rank. Give None for a part that a stage does not"
        " use"
    )
    raise DataError("data_iter", "a micro-batch", reason, remedy)


def _first_two(found: Sequence[tuple[int, float]]) -> tuple[int, int] | None:
    """Return two ranks that differ; None if there are none."""
    known = [(rank, digest) for rank, digest in found if digest]
    return next(((known[0][0], rank) for rank, digest in known if digest != known[0][1]), None)


def marks_of(inputs: Any, labels: Any, *, on_device: bool) -> Marks:
    """Return digests of a micro-batch; 0 for a part whose tensors are all placeholders.

    Args:
        inputs: Tensors in mappings and sequences, or None.
        labels: Likewise.
        on_device: Whether to read a part that is not on the host, which waits for its device.
    """
    one = _digest(inputs, on_device=on_device)
    return one, one if labels is inputs else _digest(labels, on_device=on_device)


def _digest(part: Any, *, on_device: bool) -> float:
    tensors = list(_tensors(part))
    if not (on_device or all(tensor.is_cpu for tensor in tensors)):
        return 0.0
    samples = [sample for sample in map(_sample, tensors) if not _is_placeholder(sample)]
    if not samples:
        return 0.0
    found = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for sample in samples:
        found.update(sample.view(torch.uint8).numpy().tobytes())
    return float(int.from_bytes(found.digest()) or 1)


def _sample(tensor: Tensor) -> Tensor:
    """Return elements of a tensor, on the host: all of a small one, some of a large one."""
    flat = tensor.detach().reshape(-1)
    if len(flat) > _SAMPLE:
        flat = flat[torch.arange(_SAMPLE, device=flat.device) * _STRIDE % len(flat)]
    return flat.cpu().contiguous()


def _is_placeholder(sample: Tensor) -> bool:
    """Whether it tells nothing: one value throughout. One element alone does, but 0, -100, NaN."""
    first = sample[:1]
    is_nan = sample.isnan()
    if not bool(((sample == first) | (is_nan & first.isnan())).all()):
        return False
    return len(sample) != 1 or bool(((sample == 0) | (sample == IGNORED) | is_nan).all())


def _tensors(part: Any) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        if part.layout is torch.strided:
            yield part
    elif isinstance(part, Mapping):
        for name in sorted(part, key=str):
            yield from _tensors(part[name])
    elif isinstance(part, (tuple, list)):
        for each in part:
            yield from _tensors(each)
