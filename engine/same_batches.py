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
from wavemare.engine.observe.choices import tell_warning
from wavemare.errors import DataError

if TYPE_CHECKING:
    from wavemare.engine.base import EngineMixin

Digests = tuple[float, float]
"""Of the inputs and of the labels of a micro-batch, whole numbers; 0 if not known."""
NONE: Digests = (0.0, 0.0)
Marks = tuple[float, float, float, float]
"""Digests of a micro-batch, and together those of the ones before it that no message had."""
UNKNOWN: Marks = (*NONE, *NONE)
COMPARED_EACH = 64
"""Steps or passes after which ranks compare at the latest, where that makes them wait."""
_SAMPLE = 4096
"""Elements of a tensor of which a digest is made."""
_STRIDE = 2_654_435_761
"""A prime: so samples lie in all columns, whatever the length of a row."""
_DIGEST_BYTES = 6
"""A float64 holds whole numbers of so many bytes."""
_ROUNDING = 1e-6
"""By how much, relatively, losses may differ."""
_UNLIKE_LOSSES = (
    "unlike losses: ranks {} and {} share the layers of one model, and their losses are {:g} and"
    " {:g}. A term of the loss is computed from what a rank has alone, such as a penalty over"
    " model.parameters(), which are parts of split weights. Of a sum over weights the gradients are"
    " right, and the loss that is shown is not. Or the model draws random numbers that the ranks do"
    " not share"
)
_PRIME, _FACTOR = 2**53 - 111, 1_000_003
"""Of the sum of digests, which a float64 holds, too."""


class SameBatches(Feature):
    """Compares micro-batches of an engine among the ranks of its model.

    In a pipeline activations carry the marks of their batches from the first stage to the last one,
    which compares them with its own: no rank waits for it. With synchronous schedules only the
    first activation of a step or an evaluation has such numbers. It carries the marks of its own
    batch, and those of the other ones of the step before. Ranks that split layers compare by a
    collective, see `is_due`; without stages also after each checkpoint and evaluation.

    Args:
        group: Ranks that all read, and meet in each pass; None if this one reads alone.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._passes = 0
        self._is_soon = False
        self._compares_loss = self._has_told = False
        self._before = NONE

    def before_forward(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Compare what the whole model gets in a forward pass of training."""
        self._passes += 1
        if self._is_soon or is_due(self._passes):
            self._is_soon = False
            batch = (inputs, keywords)
            self.read((batch, batch), may_wait=True)

    def before_backward(self, loss: Tensor) -> Tensor:
        """Compare the losses of ranks that have compared their batches, and warn if they differ."""
        if self._compares_loss and not self._has_told:
            ranks = torch.distributed.get_process_group_ranks(self._group)
            found = gather(loss.detach().float().mean().item(), self._group)
            least, most = min(found), max(found)
            # Ranks go on with sums that have the same bits; other devices may round elsewhere.
            if most - least > _ROUNDING * max(abs(least), abs(most)):
                self._has_told = True
                both = [ranks[found.index(value)] for value in (least, most)]
                tell_warning(_UNLIKE_LOSSES.format(*both, least, most))
        self._compares_loss = False
        return loss

    def compare_soon(self) -> None:
        """Compare what the next pass reads; all ranks call it."""
        self._is_soon = True

    def read(
        self, batch: tuple[Any, Any], *, may_wait: bool, uses: Sequence[int] = (0, 1)
    ) -> Digests:
        """Return the digests of a micro-batch that this rank has read, and compare them.

        Args:
            batch: Inputs and labels: tensors in mappings and sequences, or None.
            uses: Which of them the ranks that split layers use: 0 for inputs, 1 for labels.
            may_wait: Whether the host may wait for ranks that split layers, which all say so, and
                for a GPU that holds the batch.

        Raises:
            DataError: Ranks that split layers have different batches; on all of them.
        """
        digests = digests_of(*batch, on_device=may_wait)
        if may_wait and self._group is not None:
            self._compares_loss = torch.is_grad_enabled()
            ranks = torch.distributed.get_process_group_ranks(self._group)
            found = list(zip(ranks, gather(digests, self._group), strict=True))
            for part in uses:
                check([(rank, (each[part], each[part])) for rank, each in found])
        return digests

    def keep(self, digests: Digests) -> None:
        """Add the digests of a micro-batch of which no message goes out."""
        self._before = added(self._before[0], digests[0]), added(self._before[1], digests[1])

    def take(self) -> Digests:
        """Return what was kept, and forget it: another step or other data begin."""
        before, self._before = self._before, NONE
        return before


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


def compare(first: tuple[int, Marks], last: tuple[int, Marks]) -> None:
    """Check that the first and the last stage have read the same micro-batches.

    Args:
        first: The rank of the first stage, and the marks that came with an activation.
        last: This rank, and its own.

    Raises:
        DataError: They have different ones.
    """
    both = (first, last)
    check([(rank, marks[:2]) for rank, marks in both])
    check([(rank, marks[2:]) for rank, marks in both], f"{_ONE} of the step before")


_ONE = "a micro-batch"


def check(found: Sequence[tuple[int, Digests]], what: str = _ONE) -> None:
    """Check that ranks of one model have read the same micro-batch.

    A rank may have a placeholder for the part that it does not need: nothing, or one value
    throughout. So only ranks that differ in both parts are an error.

    Args:
        found: Ranks and the digests of what they have read.
        what: Of which the digests are.

    Raises:
        DataError: Ranks have different batches.
    """
    of_inputs, of_labels = (
        _first_two([(rank, digests[part]) for rank, digests in found]) for part in (0, 1)
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
    raise DataError("data_iter", what, reason, remedy)


def _first_two(found: Sequence[tuple[int, float]]) -> tuple[int, int] | None:
    """Return two ranks that differ; None if there are none."""
    known = [(rank, digest) for rank, digest in found if digest]
    return next(((known[0][0], rank) for rank, digest in known if digest != known[0][1]), None)


def added(total: float, digest: float) -> float:
    """Return a digest of one more micro-batch than before; one that is not known adds nothing."""
    return float((int(total) * _FACTOR + int(digest)) % _PRIME or 1) if digest else total


def digests_of(inputs: Any, labels: Any, *, on_device: bool) -> Digests:
    """Return digests of a micro-batch; 0 for a part whose tensors are all placeholders.

    Labels with an attribute ``whole`` say by it what the rank has read, inputs included: nothing of
    it is a placeholder, and ranks that differ anywhere have different batches.

    Args:
        inputs: Tensors in mappings and sequences, or None.
        labels: Likewise.
        on_device: Whether to read a part that is not on the host, which waits for its device.
    """
    whole = getattr(labels, "whole", None)
    if whole is not None:
        both = _digest(whole, on_device=on_device, all_count=True)
        return both, both
    one = _digest(inputs, on_device=on_device)
    return one, one if labels is inputs else _digest(labels, on_device=on_device)


def _digest(part: Any, *, on_device: bool, all_count: bool = False) -> float:
    tensors = list(_tensors(part))
    if not (on_device or all(tensor.is_cpu for tensor in tensors)):
        return 0.0
    found = map(_sample, tensors)
    samples = [sample for sample, tells in found if tells or all_count]
    if not samples:
        return 0.0
    digest = hashlib.blake2b(b"".join(samples), digest_size=_DIGEST_BYTES).digest()
    return float(int.from_bytes(digest) or 1)


def _sample(tensor: Tensor) -> tuple[bytes, bool]:
    """Return elements of a tensor, all of a small one and some of a large one; and if they tell.

    A placeholder tells nothing: one value throughout. One element alone does, but 0, -100, NaN.
    """
    flat = tensor.detach().reshape(-1)
    if len(flat) > _SAMPLE:
        flat = flat[torch.arange(_SAMPLE, device=flat.device) * _STRIDE % len(flat)]
    flat = flat.cpu()
    found, count = flat.view(torch.uint8).numpy().tobytes(), len(flat)
    if found != found[: flat.element_size()] * count:
        return found, True
    return found, count == 1 and (value := flat.item()) == value and value not in (0, IGNORED)


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
