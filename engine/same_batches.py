# SPDX-License-Identifier: Apache-2.0
"""Whether the ranks that hold one model read the same batches.

In a pipeline the first stage takes the inputs and the last stage the labels; with tensor
parallelism every rank takes both. A loader that shuffles by each process's own generator gives them
different samples. The model would learn from inputs and labels that do not belong together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wavemare.engine.config.resolve import SECTION
from wavemare.engine.feature import Feature
from wavemare.engine.launch.group import gather
from wavemare.errors import DataError

if TYPE_CHECKING:
    from wavemare.engine.base import EngineMixin


class SameBatches(Feature):
    """Compares micro-batches of an engine among the ranks of its model.

    Pipelines compare the first one, other engines the first, second, fourth, eighth and so on.
    Ranks that began alike may part where an epoch ends: a loader draws its order from generators
    that dropout has moved. So the others also compare after each checkpoint and evaluation.

    Args:
        group: The ranks that hold the model.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._passes = 0
        self._next = 1

    def before_forward(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Compare what the whole model gets in a forward pass of training."""
        if self.is_due():
            batch = (inputs, keywords)
            self.compare(batch, batch)

    def is_due(self) -> bool:
        """Count a pass; return whether its micro-batch is compared."""
        self._passes += 1
        is_due = self._passes >= self._next
        if is_due:
            self._next = 1 << self._passes.bit_length()
        return is_due

    @property
    def is_first(self) -> bool:
        """Whether the pass that was counted last is the first one."""
        return self._passes == 1

    def compare_soon(self) -> None:
        """Compare what the next pass reads; all ranks call it."""
        self._next = min(self._next, self._passes + 1)

    def compare(self, inputs: Any, labels: Any) -> None:
        """Compare a micro-batch; all ranks of the model call it.

        A rank may have a placeholder for the part that it does not need: nothing, or one value
        throughout. So only ranks that differ in both parts are an error.

        Args:
            inputs: Tensors in mappings and sequences, or None on a rank that reads no data.
            labels: Likewise.

        Raises:
            DataError: Ranks have different batches; on all ranks of the model.
        """
        found = gather((digest(inputs), digest(labels)), self._group)
        of_inputs, of_labels = (_first_two(parts) for parts in zip(*found, strict=True))
        if of_inputs is None or of_labels is None:
            return
        ranks = torch.distributed.get_process_group_ranks(self._group)
        one, other = (ranks[place] for place in of_inputs)
        reason = f"ranks {one} and {other} hold one model, and read different batches"
        remedy = (
            "Let them draw alike: give the loader, or a data set or a collator that draws, a"
            " generator of the same seed on all ranks, or a DistributedSampler of"
            " engine.data_world_size and engine.data_rank"
        )
        raise DataError("data_iter", "a micro-batch", reason, remedy)


def attach_same_batches(engine: EngineMixin) -> SameBatches | None:
    """Return the comparison for an engine with our section; None if each rank reads for itself.

    Ranks that share sequences read parts of one batch.
    """
    group = engine.ranks.model_group
    if group is None or engine.sequence_parallel_size > 1 or SECTION not in engine.config:
        return None
    return SameBatches(group)


def digest(part: Any) -> str | None:
    """Return a digest of the tensors of a part of a batch; None if all of them are placeholders."""
    found = hashlib.sha256()
    tensors = [tensor for tensor in _tensors(part) if not _is_placeholder(tensor)]
    for tensor in tensors:
        found.update(
            tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return found.hexdigest() if tensors else None


def _is_placeholder(tensor: Tensor) -> bool:
    return not tensor.numel() or bool((tensor == tensor.view(-1)[0]).all())


def _tensors(part: Any) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part.detach().reshape(-1)
    elif isinstance(part, Mapping):
        for name in sorted(part, key=str):
            yield from _tensors(part[name])
    elif isinstance(part, (tuple, list)):
        for each in part:
            yield from _tensors(each)


def _first_two(digests: tuple[str | None, ...]) -> tuple[int, int] | None:
    """Return the places of two ranks that differ; None if there are none."""
    known = [(place, found) for place, found in enumerate(digests) if found is not None]
    return next(((known[0][0], place) for place, found in known if found != known[0][1]), None)
