# SPDX-License-Identifier: Apache-2.0
"""Folders of one file per rank: ``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`` (format torch).

They are those of the legacy models, checkpoint versions 0 to 3, and of Megatron-core's with
``--ckpt-format torch``. A rank holds its part of each weight, its layers counted from 0.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wavemare.errors import CheckpointError
from wavemare.megatron.arrays import DAMAGED, Array, Held
from wavemare.megatron.assembled import Assembled, Box
from wavemare.megatron.names import Spot, order, spot
from wavemare.megatron.pickles import Inert, attributes, plain, read_saved
from wavemare.models.source import Stored

FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d\d)(?:_(\d\d\d))?(?:_(\d\d\d))?")
_MODELS = re.compile(r"model(\d*)")
_FOR_HEAD = "word_embeddings_for_head.weight"
_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_NEWEST = 3  # of the checkpoint versions
_ONE_ORDER = 2  # from this version on the order of query, key and value is one
_BY_ROWS = re.compile(rf"{_EMBEDDING}|{_HEAD}|.*\.linear_(qkv|fc1)\.(weight|bias)")
_BY_COLUMNS = re.compile(r".*\.linear_(proj|fc2)\.weight")
_HALVES = re.compile(r"(.*)\.linear_fc1\.(weight|bias)")
_MOST_RANKS = 100_000
_OF_ALL = ("iteration", "checkpoint_version")
_ARGUMENTS_OF_ALL = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "padded_vocab_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "consumed_train_samples",
)
"""What all ranks of one save have alike."""
_COPY_ALL = "Copy all of its ranks"


@dataclass(frozen=True)
class RankFiles:
    """A folder of rank files.

    Attributes:
        weights: By canonical names.
        content: The first rank's file: everything beside the model.
        parallelism: Ranks by Megatron's names of the ways to share a model.
    """

    weights: Assembled
    content: Mapping[str, Any]
    parallelism: Mapping[str, int]
    _extra: Sequence[Any] = field(repr=False)

    def extra_states(self) -> Iterator[bytes]:
        """Yield what Transformer Engine keeps beside weights."""
        for value in self._extra:
            if isinstance(value, Array):
                yield value.read().contiguous().view(torch.uint8).numpy().tobytes()
            else:  # a file in memory, as earlier versions have it
                parts = value.state if isinstance(value, Inert) else ()
                yield from (part for part in parts or () if isinstance(part, bytes))


@dataclass
class _Piece:
    """A rank's tensor."""

    array: Array | Held
    tensor_rank: int
    expert: int | None


def open_rank_files(step: Path, num_attention_heads: int | None = None) -> RankFiles:
    """Open the files of all ranks; no weight is read.

    Args:
        step: The folder of one iteration.
        num_attention_heads: For files of versions 0 and 1 that do not say it.

    Raises:
        CheckpointError: A rank's file is missing or damaged, or of another version or layout.
    """
    found = {
        match.groups(): path / FILE
        for path in sorted(step.glob("mp_rank_*"))
        if (match := _RANK.fullmatch(path.name)) and (path / FILE).is_file()
    }
    if not found:
        raise CheckpointError("checkpoint", str(step), f"there is no mp_rank_*/{FILE}", _COPY_ALL)
    loaded = {words: _load(path) for words, path in found.items()}
    first = next(iter(loaded.values()))
    _check_one_save(step, found, loaded)
    arguments = attributes(first.get("args"))
    places = {_place(words, arguments): content for words, content in loaded.items()}
    paths = {_place(words, arguments): path for words, path in found.items()}
    sizes = _sizes(step, list(places), arguments)
    version = first.get("checkpoint_version", 0)  # before there was a version, its number was 0
    if not isinstance(version, int | float) or version not in range(_NEWEST + 1):
        reason = f"its checkpoint_version is {version!r} where 0 to {_NEWEST} are known"
        remedy = "Save it with a Megatron that is known"
        raise CheckpointError("checkpoint", str(step), reason, remedy)
    heads = num_attention_heads or arguments.get("num_attention_heads")
    maker = _Maker(step, sizes, int(version), heads if isinstance(heads, int) else None)
    extra: list[Any] = []
    maker.take(places, paths, extra)
    if arguments.get("untie_embeddings_and_output_weights") is False:
        maker.pieces.pop(_HEAD, None)  # the last stage's copy of the embedding
    content = {name: value for name, value in first.items() if not _MODELS.fullmatch(str(name))}
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    parallelism = dict(zip((*names, "expert_model_parallel_size"), sizes, strict=True))
    return RankFiles(maker.assembled(), content, parallelism, extra)


def _load(path: Path) -> Mapping[str, Any]:
    content = read_saved(path)
    if not isinstance(content, Mapping) or not any(_MODELS.fullmatch(str(n)) for n in content):
        raise CheckpointError("checkpoint", str(path), "it holds no model", DAMAGED)
    return content


def _check_one_save(
    step: Path, found: Mapping[Any, Path], loaded: Mapping[Any, Mapping[str, Any]]
) -> None:
    """Refuse files of several saves, which have been put into one folder.

    Raises:
        CheckpointError: What they differ in.
    """

    def said(content: Mapping[str, Any]) -> dict[str, Any]:
        arguments = attributes(content.get("args"))
        own = {name: content.get(name) for name in _OF_ALL}
        return own | {name: plain(arguments.get(name)) for name in _ARGUMENTS_OF_ALL}

    (first, one), *others = ((found[words].parent.name, said(c)) for words, c in loaded.items())
    for name, other in others:
        different = next((key for key in one if one[key] != other[key]), None)
        if different is not None:
            reason = f"its ranks are of several saves: {different} is {one[different]!r} in {first}"
            reason += f" and {other[different]!r} in {name}"
            raise CheckpointError("checkpoint", str(step), reason, _COPY_ALL)


def _place(words: tuple[str | None, ...], arguments: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return a folder's tensor rank, stage and expert rank."""
    tensor, second, third = (int(word or 0) for word in words)
    if words[1] and not words[2] and arguments.get("pipeline_model_parallel_size") == 1:
        return tensor, 0, second  # a stage is not named where there is one
    return tensor, second, third


def _sizes(
    step: Path, places: Sequence[tuple[int, int, int]], arguments: Mapping[str, Any]
) -> tuple[int, int, int]:
    names = ("tensor", "pipeline", "expert")
    sizes = [1 + max(place[axis] for place in places) for axis in range(3)]
    for axis, name in enumerate(names):
        said = arguments.get(f"{name}_model_parallel_size")
        if isinstance(said, int) and sizes[axis] < said <= _MOST_RANKS:
            sizes[axis] = said
    for place in itertools.product(*map(range, sizes)):
        if place not in places:
            which = ", ".join(f"{n} rank {r}" for n, r in zip(names, place, strict=True))
            reason = f"the file of {which} is missing"
            raise CheckpointError("checkpoint", str(step), reason, _COPY_ALL)
    groups = arguments.get("num_query_groups")
    if not arguments.get("group_query_attention") or not isinstance(groups, int):
        groups = sizes[0]
    expert_tensor = arguments.get("expert_tensor_parallel_size")
    reason = ""
    if groups < sizes[0]:
        reason = f"its {groups} groups of keys are on several of {sizes[0]} tensor-parallel ranks"
    elif sizes[2] > 1 and expert_tensor not in (None, sizes[0]):
        reason = f"it was saved with expert_tensor_parallel_size {expert_tensor}"
    if reason:
        remedy = "Save it with --ckpt-format torch_dist"
        raise CheckpointError("checkpoint", str(step), reason, remedy)
    return sizes[0], sizes[1], sizes[2]


class _Maker:
    """Puts the ranks' tensors together.

    Args:
        step: The folder, for errors.
        sizes: Tensor ranks, stages, expert ranks.
        version: Of the checkpoint.
        heads: Attention heads, if they are known.
    """

    def __init__(
        self, step: Path, sizes: tuple[int, int, int], version: int, heads: int | None
    ) -> None:
        self._step, self._version, self._heads = str(step), version, heads
        self._tensor_ranks, self._stages, self._expert_ranks = sizes
        self.pieces: dict[str, list[_Piece]] = {}

    def take(
        self,
        places: Mapping[tuple[int, int, int], Mapping[str, Any]],
        paths: Mapping[tuple[int, int, int], Path],
        extra: list[Any],
    ) -> None:
        """Take the tensors of all files, layers counted from the model's first."""
        flat = {
            place: [list(_flat(model, paths[place], extra)) for model in _models(content)]
            for place, content in places.items()
        }
        if len({len(models) for models in flat.values()}) > 1:
            reason = "its ranks have different numbers of virtual stages"
            raise CheckpointError("checkpoint", self._step, reason, DAMAGED)
        first = 0
        for virtual in range(len(flat[0, 0, 0])):
            for stage in range(self._stages):
                count = 0
                for tensor, expert in itertools.product(
                    range(self._tensor_ranks), range(self._expert_ranks)
                ):
                    own = flat[tensor, stage, expert][virtual]
                    numbers = [s.layer for s, _ in own if s.layer is not None]
                    count = max(count, 1 + max(numbers, default=-1))
                    self._add(own, first, stage, tensor, expert)
                first += count

    def _add(
        self, own: Sequence[tuple[Spot, Any]], first: int, stage: int, tensor: int, expert: int
    ) -> None:
        experts = 1 + max((s.expert for s, _ in own if s.expert is not None), default=-1)
        for each, array in own:
            name = each.part
            if each.layer is not None:
                name = f"decoder.layers.{first + each.layer}.{each.part}"
            elif each.part == _FOR_HEAD or (stage and each.part == _EMBEDDING):
                continue  # copies of the first stage's
            if each.expert is not None:
                number = expert * experts + each.expert
                self._put(name, _Piece(array, tensor, number))
            elif not expert:  # expert ranks hold the same
                self._put(name, _Piece(array, tensor, None))

    def _put(self, name: str, piece: _Piece) -> None:
        self.pieces.setdefault(name, []).append(piece)

    def assembled(self) -> Assembled:
        """Return the weights, layer by layer.

        Raises:
            CheckpointError: Ranks hold different tensors.
        """
        stored, boxes = {}, {}
        for name in sorted(self.pieces, key=order):
            stored[name], boxes[name] = self._joined(name, self.pieces[name])
        if not stored:
            raise CheckpointError("checkpoint", self._step, "its model is empty", DAMAGED)
        weights = Assembled(self._step, stored, boxes)
        weights.check()
        return weights

    def _joined(self, name: str, pieces: Sequence[_Piece]) -> tuple[Stored, list[Box]]:
        by_expert: dict[int | None, list[_Piece]] = {}
        for piece in pieces:
            by_expert.setdefault(piece.expert, []).append(piece)
        shape, dtype = pieces[0].array.shape, pieces[0].array.dtype
        for each in by_expert.values():
            kinds = {(piece.array.shape, piece.array.dtype) for piece in each}
            if kinds != {(shape, dtype)} or len(each) != self._tensor_ranks:
                reason = f"tensor-parallel ranks do not all hold {name}, or not in one shape"
                raise CheckpointError("checkpoint", self._step, reason, DAMAGED)
        whole = list(shape)
        boxes: list[tuple[int | None, Box]] = []
        cut = 0 if _BY_ROWS.fullmatch(name) else 1 if _BY_COLUMNS.fullmatch(name) else None
        if cut is not None and len(shape) > cut:
            whole[cut] *= self._tensor_ranks
            for piece in pieces:
                boxes += self._cut(name, piece, whole, cut)
        else:
            for each in by_expert.values():
                copies = tuple(partial(_of, piece.array) for piece in each[1:])
                opened = partial(_of, each[0].array)
                boxes.append((each[0].expert, Box((0,) * len(shape), shape, opened, (), copies)))
        if None in by_expert:
            return Stored(tuple(whole), dtype), [box for _, box in boxes]
        count = 1 + max(expert for expert in by_expert if expert is not None)
        return Stored((count, *whole), dtype), [box.of_expert(e or 0) for e, box in boxes]

    def _cut(
        self, name: str, piece: _Piece, whole: Sequence[int], cut: int
    ) -> Iterator[tuple[int | None, Box]]:
        """Yield the boxes of a rank's part of a weight that the ranks share out."""
        shape, opened = piece.array.shape, partial(_of, piece.array)
        parts = 2 if self._is_gated(name) else 1
        turn = self._turn(name, shape)
        rows = shape[cut] // parts
        for number in range(parts):
            first, size = [0] * len(shape), list(shape)
            index = [slice(None)] * len(shape)
            size[cut] = rows
            first[cut] = (number * self._tensor_ranks + piece.tensor_rank) * rows
            index[cut] = slice(number * rows, (number + 1) * rows)
            box = Box(tuple(first), tuple(size), opened, tuple(index), turn=turn)
            yield piece.expert, box

    def _is_gated(self, name: str) -> bool:
        """Whether the rows are those of the gate and then those of the other linear layer."""
        halves = _HALVES.fullmatch(name)
        if not halves:
            return False
        one, two = (self.pieces.get(f"{halves[1]}.linear_fc{n}.weight") for n in (1, 2))
        return bool(one and two and one[0].array.shape[0] == 2 * two[0].array.shape[-1])

    def _turn(self, name: str, shape: tuple[int, ...]) -> Callable[[Tensor], Tensor] | None:
        """Return what puts queries, keys and values of an old version into today's order."""
        if self._version >= _ONE_ORDER or ".linear_qkv." not in name or "layer_norm" in name:
            return None
        if self._heads is None:
            reason = f"version {self._version} orders queries by heads, and nothing says how many"
            remedy = "Give --num-attention-heads"
            raise CheckpointError("checkpoint", self._step, reason, remedy)
        heads = self._heads // self._tensor_ranks
        if heads * self._tensor_ranks != self._heads or not heads or shape[0] % (3 * heads):
            reason = f"{shape[0]} rows are no queries, keys and values of {self._heads} heads"
            reason += f" on {self._tensor_ranks} tensor-parallel ranks"
            raise CheckpointError("num_attention_heads", self._heads, reason, "Give their number")
        return partial(newest_qkv, heads=heads, version=self._version)


def newest_qkv(fused: Tensor, heads: int, version: int) -> Tensor:
    """Reorder the rows of a fused query, key and value of an old version to today's order.

    Version 0 has all queries, all keys, all values; version 1 for each head and each of its
    dimensions the three side by side; from version 2 on each head has its queries, keys, values.

    Args:
        fused: [3 * hidden] or [3 * hidden, ...], of one tensor-parallel rank.
        heads: Attention heads in it.
        version: Of the checkpoint, 0 or 1.
    """
    rows, rest = fused.shape[0] // (3 * heads), fused.shape[1:]
    if version == 0:
        return fused.reshape(3, heads, rows, *rest).transpose(0, 1).reshape(fused.shape)
    return fused.reshape(heads, rows, 3, *rest).transpose(1, 2).reshape(fused.shape)


def _of(array: Array | Held) -> Array | Held:
    return array


def _models(content: Mapping[str, Any]) -> list[Any]:
    """Return the model of a file, or those of its virtual stages in their order."""
    names = [name for name in content if _MODELS.fullmatch(str(name))]
    return [content[name] for name in sorted(names, key=lambda name: int(name[5:] or 0))]


def _flat(model: Any, path: Path, extra: list[Any]) -> Iterator[tuple[Spot, Any]]:
    """Yield the tensors of a model, and put extra states aside."""

    def walk(prefix: str, value: Any) -> Iterator[tuple[Spot, Any]]:
        if "_extra_state" in prefix:
            extra.append(value)
        elif isinstance(value, Mapping):
            for name, inner in value.items():
                at = prefix if name == "language_model" else f"{prefix}.{name}".lstrip(".")
                yield from walk(at, inner)
        elif isinstance(value, Array | Tensor):
            yield spot(prefix), value if isinstance(value, Array) else Held(path, value)
        elif isinstance(value, Inert) and not value.kind.startswith("_io."):
            reason = f"{prefix} is an object of {value.kind}"
            remedy = "Save it with --ckpt-format torch_dist"
            raise CheckpointError("checkpoint", str(path), reason, remedy)

    return walk("", model)
