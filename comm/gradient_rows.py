# SPDX-License-Identifier: Apache-2.0
"""Which rows of embeddings a backward pass gives gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wavemare.comm.rows import blocks_of_rows


@dataclass(frozen=True)
class Slot:
    """A parameter's range in its bucket.

    Args:
        name: Of the parameter.
        start: First element.
        stop: Element after the last.
    """

    name: str
    start: int
    stop: int


_FORWARDS = (nn.Embedding.forward, nn.EmbeddingBag.forward)


class GradientRows:
    """Records which rows of embeddings get gradients, so that nobody has to search for them.

    Only weights that belong to embeddings alone are recorded, and only of plain `nn.Embedding` and
    `nn.EmbeddingBag`: other forward passes may read other rows.

    Args:
        module: The model.
        parameters: The trained ones, by name.
    """

    def __init__(self, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        owners: dict[int, list[nn.Module]] = {}
        for each in module.modules():
            for weight in each.parameters(recurse=False):
                owners.setdefault(id(weight), []).append(each)
        self._parameters = {
            name: parameter
            for name, parameter in parameters.items()
            if id(parameter) in owners
            and all(_is_table(each, parameter) for each in owners[id(parameter)])
        }
        self._ids: dict[str, list[Tensor]] = {name: [] for name in self._parameters}
        self._older: set[str] = set()
        self._hooks = [
            each.register_forward_hook(partial(self._on_forward, name), with_kwargs=True)
            for name, parameter in self._parameters.items()
            for each in owners[id(parameter)]
        ]

    def _on_forward(self, name: str, _: Any, args: Any, kwargs: Any, output: Tensor) -> None:
        if output.requires_grad and self._parameters[name].requires_grad:
            ids = (args[0] if args else kwargs["input"]).detach().reshape(-1).clone()
            # The list is of the passes whose gradients have come, in whatever order they run.
            output.register_hook(lambda gradient: self._add(name, ids))

    def _add(self, name: str, ids: Tensor) -> None:
        if not self._ids[name] and self._parameters[name].grad is not None:
            self._older.add(name)  # it is added to a gradient of rows that are not known
        self._ids[name].append(ids)

    def take(self, slots: Sequence[Slot], block: int) -> Tensor | None:
        """Return the blocks of a bucket that got gradients since the last call.

        Args:
            slots: Of the bucket's parameters.
            block: Elements per block.

        Returns:
            (k,), int64, some repeat; None if they are not known: the bucket has no embedding of its
            own, or its gradient was there before.
        """
        known = [slot.name for slot in slots if slot.name in self._ids]
        taken = {name: self._ids[name] for name in known}
        self._ids.update((name, []) for name in known)
        older = self._older.intersection(known)
        self._older -= older
        if not known or older:
            return None
        device = self._parameters[known[0]].device
        parts = [torch.empty(0, dtype=torch.int64, device=device)]
        for slot in slots:
            if slot.name not in taken:
                first, last = slot.start // block, -(-slot.stop // block)
                parts.append(torch.arange(first, last, device=device))
                continue
            dim = self._parameters[slot.name].shape[1]
            for ids in taken[slot.name]:
                if ids.is_cuda:  # the forward pass's stream allocated it
                    ids.record_stream(torch.cuda.current_stream(ids.device))
                parts.append(blocks_of_rows(ids.long(), dim, block, slot.start).to(device))
        return torch.cat(parts)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def _is_table(module: nn.Module, parameter: nn.Parameter) -> bool:
    plain = type(module).forward in _FORWARDS and "forward" not in vars(module)
    return plain and module.weight is parameter and not module.sparse
