# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders as weights by the names that a model has in memory: read and written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from wavemare.errors import CheckpointError, ModelError
from wavemare.files import read_json
from wavemare.models.disk_names import Piece, empty_model, kept_names, pieces_of, shards_of
from wavemare.models.source import Span, Stored, WeightSource, bounds, cast, size_of, spans_of
from wavemare.models.spans import Copied, within
from wavemare.models.tensor_file import TensorFile, TensorFileWriter

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""For ``from_pretrained`` of folders that others have made."""
_REMEDY = "Give a folder that save_pretrained has written"


class HfFolder:
    """The weights of a Hugging Face folder; each is read from the disk when it is asked for.

    Experts that have a file's entry each are joined as transformers fuses them in memory. Names
    with and without the prefix of the base model are found. Names that are tied share a weight.

    Args:
        folder: With ``config.json`` and safetensors.
        kind: The model's class; by default what `empty_model` takes.

    Attributes:
        path: The folder.
        config: The model's configuration.
        skeleton: The model on the meta device.
        unknown: Names in the files that the model does not have.

    Raises:
        ModelError: It is no folder of a model, a weight is missing, or one has another shape.
        CheckpointError: A file is missing or damaged.
    """

    def __init__(self, folder: str | os.PathLike[str], kind: Any = None) -> None:
        self.path = Path(os.path.expanduser(folder))
        self.config = read_config(self.path)
        self.skeleton = empty_model(self.config, kind)
        self._files = _open_files(self.path)
        kept = kept_names(self.skeleton)
        pieces: dict[str, list[Piece]] = {}
        for piece in pieces_of(self.skeleton, kept):
            pieces.setdefault(piece.of, []).append(piece)
        state = self.skeleton.state_dict(keep_vars=True)
        same = {id(tensor): name for name, tensor in state.items() if name in kept}
        self._found: dict[str, list[tuple[Piece, str]]] = {}
        used: set[str] = set()
        for name, tensor in state.items():
            at = self._find([Piece(name, name)]) or self._find(pieces.get(name, []))
            used |= {disk for _, disk in at or []}
            held = same.get(id(tensor), name)
            if at and held not in self._found:
                self._found[held] = at
            elif at and held != name:
                self._check_equal(held, name, at[0][1])
        self._names = {name: same.get(id(tensor), name) for name, tensor in state.items()}
        self._check_complete()
        self.unknown = tuple(sorted(self._files.keys() - used))
        self.stored: Mapping[str, Stored] = {
            name: self._whole(name, tuple(tensor.shape))
            for name, tensor in state.items()
            if self._names[name] in self._found
        }

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Return a weight, or the part of it that slices of its first dimensions name."""
        stored, places = self.stored[name], self._found[self._names[name]]
        if places[0][0].expert is None:
            disk = places[0][1]
            return self._files[disk].read(disk, index)
        (first, last), (top, bottom), *rest = bounds(index, stored.shape)
        inner = [slice(*pair) for pair in rest]
        shape = (last - first, bottom - top, *(b - a for a, b in rest))
        joined = torch.empty(shape, dtype=stored.dtype)
        for piece, disk in places:
            expert, rows = piece.index(stored.shape)
            a, b = max(rows.start, top), min(rows.stop, bottom)
            if first <= expert.start < last and a < b:
                own = (slice(a - rows.start, b - rows.start), *inner)
                joined[expert.start - first, a - top : b - top] = self._files[disk].read(disk, own)
        return joined

    def spans(self, name: str) -> Sequence[Span]:
        """Return the places of a weight's bytes; see `Placed`."""
        places = self._found[self._names[name]]
        places = sorted(places, key=lambda place: (place[0].expert or 0, place[0].part))
        return [span for _, disk in places for span in self._files[disk].spans(disk)]

    def _find(self, pieces: list[Piece]) -> list[tuple[Piece, str]] | None:
        """Return the names of all these in the files; None if one is missing."""
        prefix = f"{self.skeleton.base_model_prefix}."
        found = []
        for piece in pieces:
            named = (piece.name, piece.name.removeprefix(prefix), prefix + piece.name)
            disk = next((name for name in named if name in self._files), None)
            if disk is None:
                return None
            found.append((piece, disk))
        return found or None

    def _whole(self, name: str, shape: tuple[int, ...]) -> Stored:
        places = self._found[self._names[name]]
        kinds = {self._files[disk].stored[disk].dtype for _, disk in places}
        for piece, disk in places:
            held, wanted = self._files[disk].stored[disk].shape, piece.shape(shape)
            if held != wanted or len(kinds) > 1:
                reason = f"its shape is {list(held)} where the model has {list(wanted)}"
                if held == wanted:
                    reason = "experts that are fused have several types"
                raise ModelError(
                    "weight", disk, reason, "Mend config.json, or copy the files again"
                )
        return Stored(shape, kinds.pop())

    def _check_complete(self) -> None:
        missing = [
            name
            for name, _ in self.skeleton.named_parameters()
            if self._names[name] not in self._found
        ]
        if missing:
            reason = f"the folder {self.path} has no weight of this name"
            remedy = "Load it with from_pretrained, and save it again with save_pretrained"
            raise ModelError("weight", missing[0], reason, remedy)

    def _check_equal(self, held: str, name: str, disk: str) -> None:
        one = self._found[held][0][1]
        if not torch.equal(self._files[one].read(one), self._files[disk].read(disk)):
            reason = f"config.json ties it to {held}, and the files have another weight for each"
            remedy = "Set tie_word_embeddings to false in config.json"
            raise ModelError("weight", name, reason, remedy)


def read_config(folder: Path) -> Any:
    """Read a folder's ``config.json`` as a configuration of transformers.

    Raises:
        ModelError: There is none, or transformers does not know it.
    """
    if not (folder / "config.json").is_file():
        raise ModelError("folder", str(folder), "it has no config.json", _REMEDY)
    try:
        return transformers.AutoConfig.from_pretrained(folder, **LOCAL)
    except Exception as error:  # of wrong values, too, for which transformers has its own
        said = " ".join(str(error).split())[:200] or type(error).__name__
        reason, remedy = f"transformers cannot read its config.json ({said})", "Mend config.json"
        if (folder / "model" / "config.json").is_file():  # of a recipe's run
            reason, remedy = "it is the folder of a run", f"Give {folder / 'model'}"
        raise ModelError("folder", str(folder), reason, remedy) from error


def weight_map(folder: Path) -> dict[str, str] | None:
    """Return the file of each weight of a folder that has them in parts.

    None if they are in one file, which comes before an index, as for transformers.

    Raises:
        CheckpointError: The index is damaged.
        ModelError: There is neither the file nor an index.
    """
    if (folder / WEIGHTS).is_file():
        return None
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX, CheckpointError, "folder", "Copy the file again")
        named = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(named, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in named.values()
        ):
            reason = f"its {INDEX} has no weight_map of names of files"
            raise CheckpointError("folder", str(folder), reason, "Copy the file again")
        return named
    reason, remedy = f"it has neither {WEIGHTS} nor {INDEX}", _REMEDY
    if any(folder.glob("pytorch_model*.bin")):
        remedy = "Load it with from_pretrained, and save it again: pickle files are not read"
    raise ModelError("folder", str(folder), reason, remedy)


def _open_files(folder: Path) -> dict[str, TensorFile]:
    named = weight_map(folder)
    if named is None:
        single = TensorFile(folder / WEIGHTS)
        return dict.fromkeys(single.stored, single)
    files = {file: TensorFile(folder / file) for file in sorted(set(named.values()))}
    for name, file in named.items():
        if name not in files[file].stored:
            reason = f"{file} does not hold {name}, as {INDEX} says"
            raise CheckpointError("folder", str(folder), reason, "Copy the files again")
    return {name: files[file] for name, file in named.items()}


def write_folder(
    folder: str | os.PathLike[str],
    source: WeightSource,
    config: Any,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "50GB",
    finished: Collection[str] = (),
    wrote: Callable[[str, int], None] = lambda name, size: None,
    copied: Copied | None = None,
) -> None:
    """Write a Hugging Face folder whose bytes are those that ``save_pretrained`` writes.

    One weight is in memory at a time.

    Args:
        folder: Made if it does not exist.
        source: The weights by their names in memory.
        config: Of transformers.
        dtype: Of floating-point weights; the source's if omitted.
        max_shard_size: As of ``save_pretrained``.
        finished: Weights that an earlier call with the same arguments has written there.
        wrote: Called with each further one's name and bytes.
        copied: Gets the checksums of bytes that are copied from files.

    Raises:
        ModelError: The source lacks a weight, or one has another shape or numbers that are out of
            the range of the type.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model = empty_model(config)
    kept = _typed(kept_names(model), source.stored, dtype)
    pieces: dict[str, list[Piece]] = {}
    for piece in pieces_of(model, kept):
        pieces.setdefault(piece.of, []).append(piece)
    shards, total = shards_of(model, kept, max_shard_size)
    entries = {
        piece.name: Stored(piece.shape(kept[name].shape), kept[name].dtype)
        for name, parts in pieces.items()
        for piece in parts
    }
    file_of = {name: file for file, names in shards.items() for name in names}
    with ExitStack() as stack:
        files = {}
        for file, names in shards.items():
            files[file] = TensorFileWriter(folder / file, {name: entries[name] for name in names})
            stack.callback(files[file].close)
        for name in [name for name in source.stored if name in kept and name not in finished]:
            writers = [(piece, files[file_of[piece.name]]) for piece in pieces[name]]
            _write_weight(source, name, kept[name], writers, copied)
            wrote(name, size_of(kept[name]))
    if len(shards) > 1:
        metadata = {"total_parameters": model.num_parameters(), "total_size": total}
        index = json.dumps({"metadata": metadata, "weight_map": file_of}, indent=2, sort_keys=True)
        (folder / INDEX).write_text(index + "\n", encoding="utf-8")
    types = [stored.dtype for stored in kept.values() if stored.dtype.is_floating_point]
    model.config.dtype = str(types[0]).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _write_weight(
    source: WeightSource,
    name: str,
    kept: Stored,
    writers: Sequence[tuple[Piece, TensorFileWriter]],
    copied: Copied | None,
) -> None:
    spans = spans_of(source, name) if kept.dtype is source.stored[name].dtype else None
    if spans is not None:
        for piece, writer in writers:
            writer.copy(piece.name, within(spans, *piece.place(kept)), copied)
        return
    weight = cast(name, source.read(name), kept.dtype)
    for piece, writer in writers:
        own = weight[piece.index(kept.shape)]
        writer.write(piece.name, own.reshape(piece.shape(kept.shape)))


def _typed(
    kept: dict[str, Stored], held: Mapping[str, Stored], dtype: torch.dtype | None
) -> dict[str, Stored]:
    typed = {}
    for name, wanted in kept.items():
        if name not in held or held[name].shape != wanted.shape:
            reason = "the source lacks it"
            if name in held:
                shapes = list(held[name].shape), list(wanted.shape)
                reason = f"its shape is {shapes[0]} where the model has {shapes[1]}"
            remedy = "Give the configuration that the weights were trained with (--config FOLDER)"
            raise ModelError("weight", name, reason, remedy)
        own = held[name].dtype
        typed[name] = Stored(
            wanted.shape, dtype if dtype is not None and own.is_floating_point else own
        )
    return typed
