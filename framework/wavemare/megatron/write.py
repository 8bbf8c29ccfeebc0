# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that Megatron-LM and Megatron-Bridge load: format torch_dist.

One weight is in memory at a time. Each is written whole: Megatron reads any part of it at any
tensor, pipeline and expert parallelism.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from wavemare.errors import CheckpointError, ModelError, check_number, os_errors
from wavemare.files import (
    atomic_write_text,
    remove_leftovers,
    replace_folder,
    sync_folder,
    temporary_sibling,
)
from wavemare.megatron.pickles import Inert
from wavemare.megatron.store import LATEST
from wavemare.models.source import Span, Stored, WeightSource, spans_of
from wavemare.models.spans import Copied, chunks

FILE_BYTES = 2 * 1024**3
_ALIGNED = 64  # bytes: what begins at a multiple of it can be mapped
_JOURNAL = "written.jsonl"
_DESCRIPTION = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_NORM = "mlp.linear_fc1.layer_norm_"
_ROUTER = "mlp.router.weight"
_LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def write_torch_dist(
    folder: str | Path,
    weights: WeightSource,
    *,
    arguments: Mapping[str, Any],
    iteration: int,
    common: Mapping[str, Any] | None = None,
    resume: bool = False,
    durable: bool = False,
    progress: Callable[[int], None] = lambda _: None,
    copied: Copied | None = None,
) -> Path:
    """Write a checkpoint; the note of the newest is written last.

    Args:
        folder: What Megatron's ``--load`` would be.
        weights: By canonical names (see `store.py`).
        arguments: Megatron's, which ``--use-checkpoint-args`` reads; objects are left out.
        iteration: Steps that were trained; 0 writes a ``release``.
        common: What ``common.pt`` holds beside them.
        resume: Whether to write in place, and to go on where a killed call has stopped: the caller
            knows that it wrote the same weights. Otherwise the folder appears at the end.
        durable: Whether to wait until all is on the disk.
        progress: Called with the number of bytes of each weight that stands.
        copied: Gets the checksums of bytes that are copied from files.

    Returns:
        The folder of the iteration.

    Raises:
        ModelError: The layers are not all alike, or the iteration is no whole number from 0 on.
        CheckpointError: It cannot be written.
    """
    check_number(ModelError, "iteration", iteration, whole=True)
    folder = Path(os.path.expanduser(folder))
    plan = _plan(weights.stored)
    step = folder / (f"iter_{iteration:07}" if iteration else "release")
    remedy = "Free space, or choose another place"
    with (
        _made(folder),
        os_errors(CheckpointError, "checkpoint", str(folder), "it cannot be written", remedy),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        if not resume:
            remove_leftovers(folder)
        stated = {k: v for k, v in arguments.items() if not isinstance(v, Inert)}
        state = {
            **(common or {}),
            "args": argparse.Namespace(**stated),
            "checkpoint_version": 3.0,
            "iteration": iteration,
        }
        into = step if resume else temporary_sibling(step)
        into.mkdir(exist_ok=True)
        try:
            content = io.BytesIO()
            torch.save(state, content)
            (into / "common.pt").write_bytes(content.getbuffer())
            _write(into, plan, weights, durable, progress, copied)
            atomic_write_text(into / "metadata.json", json.dumps(_DESCRIPTION))
            if not resume:
                replace_folder(into, step)
        except BaseException:
            if not resume:
                shutil.rmtree(into, ignore_errors=True)
            raise
        atomic_write_text(folder / LATEST, str(iteration) if iteration else "release")
    return step


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Remove a folder and its parents that were made in vain, if they are empty."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for path in new:
                path.rmdir()
        raise


@dataclass(frozen=True)
class _Target:
    """Where a weight goes: keys of the file, and the layer that it is one of."""

    keys: tuple[str, ...]
    layer: int | None


def _plan(stored: Mapping[str, Stored]) -> dict[str, _Target]:
    """Return where each weight goes.

    Raises:
        ModelError: The layers are not all alike.
    """
    layers: dict[int, dict[str, Stored]] = {}
    for name, each in stored.items():
        found = _LAYER.fullmatch(name)
        if found:
            layers.setdefault(int(found[1]), {})[found[2]] = each
    first = layers.get(0, {})
    for number in range(len(layers)):
        own = layers.get(number, {})
        if own != first:
            different = sorted(n for n in {*own, *first} if own.get(n) != first.get(n))
            reason = f"layer {number} differs from layer 0 in {', '.join(different[:3])}"
            remedy = "Give a model whose layers are all alike"
            raise ModelError("weights", f"decoder.layers.{number}", reason, remedy)
    plan = {}
    for name in stored:
        found = _LAYER.fullmatch(name)
        if not found:
            plan[name] = _Target((name,), None)
            continue
        part = found[2].replace("mlp.experts.", "mlp.experts.experts.", 1)
        parts = [part]
        if part.startswith(_NORM) and _ROUTER in first:
            # Transformer Engine's layers look for this name, the local ones for the other.
            parts.append(part.replace(_NORM, "pre_mlp_layernorm."))
        keys = tuple(f"decoder.layers.{each}" for each in parts)
        plan[name] = _Target(keys, int(found[1]))
    return plan


def _write(
    into: Path,
    plan: Mapping[str, _Target],
    weights: WeightSource,
    durable: bool,
    progress: Callable[[int], None],
    copied: Copied | None,
) -> None:
    (into / "metadata.json").unlink(missing_ok=True)  # until all is there again
    standing = _standing(into)
    sizes = {
        name: prod(stored.shape) * stored.dtype.itemsize for name, stored in weights.stored.items()
    }
    needed = sum(size for name, size in sizes.items() if name not in standing)
    free = shutil.disk_usage(into).free
    if free < needed:
        reason = f"it needs {needed:,} bytes, and the disk has {free:,}"
        raise CheckpointError("checkpoint", str(into.parent), reason, "Free space on the disk")
    for name in plan:
        if name in standing:
            progress(sizes[name])
    with _Files(into, standing, durable, copied) as files:
        for name, target in plan.items():
            if name not in standing:
                standing[name] = _add(files, name, target, weights)
                progress(sizes[name])
        state = pickle.dumps(_metadata(weights.stored, plan, standing, files))
    (into / ".metadata").write_bytes(state)
    (into / _JOURNAL).unlink()
    if durable:
        for path in into.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        sync_folder(into)


def _add(files: _Files, name: str, target: _Target, weights: WeightSource) -> _Place:
    spans, stored = spans_of(weights, name), weights.stored[name]
    if spans is None:
        tensor = weights.read(name).detach().cpu()
    else:  # its memory is not touched, so it takes none
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
    tensor = tensor if target.layer is None else tensor.unsqueeze(0)
    return files.add(name, tensor, spans)


@dataclass(frozen=True)
class _Place:
    """Where the content of a weight or an object lies."""

    file: str
    start: int
    length: int


def _standing(into: Path) -> dict[str, _Place]:
    """Return what a killed call has written whole."""
    standing: dict[str, _Place] = {}
    if (into / _JOURNAL).is_file():
        for line in (into / _JOURNAL).read_text(encoding="utf-8").splitlines():
            try:
                name, place = json.loads(line)
            except ValueError:  # the last line, which the end of the process has cut
                break
            if (into / place["file"]).stat().st_size < place["start"] + place["length"]:
                break
            standing[name] = _Place(**place)
    return standing


def _line(name: str, place: _Place) -> str:
    return json.dumps([name, asdict(place)]) + "\n"


class _Files:
    """The data files of a checkpoint, one after the other, and a journal of what stands.

    Args:
        into: The folder.
        standing: What is in it already.
        durable: Whether to wait until each file is on the disk.
        copied: Gets the checksums of bytes that are copied from files.
    """

    def __init__(
        self, into: Path, standing: Mapping[str, _Place], durable: bool, copied: Copied | None
    ) -> None:
        self._into, self._durable, self._copied = into, durable, copied
        # A file that a killed call has not finished is left as it is: the next one is begun.
        used = [path.name for path in into.glob("__0_*.distcp")]
        self._number = 1 + max((int(n[4:].split(".")[0]) for n in used), default=-1)
        for name in {*used} - {place.file for place in standing.values()}:
            (into / name).unlink()
        # Whole again: the end of a process may have cut its last line.
        lines = [_line(name, place) for name, place in standing.items()]
        atomic_write_text(into / _JOURNAL, "".join(lines))
        self._journal = open(into / _JOURNAL, "a", encoding="utf-8")
        self._file: IO[bytes] | None = None

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self._journal.close()

    def add(self, name: str, value: Any, spans: Sequence[Span] | None = None) -> _Place:
        """Write a value as ``torch.save`` does.

        Args:
            name: Of the weight, for the journal.
            value: A tensor or an object.
            spans: Where the tensor's bytes are taken from; those in memory if omitted.

        Raises:
            OSError: It could not be written.
            CheckpointError: The bytes could not be read.
        """
        file = self._next()
        start = file.tell()
        sink = _Sink(file)
        if spans is not None:
            sink = _Sink(file, value.data_ptr(), spans, self._copied)
        if isinstance(value, torch.Tensor):
            value = value.contiguous()
            if value.untyped_storage().nbytes() != value.nbytes:  # all of it would be saved
                value = value.clone()
        with _without_checksums():
            torch.save(value, cast(IO[bytes], sink))
        if sink.error is not None:
            raise sink.error
        place = _Place(file.name.rpartition(os.sep)[2], start, file.tell() - start)
        file.write(bytes(-file.tell() % _ALIGNED))
        file.flush()
        self._journal.write(_line(name, place))
        self._journal.flush()
        return place

    def _next(self) -> IO[bytes]:
        if self._file is not None and self._file.tell() >= FILE_BYTES:
            self._close()
        if self._file is None:
            self._file = open(self._into / f"__0_{self._number}.distcp", "xb")
            self._number += 1
        return self._file

    def _close(self) -> None:
        if self._file is not None:
            if self._durable:
                self._file.flush()
                os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


@contextmanager
def _without_checksums() -> Iterator[None]:
    """Leave CRC-32 out of what ``torch.save`` writes.

    It takes longer than the writing, and ``torch.load`` does not look at it.
    """
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class _Sink:
    """A file for ``torch.save``, which would end the process if ``write`` raised.

    Args:
        file: The file.
        address: Where a tensor is in memory.
        spans: What is written in place of the tensor's bytes.
        copied: Gets their checksums.
    """

    def __init__(
        self,
        file: IO[bytes],
        address: int = 0,
        spans: Sequence[Span] = (),
        copied: Copied | None = None,
    ) -> None:
        self._file, self._address, self._spans, self._copied = file, address, spans, copied
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        try:
            if self.error is not None:
                pass
            elif self._spans and np.frombuffer(data, np.uint8).ctypes.data == self._address:
                for part in chunks(self._spans, self._copied):
                    self._file.write(part)
            else:
                self._file.write(data)
        except BaseException as error:
            self.error = error
        return size

    def flush(self) -> None:
        """For ``torch.save``."""


def _metadata(
    stored: Mapping[str, Stored],
    plan: Mapping[str, _Target],
    standing: Mapping[str, _Place],
    files: _Files,
) -> Metadata:
    layers = 1 + max((t.layer for t in plan.values() if t.layer is not None), default=-1)
    described: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for name, target in plan.items():
        own, layer = stored[name], target.layer
        shape = own.shape if layer is None else (layers, *own.shape)
        first = [0] * len(shape) if layer is None else [layer, *[0] * len(own.shape)]
        size = own.shape if layer is None else (1, *own.shape)
        chunk = ChunkStorageMetadata(torch.Size(first), torch.Size(size))
        for key in target.keys:
            if key not in described:
                properties = TensorProperties(dtype=own.dtype)
                described[key] = TensorStorageMetadata(properties, torch.Size(shape), [])
            described[key].chunks.append(chunk)
            places[MetadataIndex(key, first)] = _info(standing[name])
    # The state of Transformer Engine, which every Megatron looks for: one empty object for all.
    empty = _info(files.add("", [torch.empty(0, dtype=torch.uint8)]))
    for key in _extra_states(stored, layers):
        described[key] = BytesStorageMetadata()
        places[MetadataIndex(key)] = empty
    return Metadata(
        state_dict_metadata=described,
        storage_data=places,
        storage_meta=StorageMeta(),
        version="1.0.0",
    )


def _info(place: _Place) -> _StorageInfo:
    return _StorageInfo(place.file, place.start, place.length)


def _extra_states(stored: Mapping[str, Stored], layers: int) -> Iterator[str]:
    for name, each in stored.items():
        found = _LAYER.fullmatch(name)
        words = found[2].split(".") if found else []
        if found is None or words[-1] != "weight" or words[-2] not in _LINEARS:
            continue
        module = ".".join(words[:-1]).replace("mlp.experts.", "mlp.experts.experts.")
        state = f"decoder.layers.{module}._extra_state/shard_{found[1]}"
        if "experts.experts." in module:
            count = each.shape[0]
            yield from (f"{state}.{expert}_{layers}.{count}" for expert in range(count))
        else:
            yield f"{state}_{layers}"
