# SPDX-License-Identifier: Apache-2.0
"""The names that weights have in Megatron's files, and the one name that each has here.

Layers are numbered as GPTModel counts them, and the norm before the MLP is
``mlp.linear_fc1.layer_norm_weight``, whatever a file calls it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from wavemare.errors import CheckpointError
from wavemare.megatron.arrays import DAMAGED

_WRAPPERS = re.compile(r"^(model\.)?(module\.)*")
_LAYER = re.compile(r"^(?:decoder|encoder|transformer)\.layers\.(?:(\d{1,9})\.)?(.+)$")
_PARTS = (
    (r"^(?:input_layernorm|input_norm)\.", "self_attention.linear_qkv.layer_norm_"),
    (r"^pre_mlp_layernorm\.", "mlp.linear_fc1.layer_norm_"),
    # Names of the legacy models.
    (r"^(?:post_attention_layernorm|post_attention_norm)\.", "mlp.linear_fc1.layer_norm_"),
    (r"^attention\.", "self_attention."),
    (r"^self_attention\.query_key_value\.", "self_attention.linear_qkv."),
    (r"^self_attention\.dense\.", "self_attention.linear_proj."),
    (r"^mlp\.dense_h_to_4h\.", "mlp.linear_fc1."),
    (r"^mlp\.dense_4h_to_h\.", "mlp.linear_fc2."),
)
_OUTSIDE = (
    (r"^(?:encoder|transformer)\.", "decoder."),
    (r"^decoder\.final_norm\.", "decoder.final_layernorm."),
)
_HALF = re.compile(r"^(.*linear_fc1\.(?:weight|bias)\d*)_([wv])$")
_EXPERTS = (
    (re.compile(r"^mlp\.experts\.(?:experts|local_experts)\.(?P<expert>\d{1,6})\."), ""),
    (re.compile(r"^mlp\.experts\.experts\."), ""),
    (re.compile(r"^mlp\.experts\.(linear_fc[12]\.(?:weight|bias))(?P<expert>\d{1,6})$"), r"\1"),
)
"""How experts are counted: in the name, or by a dimension; what stays of the name."""
_SYMBOLS = {"M": "Mamba", "G": "gated delta net", "D": "sparse attention"}
_REMEDY = "Convert checkpoints whose layers are attention and MLP (or experts) in turn"


@dataclass(frozen=True)
class Spot:
    """Where a tensor of a file belongs.

    Attributes:
        part: The canonical name, of a weight in a layer without ``decoder.layers.N.``.
        in_layer: Whether it is in a layer.
        layer: The number of the layer; None if the first dimension counts the layers.
        expert: The number of the expert that it is one of; None for all of them.
        half: 0 for the gate's rows, 1 for the others; None for both.
    """

    part: str
    in_layer: bool = False
    layer: int | None = None
    expert: int | None = None
    half: int | None = None

    @property
    def of_experts(self) -> bool:
        """Whether the weight has a dimension that counts experts."""
        return self.in_layer and self.part.startswith("mlp.experts.")


def spot(name: str) -> Spot:
    """Return where a tensor of a file belongs."""
    name = _WRAPPERS.sub("", name, count=1)
    found = _LAYER.match(name)
    if not found:
        for pattern, new in _OUTSIDE:
            name = re.sub(pattern, new, name)
        return Spot(name)
    layer = int(found[1]) if found[1] else None
    part, expert = found[2], None
    for pattern, new in _PARTS:
        part = re.sub(pattern, new, part)
    split = _HALF.match(part)
    if split:
        part = split[1]
    for experts, kept in _EXPERTS:
        counted = experts.match(part)
        if counted:
            number = counted.groupdict().get("expert")
            expert = int(number) if number else None
            part = "mlp.experts." + counted.expand(kept) + part[counted.end() :]
            break
    return Spot(part, True, layer, expert, "wv".index(split[2]) if split else None)


def layer_of(name: str) -> int | None:
    """Return the number of the layer that a weight of a canonical name is in."""
    found = re.match(r"decoder\.layers\.(\d+)\.", name)
    return int(found[1]) if found else None


def order(name: str) -> tuple[int, int, str]:
    """Return the key by which canonical names are sorted: layer by layer."""
    layer = layer_of(name)
    if layer is not None:
        return 1, layer, name
    return (0 if name.startswith("embedding.") else 2), 0, name


def pairs_joined(spots: Iterable[Spot], pattern: str, where: str) -> dict[int, int]:
    """Return the number of the block for each numbered layer.

    HybridModel counts attention and MLP as layers of their own: a block is two of them.

    Args:
        spots: Of all tensors.
        pattern: ``--hybrid-layer-pattern`` as far as the checkpoint says it.
        where: The checkpoint, for errors.

    Raises:
        CheckpointError: The layers are of another kind, or no pairs.
    """
    kinds: dict[int, set[str]] = {}
    hybrid = bool(pattern)
    for each in spots:
        if each.in_layer and each.layer is not None:
            kinds.setdefault(each.layer, set()).add(each.part.partition(".")[0])
    for number, symbol in enumerate(c for c in pattern if c.isalnum() or c in "*-"):
        if symbol not in "*-E":
            said = f"{symbol!r} ({_SYMBOLS[symbol]})" if symbol in _SYMBOLS else repr(symbol)
            reason = f"layer {number} of its hybrid pattern is {said}"
            raise CheckpointError("checkpoint", where, reason, _REMEDY)
    for number, found in sorted(kinds.items()):
        if "mixer" in found:
            reason = f"layer {number} has a mixer (Mamba or another of a hybrid model)"
            raise CheckpointError("checkpoint", where, reason, _REMEDY)
    numbers = sorted(kinds)
    if numbers != list(range(len(numbers))):
        missing = min(set(range(len(numbers))) - kinds.keys())
        reason = f"layer {missing} is missing, where there is a layer {numbers[-1]}"
        raise CheckpointError("checkpoint", where, reason, DAMAGED)
    hybrid = hybrid or all(len(kinds[n] & {"self_attention", "mlp"}) == 1 for n in numbers)
    if not hybrid or not numbers:
        return {number: number for number in numbers}
    for number in numbers:
        expected = "mlp" if number % 2 else "self_attention"
        other = {"mlp", "self_attention"} - {expected}
        if expected not in kinds[number] or kinds[number] & other:
            reason = f"layer {number} of its hybrid pattern is not {expected}"
            raise CheckpointError("checkpoint", where, reason, _REMEDY)
    return {number: number // 2 for number in numbers}
