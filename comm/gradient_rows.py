# SPDX-License-Identifier: Apache-2.0
"""Which rows of embeddings a backward pass gives gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wavemare.comm.blocks.rows import blocks_of_rows

__all__ = ["GradientRows", "Slot"]


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


class GradientRows:
    """Records which rows of embeddings get gradients, so that nobody has to search for them.

    Args:
        module: The model. Only weights that belong to embeddings alone are recorded.
        parameters: By name.
    """

    def __init__(self, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        owners: dict[int, list[nn.Module]] = {}
        for each in module.modules():
            for weight in each.parameters(recurse=False):
                owners.setdefault(id(weight), []).append(each)
        self._ids: dict[str, list[Tensor]] = {}
        self._dims: dict[str, int] = {}
        self._hooks = []
        self._device = next((p.device for p in parameters.values()), None)
        for name, parameter in parameters.items():
            modules = owners.get(id(parameter), [])
            if modules and all(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in modules):
                self._ids[name], self._dims[name] = [], parameter.shape[1]
                for each in modules:
                    hook = partial(self._on_forward, self._ids[name])
                    self._hooks.append(each.register_forward_hook(hook, with_kwargs=True))

    @staticmethod
    def _on_forward(rows: list[Tensor], _: Any, args: Any, kwargs: Any, output: Tensor) -> None:
        if output.requires_grad:
            ids = (args[0] if args else kwargs["input"]).detach().reshape(-1).clone()
            # The list is of the passes whose gradients have come, in whatever order they run.
            output.register_hook(lambda gradient: rows.append(ids))

    def take(self, slots: Sequence[Slot], block: int) -> Tensor | None:
        """Return the blocks of a bucket that got gradients since the last call.

        Args:
            slots: Of the bucket's parameters.
            block: Elements per block.

        Returns:
            (k,), int64, some repeat; None if the bucket has no embedding of its own.
        """
        if not any(slot.name in self._ids for slot in slots):
            return None
        parts = [torch.empty(0, dtype=torch.int64, device=self._device)]
        for slot in slots:
            ids = self._ids.get(slot.name)
            if ids is None:
                first, last = slot.start // block, -(-slot.stop // block)
                parts.append(torch.arange(first, last, device=self._device))
                continue
            parts += [
                blocks_of_rows(rows.long(), self._dims[slot.name], block, slot.start)
                for rows in ids
            ]
            ids.clear()
        return torch.cat(parts)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
