# SPDX-License-Identifier: Apache-2.0
"""What each layer of a model computes, keeps and sends."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BYTES", "LayerCost", "ModelCosts"]

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One layer, for one sample (a sequence) unless told otherwise.

    Args:
        name: What it is.
        parameters: Its own.
        tied_parameters: Those of another layer that it multiplies by. A stage that has not the
            other layer holds a copy.
        flops: Of a forward pass.
        kept_bytes: What it keeps for the backward pass on every rank that shares it.
        split_bytes: What it keeps in parts, one on each rank that shares it.
        is_block: Whether it is one of the repeated blocks, which can be recomputed.
        sums: Results that tensor parallelism sums over its ranks in a forward pass, each as large
            as a boundary; as many again in the backward pass.
    """

    name: str
    parameters: int
    flops: float
    kept_bytes: float
    split_bytes: float = 0.0
    tied_parameters: int = 0
    is_block: bool = False
    sums: int = 0

    @property
    def alike(self) -> tuple[float, ...]:
        """Equal for layers of equal cost."""
        return (
            self.parameters,
            self.tied_parameters,
            self.flops,
            self.kept_bytes,
            self.split_bytes,
            self.sums,
        )


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """A chain of layers.

    Args:
        name: Of the model.
        layers: In the order of `to_pipeline`.
        sequence: Tokens of a sample.
        boundary_bytes: What one sample sends from a layer to the next.
        dtype: fp32, fp16 or bf16.
        widths: Numbers that tensor parallelism must divide; empty where it cannot split the model.
    """

    name: str
    layers: tuple[LayerCost, ...]
    sequence: int
    boundary_bytes: float
    dtype: str = "fp32"
    widths: tuple[int, ...] = ()

    @property
    def parameters(self) -> int:
        """Of the whole model, tied ones once."""
        return sum(layer.parameters for layer in self.layers)

    def splits(self, tensor_parallel: int) -> bool:
        """Whether so many ranks can share each layer."""
        if tensor_parallel == 1:
            return True
        return bool(self.widths) and all(width % tensor_parallel == 0 for width in self.widths)
