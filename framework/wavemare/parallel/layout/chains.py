# SPDX-License-Identifier: Apache-2.0
"""The layers of a model's pipeline under the names that the model's own modules have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wavemare.models.families import family_of
from wavemare.models.layers import PipelineLayer, TiedHead

__all__ = ["NamedChain", "named_chain"]

_EMBEDDINGS = ("embed", "embedding", "embeddings", "tok_embeddings")
_BLOCKS = ("layers", "blocks")
_HEADS = ("head", "output")


@dataclass(frozen=True)
class NamedChain:
    """The chain of `wavemare.models.to_pipeline`.

    Args:
        layers: The layers.
        modules: For each of them the names of the model's modules that it holds.
    """

    layers: tuple[PipelineLayer, ...]
    modules: tuple[tuple[str, ...], ...]

    @property
    def blocks(self) -> list[int]:
        """Which layers are the repeated blocks."""
        return [index for index, layer in enumerate(self.layers) if layer.is_block]

    def known_as(self, name: str) -> list[int] | None:
        """Return the layers that have a name in all models; None if it is none.

        ``embed`` are those before the blocks, ``layers`` the blocks and ``layers.N`` one of them,
        ``head`` the last layer and ``norm`` those between. torchtitan's ``tok_embeddings`` and
        ``output`` are understood as well.
        """
        first, last = self.blocks[0], self.blocks[-1]
        group, _, number = name.partition(".")
        if group in _BLOCKS and number in ("", "*"):
            return self.blocks
        if group in _BLOCKS and number.isdecimal() and int(number) < len(self.blocks):
            return [self.blocks[int(number)]]
        if name in _EMBEDDINGS:
            return list(range(first))
        if name in _HEADS:
            return [len(self.layers) - 1]
        if name == "norm":
            return list(range(last + 1, len(self.layers) - 1))
        return None


def named_chain(model: Any, inputs: Sequence[str] | None = None) -> NamedChain:
    """Return the layers of a transformers model and their modules' names.

    Args:
        model: The model, whole.
        inputs: ``wavemare.pipeline.inputs``.

    Raises:
        ModelError: Models of this class cannot be cut.
    """
    family = family_of(model)
    layers = tuple(family.chain(model, family.declared(inputs)))
    names = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
    return NamedChain(layers, tuple(_names(model, layer, names) for layer in layers))


def _names(model: Any, layer: PipelineLayer, names: dict[int, str]) -> tuple[str, ...]:
    held = list(layer.children())
    if isinstance(layer, TiedHead):  # it holds but a weight of the module whose part it plays
        held = [model.get_output_embeddings()]
    return tuple(names[id(module)] for module in held if id(module) in names)
