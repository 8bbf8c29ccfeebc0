# SPDX-License-Identifier: Apache-2.0
"""Frozen weights in 4 or 8 bits: whole, cut over ranks, read late, and in checkpoints.

A weight in bitsandbytes' 4 bits is a column of bytes, and its ``quant_state`` has its shape and the
rest. One in torchao's int8 becomes an `Int8Weight`. bitsandbytes is imported only where a model has
such a weight.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wavemare.errors import ModelError
from wavemare.extras import require
from wavemare.models import int8

METHOD = "bitsandbytes"
_OPTIONS = "blocksize", "compress_statistics", "quant_type", "quant_storage", "module"
_PREPARED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def is_quantized(weight: Any) -> bool:
    """Whether a parameter is in 4 or 8 bits, or will be once it has been read."""
    return isinstance(weight, int8.Int8Weight) or _is_four_bit(weight)


def _is_four_bit(weight: Any) -> bool:
    bnb = sys.modules.get(METHOD)
    return bnb is not None and isinstance(weight, bnb.nn.Params4bit)


def has_quantized(model: nn.Module) -> bool:
    """Whether weights of a model are in 4 or 8 bits, or will be."""
    return any(map(is_quantized, model.parameters()))


def is_quantized_layer(layer: Any) -> bool:
    """Whether a module is a linear layer whose weight is in 4 or 8 bits."""
    return isinstance(layer, int8.Int8Linear) or _is_four_bit_layer(layer)


def _is_four_bit_layer(layer: Any) -> bool:
    bnb = sys.modules.get(METHOD)
    return bnb is not None and isinstance(layer, bnb.nn.Linear4bit)


def whole_shape(weight: Any) -> torch.Size:
    """Return the shape of a weight; of one in 4 bits, the one that its layer needs."""
    state = weight.quant_state if _is_four_bit(weight) else None
    return weight.shape if state is None else torch.Size(state.shape)


def dequantized(weight: Any) -> Tensor:
    """Return a quantized weight in the type that it had before; another one as it is."""
    if isinstance(weight, int8.Int8Weight):
        return weight if weight.scale is None else weight.dequantize()
    if not _is_four_bit(weight) or weight.quant_state is None:
        return weight
    return sys.modules[METHOD].functional.dequantize_4bit(weight.data, weight.quant_state)


def without_statistics(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict without the entries that say how its weights are quantized."""
    quantized = {name for name, value in state.items() if is_quantized(value)}
    return {n: v for n, v in state.items() if not quantized or not _is_below(n, quantized)}


def _is_below(name: str, owners: set[str]) -> bool:
    while "." in name:
        name = name.rpartition(".")[0]
        if name in owners:
            return True
    return False


def prepare(model: nn.Module) -> None:
    """Let the quantized layers of a model train in any engine, and load what they write.

    On CPUs with AVX512-BF16, bitsandbytes puts weights into another form in a forward pass without
    gradients. From then on they would give no gradients. That form is not used any more.

    Raises:
        ModelError: Weights are of a form that no engine takes.
    """
    _check_plain(model)
    int8.take_all(model)
    for layer in _layers(model):
        layer.support_avx512bf16_for_cpu = False
        if getattr(layer.weight.quant_state, "packing_format_for_cpu", False):
            layer.state_dict()  # puts the weight back
        if layer not in _PREPARED:
            layer.register_load_state_dict_pre_hook(_load_statistics)
            _PREPARED.add(layer)


def _load_statistics(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take from a state dict what `Linear4bit` writes beside its weight, and does not load."""
    start = f"{prefix}weight."
    found = {
        name.removeprefix(start): state.pop(name)
        for name in list(state)
        if name[: len(start)] == start
    }
    if found:
        kind = sys.modules[METHOD].functional.QuantState
        layer.weight.quant_state = kind.from_dict(found, device=layer.weight.device)
        layer.quant_state = layer.weight.quant_state


def _layers(model: nn.Module) -> Iterator[Any]:
    """Yield the 4-bit layers of a model, also those of which a rank holds a part."""
    for module in model.modules():
        layer = getattr(module, "quantized", module)
        if _is_four_bit_layer(layer):
            yield layer


@contextmanager
def in_fp32(model: nn.Module) -> Iterator[None]:
    """Let the 4-bit layers of a model compute in fp32 inside."""
    types = {layer: (layer.compute_dtype, layer.compute_type_is_set) for layer in _layers(model)}
    try:
        for layer in types:
            layer.compute_dtype, layer.compute_type_is_set = torch.float32, True
        yield
    finally:
        for layer, before in types.items():
            layer.compute_dtype, layer.compute_type_is_set = before


def part_of_layer(layer: Any, weight: Any, bias: nn.Parameter | None) -> Any:
    """Return a quantized layer with another weight, a part of its own, and another bias."""
    part = copy.copy(layer)
    part._parameters = {"weight": weight, "bias": bias}
    part._load_state_dict_pre_hooks = type(layer._load_state_dict_pre_hooks)()
    if _is_four_bit(weight):
        part.quant_state = weight.quant_state
    return part


def part_of(whole: Any, dim: int, pieces: Sequence[tuple[int, int]], name: str = "") -> Any:
    """Return a part of a quantized weight, with the same numbers to the bit.

    Statistics of 4 bits that are in 8 bits themselves become fp32.

    Args:
        whole: It stays as it is.
        dim: The dimension that is cut.
        pieces: The first and last element of each piece, one after the other.
        name: Of the layer.

    Raises:
        ModelError: A block of numbers that share a scale lies across the parts.
    """
    if isinstance(whole, int8.Int8Weight):
        return int8.part_of(whole, dim, pieces)
    state, functional = whole.quant_state, sys.modules[METHOD].functional
    rows, columns = state.shape
    scale = state.absmax
    if state.nested:
        scale = functional.dequantize_blockwise(scale, state.state2) + state.offset
    ends = [end * (columns if dim == 0 else 1) for piece in pieces for end in piece]
    if any(end % state.blocksize for end in ends) or (dim and columns % state.blocksize):
        reason = f"blocks of {state.blocksize} numbers in 4 bits lie across the ranks' parts"
        remedy = "Use fewer ranks, or pipeline stages in place of wavemare.tensor_parallel"
        raise ModelError(name or "weight", f"{rows} x {columns}", reason, remedy)

    def cut(values: Tensor, numbers: int) -> Tensor:
        """Cut what has one element for so many numbers."""
        table = values.reshape(-1) if dim == 0 else values.reshape(rows, columns // numbers)
        unit = columns if dim == 0 else 1
        return torch.cat(
            [table.narrow(-1, a * unit // numbers, (b - a) * unit // numbers) for a, b in pieces],
            -1,
        ).reshape(-1)

    shape = [rows, columns]
    shape[dim] = sum(last - first for first, last in pieces)
    own = functional.QuantState(
        absmax=cut(scale.float(), state.blocksize).clone(),
        shape=torch.Size(shape),
        code=state.code,
        blocksize=state.blocksize,
        quant_type=state.quant_type,
        dtype=state.dtype,
    )
    numbers = cut(whole.data.view(torch.uint8), 2).reshape(-1, 1).clone()
    return like(whole, numbers, own)


def like(weight: Any, numbers: Tensor, state: Any) -> Any:
    """Return a parameter of numbers that are in 4 bits already, with a weight's options."""
    return type(weight)(
        numbers,
        requires_grad=False,
        quant_state=state,
        blocksize=state.blocksize,
        compress_statistics=state.nested,
        quant_type=state.quant_type,
        quant_storage=numbers.dtype,
        bnb_quantized=True,
    )


def quantized_like(weight: Any, values: Tensor) -> Any:
    """Return values as they are quantized, with the options of a weight without values yet."""
    if isinstance(weight, int8.Int8Weight):
        return int8.quantized(values)
    options = {name: getattr(weight, name) for name in _OPTIONS}
    return type(weight)(values, requires_grad=False, **options).to(values.device)


def unread(weight: Any, shaped: Tensor) -> Any:
    """Return a part of a weight that will be quantized, of the shape of a tensor; else None."""
    if isinstance(weight, int8.Int8Weight):
        return int8.Int8Weight(shaped, None)
    if not is_quantized(weight):
        return None
    options = {name: getattr(weight, name) for name in _OPTIONS}
    return type(weight)(shaped, requires_grad=False, **options)


def convert(model: Any, config: Any) -> None:
    """Put quantized layers in the place of a model's linear ones, as ``from_pretrained`` does.

    Args:
        model: On the meta device.
        config: Of transformers.

    Raises:
        ModelError: It asks for another form.
        LaunchError: bitsandbytes is needed, and is not installed.
    """
    from transformers.quantizers.auto import AutoHfQuantizer

    is_int8 = int8.is_asked_for(config)
    if not is_int8 and not getattr(config, "load_in_4bit", False):
        reason = "weights are read late into bitsandbytes' 4 bits, or torchao's int8 with a scale "
        reason += "for each row, alone"
        remedy = "Give BitsAndBytesConfig(load_in_4bit=True, ...), or load it with from_pretrained"
        raise ModelError("quantization_config", type(config).__name__, reason, remedy)
    if not is_int8:
        require(METHOD, "quantization_config")
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    quantizer.preprocess_model(model=model, device_map=None, config=model.config)
    model.hf_quantizer = quantizer
    if is_int8:
        int8.convert(model, quantizer)
    quantizer.postprocess_model(model, config=model.config)


def check_unquantized(folder: Any) -> None:
    """Refuse a folder whose weights are quantized.

    Raises:
        ModelError: They are.
    """
    from wavemare.models.folder import read_config

    found = getattr(read_config(Path(folder).expanduser()), "quantization_config", None)
    if found:
        reason = "its weights are quantized in the files, and are read late as they are"
        raise ModelError("folder", str(folder), reason, "Load it with from_pretrained")


def unquantized(config: Any) -> Any:
    """Return a configuration of the same model with all its weights as numbers of their own."""
    if getattr(config, "quantization_config", None) is None:
        return config
    plain = copy.deepcopy(config)
    del plain.quantization_config
    return plain


def check_quantization(model: Any) -> None:
    """Refuse a model that is quantized in another form than those that can be cut.

    Raises:
        ModelError: It is.
    """
    _check_plain(model)
    method = getattr(model, "quantization_method", None)
    known = all(p.is_floating_point() or is_quantized(p) for p in model.parameters())
    has = has_quantized(model) or any(int8.layers(model))
    if known and (has or not getattr(model, "is_quantized", False)):
        return
    reason = f"its weights are quantized ({getattr(method, 'value', method) or 'integers'})"
    raise ModelError(
        "model",
        type(model).__name__,
        f"{reason}, and stages and tensor_parallel hold bitsandbytes' 4 bits and torchao's int8 "
        "alone",
        "Load it with BitsAndBytesConfig(load_in_4bit=True), or in bf16; or train it by ZeRO alone",
    )


def _check_plain(model: nn.Module) -> None:
    """Refuse weights that hold other tensors, except those that `prepare` can take apart.

    DeepSpeed moves the weights of every model. These it cannot move.

    Raises:
        ModelError: There are some.
    """
    from torch.distributed.tensor import DTensor

    taken = {id(layer.weight) for layer in int8.layers(model)}
    others = [p for p in model.parameters() if id(p) not in taken]
    kinds = {type(p) for p in others if hasattr(type(p), "__tensor_flatten__")}
    names = sorted(f"{k.__module__}.{k.__name__}" for k in kinds if not issubclass(k, DTensor))
    if names:
        reason = f"its weights are {', '.join(names)}, which hold other tensors"
        raise ModelError(
            "model",
            type(model).__name__,
            f"{reason}, and DeepSpeed's engines cannot take them; of torchao, they take "
            "Int8WeightOnlyConfig's in linear layers except the head",
            "Load it with BitsAndBytesConfig(load_in_4bit=True), or in bf16",
        )
