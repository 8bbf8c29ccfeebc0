# SPDX-License-Identifier: Apache-2.0
"""Folders of torch's distributed checkpoints: ``.metadata`` and ``__RANK_THREAD.distcp``.

Megatron's formats torch_dist and fsdp_dtensor are such folders.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from wavemare.errors import CheckpointError
from wavemare.megatron.arrays import DAMAGED, Array, reading, regular_file
from wavemare.megatron.assembled import Assembled, Box
from wavemare.megatron.names import Spot, order, pairs_joined, spot
from wavemare.megatron.pickles import Inert, read_pickle, read_plain, read_saved
from wavemare.models.source import Stored

METADATA = ".metadata"
_MOST_LAYERS = 100_000
_LONGEST_NAME = 1000
FP8_HISTORY = (b"amax_history_fwd", b"scale_fwd")
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")


@dataclass(frozen=True)
class Blob:
    """A part of a file that ``torch.save`` has written.

    Attributes:
        file: The file.
        start: Its first byte.
        length: In bytes.
    """

    file: Path
    start: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A piece of a tensor: its first index, its extent, and where it lies."""

    first: tuple[int, ...]
    shape: tuple[int, ...]
    blob: Blob

    def open(self) -> Array:
        """Return where its elements lie.

        Raises:
            CheckpointError: It is damaged.
        """
        found = read_saved(self.blob.file, self.blob.start, self.blob.length)
        if not isinstance(found, Array):
            raise CheckpointError("checkpoint", str(self.blob.file), "it holds no tensor", DAMAGED)
        ahead = len(self.shape) - len(found.shape)
        if ahead > 0 and self.shape[:ahead] == (1,) * ahead:  # written without the layer's number
            found = found.part((None,) * ahead)
        return found


@dataclass(frozen=True)
class Distributed:
    """A folder's tensors and objects, none of which has been read.

    Attributes:
        folder: The folder.
        tensors: What is known of each tensor.
        chunks: The pieces of each tensor.
        objects: Where each object lies.
    """

    folder: Path
    tensors: Mapping[str, Stored] = field(default_factory=dict)
    chunks: Mapping[str, Sequence[Chunk]] = field(default_factory=dict)
    objects: Mapping[str, Blob] = field(default_factory=dict)

    def object(self, name: str) -> Any:
        """Return an object: plain values, tensors, and `Inert` for all else.

        Raises:
            CheckpointError: It is damaged.
        """
        blob = self.objects[name]
        return read_plain(blob.file, blob.start, blob.length)

    @property
    def has_optimizer(self) -> bool:
        """Whether there are tensors or objects of an optimizer's state."""
        return any(_OPTIMIZER.match(name) for name in (*self.tensors, *self.objects))

    def raw(self) -> Assembled:
        """Return the tensors by the file's own names."""
        boxes = {
            name: [Box(chunk.first, chunk.shape, chunk.open) for chunk in chunks]
            for name, chunks in self.chunks.items()
        }
        return Assembled(str(self.folder), self.tensors, boxes)

    def weights(self, pattern: str = "") -> Assembled:
        """Return the model's weights by canonical names.

        Args:
            pattern: ``--hybrid-layer-pattern`` as far as the checkpoint says it.

        Raises:
            CheckpointError: Pieces are missing, or the layers are of another kind.
        """
        names = [n for n in self.tensors if "_extra_state" not in n and not _OPTIMIZER.match(n)]
        # Beside a model, other tensors may be of the optimizer and of the random states.
        names = [name for name in names if name.startswith("model.")] or names
        spots = {name: spot(name) for name in names}
        blocks = pairs_joined(spots.values(), pattern, str(self.folder))
        parts: dict[str, list[_Part]] = {}
        for name, each in spots.items():
            for canonical, part in self._parts(name, each, blocks):
                parts.setdefault(canonical, []).append(part)
        stored, boxes = {}, {}
        for canonical in sorted(parts, key=order):
            stored[canonical], boxes[canonical] = _joined(str(self.folder), parts[canonical])
        weights = Assembled(str(self.folder), stored, boxes)
        weights.check()
        return weights

    def lost_fp8(self) -> bool:
        """Whether Transformer Engine's extra state has a history of FP8 scales."""
        for name, blob in self.objects.items():
            if "_extra_state" in name:
                with reading(blob.file), open(blob.file, "rb") as file:
                    file.seek(blob.start)
                    content = file.read(blob.length)
                if any(mark in content for mark in FP8_HISTORY):
                    return True
        return False

    def _parts(
        self, name: str, each: Spot, blocks: Mapping[int, int]
    ) -> Iterator[tuple[str, _Part]]:
        stored, chunks = self.tensors[name], self.chunks[name]
        if not each.in_layer:
            yield each.part, _Part(name, each, stored, [(c, ()) for c in chunks])
            return
        if each.layer is not None:
            place = f"decoder.layers.{blocks[each.layer]}.{each.part}"
            yield place, _Part(name, each, stored, [(c, ()) for c in chunks])
            return
        if not stored.shape or not 0 < stored.shape[0] < _MOST_LAYERS:
            reason = f"{name} has the shape {stored.shape}, where the layers should come first"
            raise CheckpointError("checkpoint", str(self.folder), reason, DAMAGED)
        layers: list[list[tuple[Chunk, tuple[int, ...]]]] = [[] for _ in range(stored.shape[0])]
        for chunk in chunks:
            for number in range(chunk.shape[0]):
                layers[chunk.first[0] + number].append((chunk, (number,)))
        own = Stored(stored.shape[1:], stored.dtype)
        for number, pieces in enumerate(layers):
            yield f"decoder.layers.{number}.{each.part}", _Part(name, each, own, pieces)


@dataclass(frozen=True)
class _Part:
    """A tensor of the file, or one layer of it, as a part of a weight."""

    name: str
    spot: Spot
    stored: Stored
    pieces: list[tuple[Chunk, tuple[int, ...]]]


def _joined(where: str, parts: Sequence[_Part]) -> tuple[Stored, list[Box]]:
    """Return a weight's shape and pieces from the tensors that make it up."""
    halves, counted = parts[0].spot.half is not None, parts[0].spot.expert is not None
    if not halves and not counted:
        # Of two names for one norm, Transformer Engine's is what its models read.
        parts = sorted(parts, key=lambda part: "pre_mlp_layernorm" not in part.name)[:1]
    kinds = {(p.stored, p.spot.half is None, p.spot.expert is None) for p in parts}
    if len(kinds) > 1:
        names = ", ".join(part.name for part in parts[:3])
        reason = f"these tensors should have one shape and data type: {names}"
        raise CheckpointError("checkpoint", where, reason, DAMAGED)
    shape = list(parts[0].stored.shape)
    axis = 1 if parts[0].spot.of_experts and not counted else 0
    if halves and len(shape) > axis:
        shape[axis] *= 2
    if counted:
        shape.insert(0, 1 + max(part.spot.expert or 0 for part in parts))
    boxes = []
    for part in parts:
        for chunk, index in part.pieces:
            first, size = list(chunk.first[len(index) :]), chunk.shape[len(index) :]
            if part.spot.half:
                first[axis] += part.stored.shape[axis]
            box = Box(tuple(first), size, chunk.open, index)
            boxes.append(box if part.spot.expert is None else box.of_expert(part.spot.expert))
    return Stored(tuple(shape), parts[0].stored.dtype), boxes


def read_folder(folder: Path) -> Distributed:
    """Read what a folder's ``.metadata`` says, and check it against the files.

    Raises:
        CheckpointError: It is damaged, a file is missing, or a part lies outside its file.
    """
    metadata = read_pickle(folder / METADATA)
    with reading(folder / METADATA):
        described, places = metadata.state["state_dict_metadata"], metadata.state["storage_data"]
        blobs = _blobs(folder, places)
        tensors, chunks, objects = {}, {}, {}
        for name, each in described.items():
            if not (isinstance(name, str) and name.isprintable() and len(name) < _LONGEST_NAME):
                raise ValueError("the name of a tensor is damaged")
            if each.kind.endswith(".BytesStorageMetadata"):
                objects[name] = blobs[name, None]
            elif each.kind.endswith(".TensorStorageMetadata"):
                tensors[name], chunks[name] = _tensor(folder, name, each, blobs)
            else:
                raise ValueError(f"{each.kind} is no kind of tensor")
    return Distributed(folder, tensors, chunks, objects)


def _blobs(
    folder: Path, places: Mapping[Inert, Inert]
) -> dict[tuple[str, tuple[int, ...] | None], Blob]:
    sizes: dict[str, int] = {}
    found = {}
    for index, info in places.items():
        relative, start, length = (info.state[n] for n in ("relative_path", "offset", "length"))
        if info.get("transform_descriptors"):
            reason = f"its parts are compressed ({info.state['transform_descriptors'][0]!r:.40})"
            remedy = "Save it without extensions of torch.distributed.checkpoint"
            raise CheckpointError("checkpoint", str(folder), reason, remedy)
        if relative not in sizes:
            sizes[relative] = _size(folder, relative)
        if not type(start) is type(length) is int:
            raise ValueError("the place of a part is damaged")
        if not 0 <= start <= start + length <= sizes[relative]:
            reason = "it is shorter than .metadata says"
            raise CheckpointError("checkpoint", str(folder / relative), reason, DAMAGED)
        offset = index.get("offset")
        key = index.state["fqn"], None if offset is None else tuple(offset)
        found[key] = Blob(folder / relative, start, length)
    return found


def _size(folder: Path, relative: Any) -> int:
    if not isinstance(relative, str) or Path(relative).name != relative or relative in ("", ".."):
        reason = f".metadata names the file {relative!r:.80}, which is not in the folder"
        raise CheckpointError("checkpoint", str(folder), reason, DAMAGED)
    return regular_file(folder / relative, folder)


def _tensor(
    folder: Path, name: str, each: Inert, blobs: Mapping[Any, Blob]
) -> tuple[Stored, list[Chunk]]:
    properties, shape = each.state["properties"].state, tuple(each.state["size"])
    dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
    if not isinstance(dtype, torch.dtype) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"{name!r:.80} has no shape or data type")
    chunks = []
    for one in each.state["chunks"]:
        first, size = tuple(one.state["offsets"]), tuple(one.state["sizes"])
        if not len(first) == len(size) == len(shape) or not all(
            type(a) is type(n) is int and 0 <= a <= a + n <= most
            for a, n, most in zip(first, size, shape, strict=True)
        ):
            raise ValueError(f"a piece of {name!r:.80} lies outside it")
        blob = blobs.get((name, first))
        if blob is None or prod(size) * dtype.itemsize > blob.length:
            reason = f"the piece of {name!r:.80} at {first} is missing or too short"
            raise CheckpointError("checkpoint", str(folder), reason, DAMAGED)
        chunks.append(Chunk(first, size, blob))
    return Stored(shape, dtype), chunks
