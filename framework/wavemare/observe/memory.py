# SPDX-License-Identifier: Apache-2.0
"""An estimate of the memory of one rank, stated before anything is allocated.

Weights, gradients and optimizer states follow Rajbhandari et al. 2020 (ZeRO, section 3.1 and
figure 1); activations follow Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large
Transformer Models"), equations 1 and 2. It is a model, not a measurement: allocator overhead,
communication buffers and temporary values of kernels are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from wavemare.observe.formats import format_byte_parts

__all__ = ["MemoryEstimate", "estimate_activations", "estimate_memory"]

_FP32 = 4
_OPTIMIZER_STAGE, _GRADIENT_STAGE, _WEIGHT_STAGE = 1, 2, 3


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one rank, by purpose."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All parts together, in bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations

    def __str__(self) -> str:
        return format_byte_parts(
            {
                "weights": self.weights,
                "gradients": self.gradients,
                "optimizer": self.optimizer,
                "activations": self.activations,
            }
        )


def estimate_memory(
    num_parameters: int,
    *,
    bytes_per_parameter: int = _FP32,
    zero_stage: int = 0,
    data_world_size: int = 1,
    optimizer_states: int = 2,
    activations: int = 0,
) -> MemoryEstimate:
    """Estimate what one rank holds while it trains.

    Args:
        num_parameters: Parameters on this rank before ZeRO divides them (one stage's share).
        bytes_per_parameter: 4 for fp32; 2 for bf16 and fp16, which add an fp32 master copy.
        zero_stage: 0 to 3: the optimizer states, then the gradients, then the weights are divided
            among the data-parallel ranks.
        data_world_size: Number of data-parallel ranks.
        optimizer_states: fp32 values per parameter (Adam 2, momentum 1, plain SGD 0).
        activations: Bytes, from `estimate_activations`.
    """

    def share(count: int, stage: int) -> int:
        return -(-count // data_world_size) if zero_stage >= stage else count

    master = 1 if bytes_per_parameter < _FP32 else 0
    return MemoryEstimate(
        weights=share(num_parameters, _WEIGHT_STAGE) * bytes_per_parameter,
        gradients=share(num_parameters, _GRADIENT_STAGE) * bytes_per_parameter,
        optimizer=share(num_parameters, _OPTIMIZER_STAGE) * (optimizer_states + master) * _FP32,
        activations=activations,
    )


def estimate_activations(
    *,
    batch: int,
    sequence: int,
    hidden: int,
    heads: int,
    layers: int,
    vocabulary: int = 0,
    bytes_per_value: int = _FP32,
    tensor_world_size: int = 1,
    micro_batches: int = 1,
) -> int:
    """Estimate the bytes that a transformer's backward pass keeps.

    Equation 1 of Korthikanti et al. is ``s b h (34 + 5 a s / h)`` bytes per layer, for values of
    two bytes and dropout masks of one. Counted in values (c bytes each) and masks it reads
    ``s b h (16 c + 2) + a s s b (2 c + 1)``; equation 2 divides by the tensor-parallel size all
    but ``s b h (4 c + 2)``, the parts outside the parallel matrices.

    Args:
        batch: Sequences per micro-batch (b).
        sequence: Tokens per sequence (s).
        hidden: Width of the residual stream (h).
        heads: Attention heads (a).
        layers: Layers on this rank.
        vocabulary: Size of the output layer (v) if it is on this rank, else 0. It adds its input
            and fp32 logits: ``s b (c h + 4 v)``.
        bytes_per_value: Bytes per activation (c).
        tensor_world_size: Tensor-parallel ranks (t).
        micro_batches: Micro-batches whose backward pass is still to come, at the peak.
    """
    tokens, size = sequence * batch, bytes_per_value
    whole = tokens * hidden * (4 * size + 2)
    divided = tokens * hidden * 12 * size + heads * sequence * tokens * (2 * size + 1)
    output = tokens * (size * hidden + _FP32 * vocabulary) if vocabulary else 0
    per_layer = whole + -(-divided // tensor_world_size)
    return micro_batches * (layers * per_layer + output)
