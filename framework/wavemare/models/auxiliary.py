# SPDX-License-Identifier: Apache-2.0
"""The auxiliary loss of a mixture of experts whose layers are on several stages.

transformers computes it from two means over *all* layers, whose product it takes: losses of stages
would not add up. Instead each block adds its routers' sums to those before it, and they travel with
the hidden states. The loss at the end is transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import OutputRecorder

from wavemare.models.activations import SUMS, SideInputs
from wavemare.models.layers import PipelineLayer


@dataclass(frozen=True)
class AuxiliaryLoss:
    """The loss of (logits, sums) and labels.

    The sums are (2, experts), fp32: the rows that chose each expert, and its probabilities.

    Args:
        main: The loss of logits and labels.
        router: Class of the modules whose output begins with the logits of routing.
        num_experts: Number of experts of a layer.
        chosen: How many of them a row chooses.
        coefficient: Of the auxiliary loss.
    """

    main: Callable[..., Tensor]
    router: type[nn.Module]
    num_experts: int
    chosen: int
    coefficient: float

    def __call__(self, outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        """Return the loss of the last layer's outputs and labels."""
        logits, sums = outputs
        counts, probabilities = sums[0].detach(), sums[1]
        rows = counts.sum() / self.chosen
        auxiliary = torch.sum(counts / rows * (probabilities / rows)) * self.num_experts
        return self.main(logits, labels) + self.coefficient * auxiliary

    def run(
        self, layer: PipelineLayer, hidden: Tensor, sides: SideInputs, sums: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run a layer; return its result, and the sums with those of its routers.

        Args:
            layer: One of the chain.
            hidden: What it gets, see `PipelineLayer.run`.
            sides: The batch entries that travel.
            sums: Those of the layers before; None at the first one.
        """
        if sums is None:
            sums = hidden.new_zeros((2, self.num_experts), dtype=torch.float32)
            sums.requires_grad_(torch.is_grad_enabled())  # so that a stage sends it back a gradient
        routed: list[Tensor] = []
        handles = [
            module.register_forward_hook(lambda *call: routed.append(call[-1][0]), prepend=True)
            for module in layer.modules()
            if isinstance(module, self.router)
        ]
        try:
            result = layer.run(hidden, sides)
        finally:
            for handle in handles:
                handle.remove()
        mask = sides.get("attention_mask")
        for logits in routed:
            sums = sums + self._sums(logits, mask)
        return result, sums

    def _sums(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        probabilities = logits.softmax(-1)
        chosen = probabilities.topk(self.chosen).indices.flatten()
        counted = probabilities.new_ones(len(logits), dtype=torch.float32)
        if mask is not None:
            counted = mask.flatten().to(counted)
        counts = counted.new_zeros(self.num_experts)
        counts.scatter_add_(0, chosen, counted.repeat_interleave(self.chosen))
        return torch.stack([counts, (probabilities.float() * counted[:, None]).sum(0)])


def with_auxiliary_loss(
    model: Any, chain: Sequence[PipelineLayer], loss: Callable[..., Tensor]
) -> Any:
    """Let a chain carry the sums that its model's loss needs; return the loss.

    A model without such a loss keeps its chain and its loss.
    """
    recorder = (model.can_record_outputs or {}).get("router_logits")
    needed = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
    asks = getattr(model.config, "output_router_logits", False)
    values: Any = [getattr(model, name, None) for name in needed]
    if not asks or not isinstance(recorder, OutputRecorder) or None in values:
        return loss
    auxiliary = AuxiliaryLoss(loss, recorder.target_class, *values)
    for layer in chain:
        layer.auxiliary = auxiliary
    for layer in chain[1:]:
        layer.inputs += (SUMS,)
    return auxiliary
