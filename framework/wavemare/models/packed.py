# SPDX-License-Identifier: Apache-2.0
"""Packed rows in attention: what keeps them apart, in the fastest way that an attention has.

The rows of a sample are known by their positions, which begin anew with each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from wavemare.engine.pipe.split_backward import is_compiled

_ATTENTION: Any = F.scaled_dot_product_attention
_CALL = 64 * 64
"""What a call of attention for one row costs beside its work, in pairs of tokens."""


def layer_kinds(config: Any, layers: int) -> Sequence[str]:
    """Return the kind of attention of each layer: ``full_attention``, ``sliding_attention``, ..."""
    kinds: Sequence[str] | None = getattr(config, "layer_types", None)
    if kinds is None:
        sliding = getattr(config, "sliding_window", None) is not None
        kinds = ["sliding_attention" if sliding else "full_attention"] * layers
    return kinds


def whole_arguments(model: Any, batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return what a whole model is told about the packed rows of a batch, by keyword.

    Args:
        model: Of transformers, perhaps with adapters. Models for which nothing is known, and
            compiled ones, make their own mask.
        batch: With ``position_ids`` if rows are packed.
        device: Of the model.
    """
    config: Any = getattr(model, "config", None)
    positions = batch.get("position_ids")
    if positions is None or batch.get("attention_mask") is not None:
        return {}
    bounds = kernel_bounds(config, positions, None)
    if bounds or not _takes_masks(config) or any(map(is_compiled, model.modules())):
        return bounds
    kinds = {*layer_kinds(config, 1)}
    if kinds == {"sliding_attention"}:
        mask = row_mask(config, positions, device, window=config.sliding_window)
    else:  # a model takes one mask for layers of all kinds
        mask = row_mask(config, positions, device) if kinds == {"full_attention"} else None
    return {} if mask is None else {"attention_mask": mask}


def _takes_masks(config: Any) -> bool:
    """Whether models of this kind do nothing with a mask but give it to their attention.

    With an auxiliary loss they count the tokens of an attention mask by it.
    """
    is_known = getattr(config, "model_type", None) == "gpt2"
    is_known = is_known or bool(getattr(config, "base_model_pp_plan", None))
    return is_known and not getattr(config, "output_router_logits", False)


def kernel_bounds(
    config: Any, positions: Tensor | None, attention_mask: Tensor | None
) -> dict[str, Any]:
    """Return what FlashAttention's kernels of variable length are told about packed rows.

    They get no mask. Without these bounds, transformers tells rows apart by their positions only
    in a batch of one sample, and those of a larger batch would see each other.

    Args:
        config: The model's, which names its attention.
        positions: (batch, sequence); a row begins with each sample, and wherever a position does
            not follow the one before.
        attention_mask: Of padding, which transformers passes to the kernels in its own way.

    Returns:
        Keyword arguments of a transformers model and of its blocks; none where the attention takes
        a mask, where no positions are given, or where a mask of padding is.
    """
    takes_mask = "flash" not in str(getattr(config, "_attn_implementation", None))
    if takes_mask or positions is None or attention_mask is not None:
        return {}
    return bounds_of(positions)


def bounds_of(positions: Tensor) -> dict[str, Any]:
    """Return where rows begin, and how long the longest is, as kernels are told."""
    starts = _begins(positions).flatten().nonzero()[:, 0]
    bounds = torch.cat([starts, starts.new_tensor([positions.numel()])]).to(torch.int32)
    longest = int(bounds.diff().max())
    sides = {"cu_seq_lens": bounds, "max_length": longest}
    return {f"{name}_{each}": value for name, value in sides.items() for each in "qk"}


def follows(name: str, value: Any, positions: Tensor | None) -> bool:
    """Whether an entry of a batch says of its rows what their positions say; TRL gives such."""
    if positions is None:
        return False
    rows = _begins(positions).long().cumsum(-1) - 1
    known = {**bounds_of(positions), "seq_idx": rows}
    if name not in known:
        return False
    own, given = torch.as_tensor(known[name]), torch.as_tensor(value)
    return own.shape == given.shape and bool((own.to(given.device) == given).all())


def row_mask(
    config: Any, positions: Tensor, device: torch.device, *, window: int | None = None
) -> RowMask | None:
    """Return a mask by which torch's attention computes each row alone, where that is faster.

    On a CPU torch's attention has no kernel of variable length, and computes the pairs of tokens
    that a mask forbids, too: their number grows with the square of a sample's length. On a GPU use
    FlashAttention.

    Args:
        config: The model's, which names its attention.
        positions: (batch, sequence).
        device: Where the attention computes.
        window: How many tokens a token sees, itself included; None for all before it.

    Returns:
        None where another attention computes, where code is compiled, whose shapes must not
        change, where no sample has several rows, and where samples are too short to gain from it.
    """
    if (
        getattr(config, "_attn_implementation", None) != "sdpa"
        or device.type != "cpu"
        or torch.compiler.is_compiling()
    ):
        return None
    length = positions.shape[1]
    rows = [
        torch.cat([each.nonzero()[:, 0], each.new_tensor([length], dtype=torch.int64)])
        .diff()
        .tolist()
        for each in _begins(positions)
    ]
    pairs = sum(own * own + _CALL for lengths in rows for own in lengths)
    is_packed = any(len(lengths) > 1 for lengths in rows)
    if not is_packed or pairs > len(rows) * length * length:
        return None
    return RowMask(rows, device, window)


def _begins(positions: Tensor) -> Tensor:
    """Return where rows begin, boolean of the shape (batch, sequence)."""
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions.diff(dim=-1) != 1
    return begins


class RowMask(Tensor):
    """A causal mask of packed rows, of which torch's attention computes each alone.

    As `torch.nn.attention.bias.CausalBias` does, it takes the place of
    ``scaled_dot_product_attention`` where it is the mask. For all other functions it is a boolean
    tensor of the shape (batch, 1, sequence, sequence). With dropout, which draws for all pairs of
    tokens, attention takes that tensor, too.

    Args:
        rows: The lengths of the rows of each sample, all with the same sum.
        device: Of the boolean tensor.
        window: How many tokens a token sees, itself included; None for all before it.
    """

    _rows: Sequence[Sequence[int]]
    _window: int | None
    _bands: dict[int, Tensor]

    @staticmethod
    def __new__(
        cls, rows: Sequence[Sequence[int]], device: torch.device, window: int | None = None
    ) -> RowMask:
        """Make one; its tensor is made when it is used."""
        length = sum(rows[0])
        shape = (len(rows), 1, length, length)
        made: RowMask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        made._rows, made._window, made._bands = rows, window, {}
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        """Name the rows."""
        return f"RowMask({self._rows}, window={self._window})"

    def dense(self) -> Tensor:
        """Return the boolean tensor."""
        lengths = [torch.tensor(each, device=self.device) for each in self._rows]
        numbers = torch.stack([torch.arange(len(n)).to(n).repeat_interleave(n) for n in lengths])
        same_row = numbers[:, None, :, None] == numbers[:, None, None, :]
        return same_row & self._band(self.shape[-1])

    def _band(self, length: int) -> Tensor:
        """Return which tokens of a row each token sees, boolean of the shape (length, length)."""
        if length not in self._bands:
            place = torch.arange(length, device=self.device)
            back = place[:, None] - place
            self._bands[length] = (back >= 0) & (back < (self._window or length))
        return self._bands[length]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Return the attention of (batch, heads, sequence, size), row by row."""
        samples = []
        states = (each.split(1) for each in (query, key, value))
        for rows, *sample in zip(self._rows, *states, strict=True):
            parts = (each.split(list(rows), dim=2) for each in sample)
            found = []
            for length, *row in zip(rows, *parts, strict=True):
                narrow = self._window is not None and self._window < length
                mask = {"attn_mask": self._band(length)} if narrow else {"is_causal": True}
                found.append(_ATTENTION(*row, **mask, **options))
            samples.append(torch.cat(found, dim=2))
        return torch.cat(samples)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute attention by rows; leave all else to torch."""
        kwargs = kwargs or {}
        if func is _ATTENTION and _is_plain(*args, **kwargs):
            given = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | kwargs
            mask = given.pop("attn_mask")
            given.pop("dropout_p", None)
            given.pop("is_causal", None)
            result: Tensor = mask._attend(**given)
            return result
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Give other functions the boolean tensor."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            mask = args[0]
            return cls(mask._rows, mask.device, mask._window)
        args, kwargs = tree_map_only(cls, cls.dense, (args, kwargs or {}))
        return func(*args, **kwargs)


def _is_plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> bool:
    """Whether this is the attention within packed rows, without dropout."""
    return (
        isinstance(attn_mask, RowMask)
        and not dropout_p
        and not is_causal
        and attn_mask.shape[0] == query.shape[0] == key.shape[0]
        and attn_mask.shape[-1] == query.shape[-2] == key.shape[-2]
    )
