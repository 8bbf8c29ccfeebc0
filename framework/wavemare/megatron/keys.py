# SPDX-License-Identifier: Apache-2.0
"""Megatron's weights by transformers' names, and transformers' by Megatron's.

A row of the tables is one weight of Megatron's and the weights of transformers that stand in it.
Megatron's names are those of `store.py`: layers are numbered, tensors whole, the rows of query, key
and value in groups. Transformers' are those that a model has in memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from wavemare.errors import ModelError
from wavemare.models.source import Span, Stored, WeightSource, bounds, cast, size_of, spans_of
from wavemare.models.spans import within

EMBEDDING = "embedding.word_embeddings.weight"
POSITIONS = "embedding.position_embeddings.weight"
HEAD = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_NORM = re.compile(r"(layer_norm_|layernorm\.)weight$")
_VOCABULARY = (EMBEDDING, HEAD)
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_Run = tuple[int, int, int]
"""The number of a part, its first row, and the one after its last."""


class Form(Enum):
    """How weights of transformers stand in one of Megatron's."""

    SAME = "as it is"
    TURNED = "transposed"
    STACKED = "one below the other"
    GROUPED = "query, key and value, mixed group by group"
    GROUPED_TURNED = "the same, of one tensor that has them side by side"


_TRANSPOSED = (Form.TURNED, Form.GROUPED_TURNED)


@dataclass(frozen=True)
class Row:
    """One weight of Megatron's.

    Attributes:
        megatron: Its name, in a layer or whole.
        names: Transformers' names of what stands in it.
        form: How.
    """

    megatron: str
    names: tuple[str, ...]
    form: Form = Form.SAME


@dataclass(frozen=True)
class Table:
    """The weights of a kind of models.

    Attributes:
        outside: Rows outside the layers.
        prefix: Transformers' name of the layers.
        layer: Rows of a layer.
    """

    outside: tuple[Row, ...]
    prefix: str
    layer: tuple[Row, ...]


def _pair(megatron: str, *names: str, form: Form = Form.SAME) -> tuple[Row, Row]:
    """Return the rows of a weight and of its bias, which is never transposed."""
    of_bias = Form.SAME if form is Form.TURNED else form
    return tuple(
        Row(megatron + end, tuple(name + end for name in names), kind)
        for end, kind in (("weight", form), ("bias", of_bias))
    )  # type: ignore[return-value]


_QKV, _PROJECTION = "self_attention.linear_qkv.", "self_attention.linear_proj."
_UP, _DOWN, _SHARED = "mlp.linear_fc1.", "mlp.linear_fc2.", "mlp.shared_experts."

GPT2 = Table(
    outside=(
        Row(EMBEDDING, ("transformer.wte.weight",)),
        Row(POSITIONS, ("transformer.wpe.weight",)),
        *_pair("decoder.final_layernorm.", "transformer.ln_f."),
        Row(HEAD, ("lm_head.weight",)),
    ),
    prefix="transformer.h.",
    layer=(
        *_pair(f"{_QKV}layer_norm_", "ln_1."),
        *_pair(_QKV, "attn.c_attn.", form=Form.GROUPED_TURNED),
        *_pair(_PROJECTION, "attn.c_proj.", form=Form.TURNED),
        *_pair(f"{_UP}layer_norm_", "ln_2."),
        *_pair(_UP, "mlp.c_fc.", form=Form.TURNED),
        *_pair(_DOWN, "mlp.c_proj.", form=Form.TURNED),
    ),
)
LLAMA = Table(
    outside=(
        Row(EMBEDDING, ("model.embed_tokens.weight",)),
        Row(FINAL_NORM, ("model.norm.weight",)),
        Row(HEAD, ("lm_head.weight",)),
    ),
    prefix="model.layers.",
    layer=(
        Row(f"{_QKV}layer_norm_weight", ("input_layernorm.weight",)),
        *_pair(
            _QKV,
            *(f"self_attn.{part}_proj." for part in "qkv"),
            form=Form.GROUPED,
        ),
        Row("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",)),
        Row("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",)),
        *_pair(_PROJECTION, "self_attn.o_proj."),
        Row(f"{_UP}layer_norm_weight", ("post_attention_layernorm.weight",)),
        *_pair(_UP, "mlp.gate_proj.", "mlp.up_proj.", form=Form.STACKED),
        *_pair(_DOWN, "mlp.down_proj."),
        Row("mlp.router.weight", ("mlp.gate.weight",)),
        Row("mlp.experts.linear_fc1.weight", ("mlp.experts.gate_up_proj",)),
        Row("mlp.experts.linear_fc2.weight", ("mlp.experts.down_proj",)),
        Row(
            f"{_SHARED}linear_fc1.weight",
            ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
            Form.STACKED,
        ),
        Row(f"{_SHARED}linear_fc2.weight", ("mlp.shared_expert.down_proj.weight",)),
        Row(f"{_SHARED}gate_weight", ("mlp.shared_expert_gate.weight",)),
    ),
)
"""Also Mistral, Qwen2, Qwen3, and their mixtures of experts: none uses a name otherwise."""


@dataclass(frozen=True)
class Heads:
    """Sizes of attention.

    Attributes:
        queries: Query heads.
        groups: Key and value heads, each of which a group of query heads shares.
        size: Numbers in a head.
    """

    queries: int
    groups: int
    size: int

    @property
    def widths(self) -> tuple[int, int, int]:
        """Rows of a group's queries, key and value."""
        return self.queries // self.groups * self.size, self.size, self.size


def table_of(config: Any) -> Table:
    """Return the table of a transformers configuration."""
    return GPT2 if config.model_type == "gpt2" else LLAMA


def heads_of(config: Any) -> Heads:
    """Return the sizes of attention of a transformers configuration."""
    queries = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or queries
    size = getattr(config, "head_dim", None) or config.hidden_size // queries
    return Heads(queries, groups, size)


def layer_of(key: str) -> tuple[int, str] | None:
    """Return the number of a Megatron weight's layer and its name there; None outside layers."""
    found = _LAYER.fullmatch(key)
    return (int(found[1]), found[2]) if found else None


def _rows(table: Table, layers: int) -> list[Row]:
    rows = [row for row in table.outside if row.megatron in (EMBEDDING, POSITIONS)]
    for layer in range(layers):
        for row in table.layer:
            names = tuple(f"{table.prefix}{layer}.{name}" for name in row.names)
            rows.append(Row(f"decoder.layers.{layer}.{row.megatron}", names, row.form))
    return rows + [row for row in table.outside if row.megatron not in (EMBEDDING, POSITIONS)]


# --- from Megatron --------------------------------------------------------------------------------


class HfWeights:
    """Megatron's weights by the names that a transformers model has in memory.

    A part of a weight reads the part of Megatron's that it stands in, as far as rows are
    neighbours there.

    Args:
        weights: By Megatron's names.
        config: The configuration of transformers; its vocabulary cuts the padding off.
        centered: Whether the weights of norms are stored without the one that Megatron adds
            (``apply_layernorm_1p``).
        dtype: Of norms to whose weights the one is added; as they are stored if omitted.

    Raises:
        ModelError: Megatron's has a weight that this kind of models has no place for.
    """

    def __init__(
        self,
        weights: WeightSource,
        config: Any,
        *,
        centered: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._weights, self._heads, self._centered = weights, heads_of(config), centered
        self._tokens = config.vocab_size
        self._places: dict[str, tuple[Row, int]] = {}
        self._last: tuple[Any, Tensor] | None = None
        left, found = dict(weights.stored), {}
        tied = config.tie_word_embeddings
        for row in _rows(table_of(config), config.num_hidden_layers):
            key = EMBEDDING if row.megatron == HEAD and tied else row.megatron
            if key not in weights.stored:
                continue
            left.pop(row.megatron, None)
            shapes = self._shapes(Row(key, row.names, row.form), weights.stored[key].shape)
            for part, (name, shape) in enumerate(zip(row.names, shapes, strict=True)):
                self._places[name] = Row(key, row.names, row.form), part
                own = weights.stored[key].dtype
                found[name] = Stored(shape, dtype or own if self._lacks_one(key) else own)
        if left:
            names = ", ".join(sorted(left)[:5])
            reason = f"{config.model_type} has no place for these {len(left)} weights of Megatron"
            remedy = "Convert a model of a family that docs/megatron.md names"
            raise ModelError("weights", names, reason, remedy)
        self.stored: Mapping[str, Stored] = found

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Return a weight, or the part of it that slices of its first dimensions name."""
        row, part = self._places[name]
        found = self._read(row, part, self.stored[name].shape, index)
        if not self._lacks_one(row.megatron):
            return found
        wide = torch.promote_types(found.dtype, torch.float32)  # in which Megatron adds it
        return (found.to(wide) + 1).to(self.stored[name].dtype)

    def spans(self, name: str) -> Sequence[Span] | None:
        """Return the places of a weight's bytes; see `Placed`."""
        (row, part), stored = self._places[name], self.stored[name]
        if row.form in _TRANSPOSED or self._lacks_one(row.megatron):
            return None
        whole = spans_of(self._weights, row.megatron)
        if whole is None or not stored.shape:
            return whole
        width = size_of(stored) // stored.shape[0] if stored.shape[0] else 0
        runs = self._rows(row, part, stored.shape, (0, stored.shape[0]))
        return [span for a, b in runs for span in within(whole, a * width, (b - a) * width)]

    @property
    def rounded(self) -> frozenset[torch.dtype]:
        """The types to which sums of a norm's weight and the one are rounded."""
        kinds = (
            s.dtype for n, s in self.stored.items() if self._lacks_one(self._places[n][0].megatron)
        )
        return frozenset(kind for kind in kinds if kind.itemsize < torch.float32.itemsize)

    def _lacks_one(self, key: str) -> bool:
        return self._centered and bool(_NORM.search(key))

    def _shapes(self, row: Row, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        rest = shape[1:]
        if row.megatron in _VOCABULARY:
            return [(self._tokens, *rest)]
        if row.form in (Form.GROUPED, Form.GROUPED_TURNED):
            rows = self._heads.groups * sum(self._heads.widths)
            if shape[0] != rows:
                reason = f"{self._heads} make {rows} rows, and it has {shape[0]}"
                raise ModelError("weights", row.megatron, reason, "Give the right --config FOLDER")
        if row.form is Form.STACKED:
            return [(shape[0] // len(row.names), *rest)] * len(row.names)
        if row.form is Form.GROUPED:
            return [(self._heads.groups * width, *rest) for width in self._heads.widths]
        return [shape if row.form is Form.SAME else shape[::-1]]

    def _read(
        self, row: Row, part: int, shape: tuple[int, ...], index: tuple[slice, ...]
    ) -> Tensor:
        if row.form is Form.TURNED:
            columns = (*index, slice(None), slice(None))[:2]
            return self._weights.read(row.megatron, columns[::-1]).T
        if row.form is Form.GROUPED_TURNED:
            of_each = (0, shape[-1] // 3)
            parts = [self._grouped(row.megatron, number, of_each, ()) for number in range(3)]
            return _turned(torch.cat(parts))[index]
        if not shape:
            return self._weights.read(row.megatron, index)
        rows = bounds(index, shape)[0]
        if row.form is Form.GROUPED:
            return self._grouped(row.megatron, part, rows, index[1:])
        ((first, last),) = self._rows(row, part, shape, rows)
        return self._weights.read(row.megatron, (slice(first, last), *index[1:]))

    def _rows(
        self, row: Row, part: int, shape: tuple[int, ...], rows: tuple[int, int]
    ) -> list[tuple[int, int]]:
        """Return the rows of Megatron's weight, run by run, that are some rows of a weight."""
        if row.form is Form.GROUPED:
            return self._rows_in_groups(part, rows)
        before = part * shape[0] if row.form is Form.STACKED else 0
        return [(before + rows[0], before + rows[1])]

    def _rows_in_groups(self, part: int, rows: tuple[int, int]) -> list[tuple[int, int]]:
        widths = self._heads.widths
        width, total, before = widths[part], sum(widths), sum(widths[:part])
        found = []
        for group in range(rows[0] // width, math.ceil(rows[1] / width)):
            first, last = max(rows[0] - group * width, 0), min(rows[1] - group * width, width)
            found.append((group * total + before + first, group * total + before + last))
        return found

    def _grouped(
        self, key: str, part: int, rows: tuple[int, int], rest: tuple[slice, ...]
    ) -> Tensor:
        """Return rows of query (part 0), key or value; only the groups with them are read."""
        total, runs = sum(self._heads.widths), self._rows_in_groups(part, rows)
        first = runs[0][0] // total if runs else 0
        last = first + len(runs)
        wanted = key, first, last, rest
        # Query, key and value are asked for one after the other, by one thread or by several.
        held, self._last = self._last, None
        if held is None or held[0] != wanted:
            held = None  # before the next one is in memory
            held = wanted, self._weights.read(key, (slice(first * total, last * total), *rest))
        self._last = held
        own = [held[1][a - first * total : b - first * total] for a, b in runs]
        return torch.cat(own) if own else held[1]


# --- to Megatron ----------------------------------------------------------------------------------


class MegatronWeights:
    """A transformers model's weights by Megatron's names.

    Args:
        source: By the names in memory.
        config: The configuration of transformers.
        padded: Rows of the vocabulary; the last token's are repeated until there are so many.
        dtype: Of floating-point weights; the source's if omitted.

    Raises:
        ModelError: The source has a weight that Megatron has no place for, or of a type that
            Megatron's have not.
    """

    def __init__(
        self, source: WeightSource, config: Any, *, padded: int, dtype: torch.dtype | None = None
    ) -> None:
        self._source, self._heads, self._padded = source, heads_of(config), padded
        self._places: dict[str, Row] = {}
        found, left = {}, dict(source.stored)
        for row in _rows(table_of(config), config.num_hidden_layers):
            if row.names[0] not in source.stored:
                continue
            held = [left.pop(name) for name in row.names]
            if row.megatron == HEAD and config.tie_word_embeddings:
                continue
            self._places[row.megatron] = row
            kinds = [
                _type(name, part.dtype, dtype) for name, part in zip(row.names, held, strict=True)
            ]
            found[row.megatron] = Stored(self._shape(row, held), kinds[0])
        if left:
            names = ", ".join(sorted(left)[:5])
            reason = f"Megatron's GPT has no place for these {len(left)} weights"
            remedy = "Convert a model of a family that docs/megatron.md names"
            raise ModelError("weights", names, reason, remedy)
        self.stored: Mapping[str, Stored] = found

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Return a weight, or the part of it that slices of its first dimensions name."""
        row, dtype = self._places[name], self.stored[name].dtype
        if row.form is Form.SAME and name not in _VOCABULARY:
            return cast(row.names[0], self._source.read(row.names[0], index), dtype)
        parts = [cast(part, self._source.read(part), dtype) for part in row.names]
        if row.form is Form.TURNED:
            return parts[0].T.contiguous()[index]
        if row.form is Form.GROUPED_TURNED:
            parts = list(_turned(parts[0]).chunk(3))
        runs = self._runs(row, [len(part) for part in parts])
        if len(runs) == 1:
            return parts[0][index]
        return torch.cat([parts[number][first:last] for number, first, last in runs])[index]

    def spans(self, name: str) -> Sequence[Span] | None:
        """Return the places of a weight's bytes; see `Placed`."""
        row, own = self._places[name], self.stored[name]
        held = [self._source.stored[part] for part in row.names]
        if row.form in _TRANSPOSED or any(part.dtype is not own.dtype for part in held):
            return None
        parts = [spans_of(self._source, part) for part in row.names]
        width = size_of(own) // own.shape[0] if own.shape else 0
        found: list[Span] = []
        for number, first, last in self._runs(row, [part.shape[0] for part in held]):
            part = parts[number]
            if part is None:
                return None
            found += within(part, first * width, (last - first) * width)
        return found

    def _shape(self, row: Row, held: list[Stored]) -> tuple[int, ...]:
        shape = held[0].shape
        if row.megatron in _VOCABULARY:
            return (self._padded, *shape[1:])
        if row.form in (Form.TURNED, Form.GROUPED_TURNED):
            return shape[::-1]
        return (sum(part.shape[0] for part in held), *shape[1:]) if len(held) > 1 else shape

    def _runs(self, row: Row, rows: list[int]) -> list[_Run]:
        """Return the rows of a weight in their order, of the rows that its parts have."""
        whole = [(number, 0, count) for number, count in enumerate(rows)]
        if row.megatron in _VOCABULARY:
            return whole + [(0, rows[0] - 1, rows[0])] * (self._padded - rows[0])
        if row.form in (Form.SAME, Form.STACKED):
            return whole
        groups, runs = self._heads.groups, []
        for group in range(groups):
            for number, count in enumerate(rows):
                width = count // groups
                runs.append((number, group * width, (group + 1) * width))
        return runs


def _type(name: str, own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the type that a weight gets.

    Raises:
        ModelError: It is none that Megatron's weights have.
    """
    is_wide = own is torch.float64
    if own in _TYPES or (is_wide and wanted is not None):
        own = wanted or own
    if own in _TYPES:
        return own
    names = ", ".join(str(each).removeprefix("torch.") for each in _TYPES)
    reason = f"its type is {str(own).removeprefix('torch.')}, and Megatron's are {names}"
    remedy = "Give the model as it was before it was quantized"
    if own is torch.float64:
        remedy = "Choose one with --dtype, or cast the model first"
    raise ModelError("weight", name, reason, remedy)


def _turned(weight: Tensor) -> Tensor:
    return weight.T if weight.dim() > 1 else weight
