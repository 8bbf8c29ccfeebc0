# SPDX-License-Identifier: Apache-2.0
"""torchao's int8 weights as one tensor of numbers with its scales beside it.

A weight of torchao is a tensor that holds others. Engines move and broadcast each weight, which
such a tensor does not survive. Here the numbers are the parameter, and products are the same to the
bit. torchao is imported only where a model has such a weight.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

PACKAGE = "torchao"


class Int8Weight(nn.Parameter):
    """A frozen weight in int8 with a scale for each of its rows.

    Args:
        numbers: int8, (outputs, inputs); before they are read, of the former type on ``meta``.
        scale: fp32, (outputs, 1); None before it is read.
        former: The type that the weight had before; that of the numbers if omitted.
    """

    scale: Any
    former: torch.dtype

    def __new__(
        cls, numbers: Tensor, scale: Tensor | None, former: torch.dtype | None = None
    ) -> Int8Weight:
        """Return a parameter that shares memory with the numbers."""
        weight: Any = torch.Tensor._make_subclass(cls, numbers, False)
        weight.scale, weight.former = scale, former or numbers.dtype
        return weight

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            scale = None if self.scale is None else self.scale.clone()
            memo[id(self)] = type(self)(self.data.clone(), scale, self.former)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self), (self.data, self.scale, self.former)

    def dequantize(self) -> Tensor:
        """Return the weight in its former type."""
        return (self.data.float() * self.scale).to(self.former)


class Int8Linear(nn.Linear):
    """A linear layer whose weight is an `Int8Weight`; see `take_all`."""

    weight: Any

    @property
    def W_q(self) -> Any:
        """By this name, peft knows a layer that it has to ask by `dequantize`."""
        return self.weight

    def dequantize(self) -> Tensor:
        """Return the weight in its former type."""
        found: Tensor = self.weight.dequantize()
        return found

    def forward(self, value: Tensor) -> Tensor:
        """Map (..., inputs) to (..., outputs) of the same type."""
        found: Tensor = _Product.apply(value, self.weight, self.weight.scale)
        if self.bias is not None:  # in the product's type, 16 bits under autocast
            found = (found + self.bias).to(found.dtype)
        return found.to(value.dtype)

    def register_parameter(self, name: str, param: Any) -> None:
        """Hold a parameter; one of torchao, as a merge by peft gives, in our form."""
        super().register_parameter(name, _taken(param) if is_torchao(param) else param)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        scale, former = self.weight.scale, self.weight.former
        super()._apply(fn, recurse)
        numbers = self.weight
        if not isinstance(numbers, Int8Weight):  # a new parameter, as on another kind of device
            self.weight = Int8Weight(numbers.data, scale, former)
        if scale is not None:  # in fp32 also in layers of 16 bits
            self.weight.scale = scale.to(numbers.device)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.weight.scale is not None:
            destination[f"{prefix}weight.scale"] = self.weight.scale

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, *more: Any
    ) -> None:
        scale = state_dict.pop(f"{prefix}weight.scale", None)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *more)
        if scale is None:
            missing.append(f"{prefix}weight.scale")
        else:
            self.weight.scale.copy_(scale)


class _Product(torch.autograd.Function):
    """torchao's product by an int8 weight; it does not keep a copy in the type of its input."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, numbers: Tensor, scale: Tensor) -> Tensor:
        """Map (..., inputs) to (..., outputs), of autocast's type."""
        product = value.reshape(-1, value.shape[-1]) @ numbers.t().to(value.dtype)
        ctx.save_for_backward(numbers, scale)
        ctx.kind = value.dtype
        product = product * scale.to(product).flatten()
        return product.reshape(*value.shape[:-1], len(numbers))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        """Map the gradient back."""
        (gradient,), (numbers, scale) = gradients, ctx.saved_tensors
        rows = gradient.reshape(-1, len(numbers)) * scale.to(gradient).t()
        found = rows @ numbers.t().to(rows.dtype).t()
        return found.reshape(*gradient.shape[:-1], numbers.shape[1]).to(ctx.kind), None, None


def is_torchao(weight: Any) -> bool:
    """Whether a linear layer's weight is torchao's int8, with one scale for each row."""
    known = sys.modules.get(f"{PACKAGE}.quantization")
    kind = getattr(known, "Int8Tensor", None)
    if kind is None or not isinstance(weight, kind):
        return False
    zero, inputs = weight.zero_point, weight.shape[1]
    return (
        list(weight.block_size) == [1, inputs]
        and weight.act_quant_kwargs is None
        and weight.act_pre_scale is None
        and (zero is None or zero.is_meta or not bool(zero.any()))
    )


def layers(model: nn.Module) -> Iterator[Any]:
    """Yield the linear layers of a model whose weights `take_all` takes; the head is none."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for module in model.modules():
        if type(module) is nn.Linear and module is not head and is_torchao(module.weight):
            yield module


def take_all(model: nn.Module) -> None:
    """Give the layers of a model whose weights are torchao's the same weights in our form."""
    for layer in list(layers(model)):
        weight = layer.weight
        vars(layer).pop("extra_repr", None)  # torchao's, which reads its own weight
        layer.__class__ = Int8Linear
        layer.weight = weight
    for module in model.modules():
        quantizer: Any = vars(module).get("hf_quantizer")
        if type(quantizer).__name__ == _QUANTIZER:  # asked by transformers' save_pretrained
            quantizer.get_state_dict_and_metadata = _for_a_file


_QUANTIZER = "TorchAoHfQuantizer"


def _for_a_file(model: nn.Module) -> Any:
    """Return the state dict of a model with its weights as torchao has them, and what describes it.

    In that form ``from_pretrained`` reads them.
    """
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    state = model.state_dict()
    for name, layer in model.named_modules():
        if isinstance(layer, Int8Linear):
            del state[f"{name}.weight.scale"]
            state[f"{name}.weight"] = _given_back(layer.weight)
    return flatten_tensor_state_dict(state)


def is_asked_for(config: Any) -> bool:
    """Whether a configuration of transformers asks for int8 with one scale for each row."""
    kind: Any = getattr(config, "quant_type", None)
    if type(kind).__name__ != "Int8WeightOnlyConfig":
        return False
    from torchao.quantization import PerRow

    return kind.granularity == PerRow() and not config.include_input_output_embeddings


def convert(model: nn.Module, quantizer: Any) -> None:
    """Let weights of a model on the meta device be quantized when they are read.

    Args:
        model: Its linear layers become `Int8Linear`.
        quantizer: Of transformers, which says which.
    """
    for name, layer in model.named_modules():
        if type(layer) is nn.Linear and quantizer.param_needs_quantization(model, f"{name}.weight"):
            layer.weight = Int8Weight(layer.weight.data, None)
            layer.__class__ = Int8Linear


def _taken(weight: Any) -> Int8Weight:
    return Int8Weight(weight.qdata, weight.scale, weight.dtype)


def quantized(values: Tensor) -> Int8Weight:
    """Return a weight in int8, as torchao quantizes it."""
    from torchao.quantization import Int8Tensor, PerRow

    return _taken(Int8Tensor.from_hp(values, granularity=PerRow()))


def _given_back(weight: Int8Weight) -> Any:
    """Return a weight as torchao has it."""
    from torchao.quantization import Int8Tensor

    zero = torch.zeros_like(weight.scale, dtype=torch.int8)
    block = [1, weight.shape[1]]
    return Int8Tensor(weight.data, weight.scale, block, weight.former, zero_point=zero)


def part_of(whole: Int8Weight, dim: int, pieces: Sequence[tuple[int, int]]) -> Int8Weight:
    """Return a part of a weight; see `wavemare.models.quantized.part_of`."""
    numbers = torch.cat([whole.data.narrow(dim, a, b - a) for a, b in pieces], dim)
    scale = whole.scale
    if dim == 0:
        scale = torch.cat([scale[a:b] for a, b in pieces])
    return Int8Weight(numbers, scale.clone(), whole.former)
