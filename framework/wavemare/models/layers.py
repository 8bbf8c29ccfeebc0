# SPDX-License-Identifier: Apache-2.0
"""Layers of a pipeline: thin modules around the submodules of a transformers model.

Nothing is copied. A layer maps activations to activations. It knows the names that its weights have
in the model's own state dict.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from transformers.utils.output_capturing import OutputRecorder

from wavemare.errors import ModelError
from wavemare.models.activations import (
    SUMS,
    Activations,
    SideInputs,
    StageContext,
    pack,
    side,
    unpack,
)
from wavemare.models.deferred import copy_of, read_weights
from wavemare.models.quantized import without_statistics


class PipelineLayer(nn.Module):
    """One element of the chain; subclasses define :meth:`run`.

    Args:
        inputs: Names of the tensors that enter the first layer, ``input_ids`` first.
    """

    is_block = False
    """Whether the layer is one of the repeated blocks, which activation checkpointing is for."""

    takes_integers = False
    """Whether the layer reads token ids, through which no gradient can flow."""

    ends_chain = False
    """Whether the side inputs stop here."""

    auxiliary: AuxiliaryLoss | None = None
    """What sums up the routers' outputs; see `with_auxiliary_loss`."""

    def __init__(self, inputs: Sequence[str]) -> None:
        super().__init__()
        self.inputs = tuple(inputs)
        self.weight_names: dict[str, str] = {}
        """Name in the model's state dict for each name in this layer's; see name_weights."""

    def forward(self, activations: Activations) -> Activations:
        """Return the activations behind this layer."""
        hidden, sides = unpack(activations, self.inputs)
        if self.auxiliary is None:
            sums, result = {}, self.run(hidden, sides)
        else:
            before = sides.pop(SUMS, None)
            result, after = self.auxiliary.run(self, hidden, sides, before)
            sums = {SUMS: after}
        return pack(result, sums if self.ends_chain else sides | sums)

    def run(self, hidden: Tensor, sides: SideInputs) -> Tensor:
        """Map the hidden states, (batch, sequence, hidden), to the next ones."""
        raise NotImplementedError

    def weights(self) -> dict[str, Tensor]:
        """Return the layer's parameters and buffers under the names of the model's state dict.

        What says how a weight is quantized goes with the weight itself.
        """
        state = without_statistics(self.state_dict(keep_vars=True))
        return {self.weight_names[name]: value for name, value in state.items()}

    def unnamed(self) -> list[str]:
        """Return the names of weights that were none of the layer's when the model was cut."""
        state = without_statistics(self.state_dict(keep_vars=True))
        return [name for name in state if name not in self.weight_names]


class TokenEmbedding(PipelineLayer):
    """Word embedding; possibly tied to the head."""

    takes_integers = True

    def __init__(self, inputs: Sequence[str], embedding: nn.Module) -> None:
        super().__init__(inputs)
        self.embedding = embedding

    def run(self, hidden: Tensor, sides: SideInputs) -> Tensor:
        """Embed ``input_ids``, (batch, sequence)."""
        embedded: Tensor = self.embedding(hidden)
        if torch.is_grad_enabled() and not embedded.requires_grad:
            # With frozen embeddings neither a reentrant checkpoint nor the next stage would find
            # the way back to the weights above.
            embedded.requires_grad_()
        return embedded


class Wrapped(PipelineLayer):
    """A module that maps hidden states alone: a norm, a dropout, a transform.

    Args:
        inputs: Names of the tensors that enter the first layer.
        module: The module.
    """

    def __init__(self, inputs: Sequence[str], module: nn.Module) -> None:
        super().__init__(inputs)
        self.module = module

    def run(self, hidden: Tensor, sides: SideInputs) -> Tensor:
        """Apply the module."""
        return self.module(hidden)


class Head(Wrapped):
    """An output projection with weights of its own."""

    ends_chain = True


class TiedHead(PipelineLayer):
    """An output projection with the weights of the word embedding.

    Args:
        inputs: Names of the tensors that enter the first layer.
        tied: The layer that owns the weights.
        bias: A bias of its own, (vocabulary,).
    """

    ends_chain = True

    def __init__(
        self, inputs: Sequence[str], tied: TokenEmbedding, bias: nn.Parameter | None = None
    ) -> None:
        super().__init__(inputs)
        self.bias = bias
        # In a tuple, so that it is no submodule: DeepSpeed registers tied modules by themselves.
        self._tied = (tied,)

    @property
    def tied(self) -> TokenEmbedding:
        """The layer that owns the weights."""
        return self._tied[0]

    def run(self, hidden: Tensor, sides: SideInputs) -> Tensor:
        """Return logits, (batch, sequence, vocabulary)."""
        weight: Any = self.tied.embedding.weight
        return F.linear(hidden, weight, self.bias)

    def untied(self) -> Head:
        """Return a head with a copy of the weight; the bias is the same parameter."""
        weight: Any = copy_of(self.tied.embedding.weight)
        vocabulary, hidden = weight.shape
        projection = nn.Linear(hidden, vocabulary, bias=False, device="meta")
        projection.weight = weight
        projection.register_parameter("bias", self.bias)
        return Head(self.inputs, projection)


class Block(PipelineLayer):
    """A transformer block; subclasses know how their family calls it.

    Args:
        inputs: Names of the tensors that enter the first layer.
        block: The model's block.
        context: Masks and tables, shared by all blocks of a process.
    """

    is_block = True

    def __init__(self, inputs: Sequence[str], block: nn.Module, context: StageContext) -> None:
        super().__init__(inputs)
        self.block = block
        self.context = context


class ModuleSpec(LayerSpec):
    """A specification that hands out an existing layer, once its weights have been read."""

    def __init__(self, layer: PipelineLayer) -> None:
        super().__init__(type(layer))
        self.layer: PipelineLayer | None = layer

    def build(self, log: bool = False) -> PipelineLayer:
        """Return the layer."""
        assert self.layer is not None, "a layer of another stage was released"
        read_weights(self.layer)
        return self.layer


class TiedSpec(TiedLayerSpec):
    """A specification of a layer that owns or uses tied weights."""

    def __init__(self, key: str, layer: TokenEmbedding | TiedHead) -> None:
        super().__init__(key, type(layer), tied_weight_attr="embedding.weight")
        self.layer: TokenEmbedding | TiedHead | None = layer

    def build(self, log: bool = False) -> TokenEmbedding:
        """Return the layer that owns the weights."""
        assert self.layer is not None, "a layer of another stage was released"
        owner = self.layer.tied if isinstance(self.layer, TiedHead) else self.layer
        read_weights(owner)
        return owner


def spec_of(layer: PipelineLayer, chain: Iterable[PipelineLayer]) -> ModuleSpec | TiedSpec:
    """Return the specification of a layer, tied if the chain ties it to another one."""
    owners = [other.tied for other in chain if isinstance(other, TiedHead)]
    if isinstance(layer, TiedHead):
        return TiedSpec("embedding", layer)
    if isinstance(layer, TokenEmbedding) and any(layer is owner for owner in owners):
        return TiedSpec("embedding", layer)
    return ModuleSpec(layer)


def name_weights(
    model: nn.Module,
    chain: Sequence[PipelineLayer],
    replaced: Mapping[str, Tensor] | None = None,
) -> dict[str, str]:
    """Tell each layer the names of its weights in the model's state dict.

    Args:
        model: The whole model.
        chain: Its layers.
        replaced: Weights that the layers hold in place of the model's of that name.

    Returns:
        For each key of the model's state dict the key under which a layer holds that tensor: the
        same one, or another where two names are tied.

    Raises:
        ModelError: A weight of the model belongs to no layer.
    """
    state = without_statistics(model.state_dict(keep_vars=True)) | dict(replaced or {})
    first_name: dict[int, str] = {}
    for name, value in state.items():
        first_name.setdefault(id(value), name)
    held: set[int] = set()
    for layer in chain:
        own = without_statistics(layer.state_dict(keep_vars=True))
        layer.weight_names = {name: first_name[id(value)] for name, value in own.items()}
        held.update(id(value) for value in own.values())
    left = sorted(name for name, value in state.items() if id(value) not in held)
    if left:
        raise ModelError(
            "model",
            type(model).__name__,
            f"its weights {', '.join(left[:3])} belong to no layer of the pipeline",
            "Train it with one stage",
        )
    return {name: first_name[id(value)] for name, value in state.items()}


@dataclass(frozen=True)
class AuxiliaryLoss:
    """The loss of (logits, sums) and labels, for a mixture of experts on several stages.

    transformers computes its auxiliary part from two means over *all* layers, whose product it
    takes: losses of stages would not add up. Instead each block adds its routers' sums to those
    before it, and they travel with the hidden states. The loss at the end is transformers' own.

    The sums are (2, experts), fp32: the rows that chose each expert, and its probabilities.

    Args:
        main: The loss of logits and labels.
        router: Class of the modules whose output begins with the logits of routing.
        num_experts: Number of experts of a layer.
        chosen: How many of them a row chooses.
        coefficient: Of the auxiliary loss.
        model: Returns the model, which may get another coefficient, or None if it is gone.
    """

    main: Callable[..., Tensor]
    router: type[nn.Module]
    num_experts: int
    chosen: int
    coefficient: float
    model: Callable[[], Any] = lambda: None

    @property
    def counts_items(self) -> bool:
        """Whether a number of items divides the sum of the main part."""
        return bool(getattr(self.main, "counts_items", False))

    def __call__(
        self, outputs: tuple[Tensor, Tensor], labels: Tensor, *items: Tensor | None
    ) -> Tensor:
        """Return the loss of the last layer's outputs and labels, and perhaps number of items."""
        logits, sums = outputs
        counts, probabilities = sums[0].detach(), sums[1]
        rows = counts.sum() / self.chosen
        auxiliary = torch.sum(counts / rows * (probabilities / rows)) * self.num_experts
        coefficient = getattr(self.model(), "router_aux_loss_coef", self.coefficient)
        return self.main(logits, labels, *items) + coefficient * auxiliary

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
        mask = side(sides, "attention_mask")
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
    experts, chosen, coefficient = values
    held = weakref.ref(model)
    auxiliary = AuxiliaryLoss(loss, recorder.target_class, experts, chosen, coefficient, held)
    for layer in chain:
        layer.auxiliary = auxiliary
    for layer in chain[1:]:
        layer.inputs += (SUMS,)
    return auxiliary
