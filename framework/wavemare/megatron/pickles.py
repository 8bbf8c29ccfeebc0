# SPDX-License-Identifier: Apache-2.0
"""Megatron's pickles: they are read, and nothing in them is run.

Every class and function that a pickle names becomes an `Inert`, except a few that this module has
its own stand-ins for. A tensor becomes an `Array`, which knows where its bytes lie in the file.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import torch

from wavemare.megatron.arrays import Array, reading, regular_file

_LOCAL_HEADER = struct.Struct("<4s22xHH")


class Inert:
    """Stands for an object, an enumeration's member or a class of another program.

    Attributes:
        kind: The class, with its module.
        given: What it was made from.
        state: Its attributes.
    """

    kind = ""
    given: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *given: Any) -> None:
        self.given = given

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"{self.kind}{self.given!r}" if self.given else self.kind

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


class _Ordered(dict[Any, Any]):
    """Stands for OrderedDict, whose attributes do not matter."""

    def __setstate__(self, state: Any) -> None:
        pass


def read_pickle(path: Path) -> Any:
    """Read a file that is one pickle, such as ``.metadata``.

    Raises:
        CheckpointError: It is damaged, or names what has no place in a checkpoint.
    """
    regular_file(path)
    with reading(path):
        return _Unpickler(io.BytesIO(path.read_bytes()), path, {}).load()


def read_saved(path: Path, start: int = 0, length: int | None = None) -> Any:
    """Read what ``torch.save`` has written into a file, or into a part of one.

    Tensors are not read: each is an `Array`. Files from before torch 1.6 are read whole.

    Args:
        path: The file.
        start: The first byte of the part.
        length: Of the part in bytes.

    Raises:
        CheckpointError: It is damaged, or names what has no place in a checkpoint.
    """
    length = regular_file(path) - start if length is None else length
    with reading(path), open(path, "rb") as file:
        window = _Window(file, start, length)
        if not zipfile.is_zipfile(window):
            if start:
                raise ValueError("a part of it is no zip archive")
            from wavemare.engine.checkpoint.files import read_file

            return read_file(path)
        with zipfile.ZipFile(window) as archive:
            pickled, storages = _records(archive, window)
        return _Unpickler(io.BytesIO(pickled), path, storages).load()


def read_plain(path: Path, start: int = 0, length: int | None = None) -> Any:
    """Read what `read_saved` reads, and the tensors in it; other objects are `Inert`.

    Raises:
        CheckpointError: See `read_saved`.
    """
    with reading(path):
        return plain(read_saved(path, start, length))


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of a namespace, such as Megatron's arguments."""
    state = value.state if isinstance(value, Inert) else getattr(value, "__dict__", value)
    return dict(state) if isinstance(state, Mapping) else {}


def plain(value: Any) -> Any:
    """Return a value with its arrays read, and objects as `Inert`."""
    if isinstance(value, Array):
        return value.read()
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    if isinstance(value, tuple):
        return tuple(plain(inner) for inner in value)
    return value


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self.file, self.start, self.length, self.at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        place = offset + (0, self.at, self.length)[whence]
        if place < 0:
            raise OSError("it begins too late")
        self.at = place
        return place

    def tell(self) -> int:
        return self.at

    def read(self, size: int = -1) -> bytes:
        left = max(self.length - self.at, 0)
        self.file.seek(self.start + self.at)
        content = self.file.read(left if size is None or size < 0 else min(size, left))
        self.at += len(content)
        return content


@dataclass(frozen=True)
class _Record:
    """A file of an archive: its first byte in the archive's file, and its length."""

    start: int
    length: int


def _records(archive: zipfile.ZipFile, window: _Window) -> tuple[bytes, dict[str, _Record]]:
    """Return the pickle of an archive, and where the content of each storage lies."""
    pickled, storages = None, {}
    for item in archive.infolist():
        _, _, name = item.filename.partition("/")
        window.seek(item.header_offset)
        mark, name_length, extra = _LOCAL_HEADER.unpack(window.read(_LOCAL_HEADER.size))
        start = item.header_offset + _LOCAL_HEADER.size + name_length + extra
        if mark != b"PK\3\4" or item.compress_type or start + item.file_size > window.length:
            raise ValueError("its list of contents is damaged")
        if name.startswith("data/"):
            storages[name] = _Record(window.start + start, item.file_size)
        elif name in ("data.pkl", "byteorder"):
            window.seek(start)
            content = window.read(item.file_size)
            if item.CRC and zlib.crc32(content) != item.CRC:  # torch can be told to write 0
                raise ValueError("its checksum differs")
            if name == "data.pkl":
                pickled = content
            elif content != b"little":
                raise ValueError("its byte order is another")
    if pickled is None:
        raise ValueError("torch.save has not written it")
    return pickled, storages


_STORAGES: dict[str, torch.dtype | None] = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.storage.UntypedStorage": None,
}
"""The elements of each class of storages; those of an untyped one are told beside it."""
_DTYPES = {repr(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def _member(kind: Any, name: Any) -> Any:
    # Python 3.11.0 to 3.11.3 write a member of an enumeration so.
    if not (isinstance(kind, type) and issubclass(kind, Inert)):
        raise pickle.UnpicklingError("it holds builtins.getattr of what is no enumeration")
    return kind(name)


class _Function:
    """A stand-in for a function, which a pickle can call and cannot change."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __setstate__(self, _: Any) -> None:
        raise pickle.UnpicklingError("it changes a function")


_KNOWN: dict[str, Callable[..., Any]] = {
    "torch.Size": tuple,
    "collections.OrderedDict": _Ordered,
    "builtins.set": set,
    "builtins.complex": complex,
    "_codecs.encode": _Function(lambda text, _: text.encode("latin1")),  # bytes, of protocol 2
    "builtins.getattr": _Function(_member),
    "torch._utils._rebuild_parameter": _Function(lambda data, *_: data),
    "torch._utils._rebuild_parameter_with_state": _Function(lambda data, *_: data),
}
"""What stands for a class or a function."""

_FOREIGN = re.compile(
    r"(megatron|transformer_engine|transformer_engine_torch|modelopt|nemo|nemo_run|lightning"
    r"|torch\.distributed\.checkpoint|torch\.distributed\._shard|torch\.distributed\.tensor"
    r"|numpy|numpy\.(_core|core|dtypes|random)|argparse|types|pathlib|datetime|signal|omegaconf"
    r"|torch\.serialization|torch)\.[\w.]+|_io\.BytesIO|functools\.partial"
)
"""What becomes an `Inert`; everything else has no place in a checkpoint and is refused."""


class _Unpickler(pickle.Unpickler):
    """Makes nothing but plain values, `Inert` and `Array`."""

    def __init__(self, content: IO[bytes], path: Path, storages: Mapping[str, _Record]) -> None:
        super().__init__(content)
        self._path, self._storages = path, storages
        self._classes: dict[str, type[Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}".replace("__builtin__.", "builtins.")
        if full in _DTYPES:
            return _DTYPES[full]
        if full in _STORAGES:
            return full
        if full in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"):
            return _Function(self._tensor)
        if full in _KNOWN:
            return _KNOWN[full]
        if not _FOREIGN.fullmatch(full):
            raise pickle.UnpicklingError(f"it holds {full}, which has no place in a checkpoint")
        return self._classes.setdefault(full, type("Inert", (Inert,), {"kind": full}))

    def persistent_load(self, pid: Any) -> Any:
        mark, kind, key, _, count = pid
        record = self._storages[f"data/{key}"]
        if mark != "storage" or kind not in _STORAGES or not 0 <= count:
            raise pickle.UnpicklingError("it holds a storage of an unknown kind")
        return record, _STORAGES[kind]

    def _tensor(
        self, storage: Any, offset: int, shape: Any, stride: Any, *more: Any
    ) -> Array | Inert:
        record, dtype = storage
        if dtype is None:  # of version 3, whose dtype follows requires_grad and hooks
            dtype = more[2]
        start = record.start + offset * dtype.itemsize
        found = Array(self._path, start, dtype, tuple(shape), tuple(stride))
        numbers = (offset, *found.shape, *found.stride)
        if len(found.shape) != len(found.stride) or not all(
            type(number) is int and number >= 0 for number in numbers
        ):
            raise pickle.UnpicklingError("the shape of a tensor is damaged")
        most = max(found.nbytes, prod(found.shape) * dtype.itemsize)
        if offset * dtype.itemsize + most > record.length:
            raise pickle.UnpicklingError("a tensor is longer than its content")
        return found
