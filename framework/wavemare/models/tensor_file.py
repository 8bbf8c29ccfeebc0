# SPDX-License-Identifier: Apache-2.0
"""Safetensors files, read part by part and written tensor by tensor.

A file is a header and then the tensors: eight bytes with the header's length, JSON with each
tensor's type, shape and place, spaces up to a multiple of eight bytes. The library of that name
writes whole dictionaries, and what it reads stays mapped; here memory holds one tensor at a time.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wavemare.errors import CheckpointError
from wavemare.files import parse_json
from wavemare.models.source import Span, Stored, size_of
from wavemare.models.spans import Copied, chunks

# In the order of a file: the library writes wide types first.
_TYPES = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_RANK = {dtype: rank for rank, dtype in enumerate(_TYPES.values())}
_PREFIX = 8  # bytes, with the length of the header
_LONGEST_HEADER = 100_000_000  # bytes, the library's own limit
_METADATA = {"__metadata__": {"format": "pt"}}
_REMEDY = "Copy the file again"


class TensorFile:
    """The tensors of a file, read when they are asked for.

    Args:
        path: The file.

    Attributes:
        stored: Its tensors, in the order of the file.

    Raises:
        CheckpointError: The file is missing, damaged or cut short.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._size = path.stat().st_size
            header, self._start = _read_header(path, self._size)
        except (OSError, ValueError) as error:
            said = getattr(error, "strerror", None) or error
            raise CheckpointError(
                "weights", str(path), f"it cannot be read ({said})", _REMEDY
            ) from (error)
        self._places: dict[str, int] = {}
        found: dict[str, Stored] = {}
        header.pop("__metadata__", None)
        for name, entry in header.items():
            found[name], self._places[name] = self._entry(name, entry)
        order = sorted(found, key=self._places.__getitem__)
        self.stored: Mapping[str, Stored] = {name: found[name] for name in order}

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Return a tensor, or a copy of the part that slices of its first dimensions name."""
        stored, first = self.stored[name], self._start + self._places[name]
        length = math.prod(stored.shape) * stored.dtype.itemsize
        if not length:
            return torch.empty(stored.shape, dtype=stored.dtype)[index]
        rows = slice(None)
        if index and stored.shape:  # whole rows are a part of the file
            begin, end, step = index[0].indices(stored.shape[0])
            if step == 1 and end > begin:
                width = length // stored.shape[0]
                first, length = first + begin * width, (end - begin) * width
                stored = Stored((end - begin, *stored.shape[1:]), stored.dtype)
                index = (rows, *index[1:])
        tensor = self._mapped(first, length).view(stored.dtype).view(stored.shape)
        part = tensor[index]
        # A view of less would keep the mapping of all.
        return tensor if part.shape == tensor.shape else part.clone()

    def spans(self, name: str) -> Sequence[Span]:
        """Return the place of a tensor's bytes; see `Placed`."""
        try:
            self._check_size(self._path.stat().st_size)
        except OSError as error:
            reason = f"it cannot be read ({error.strerror})"
            raise CheckpointError("weights", str(self._path), reason, _REMEDY) from error
        place = self._start + self._places[name]
        return [Span(self._path, place, size_of(self.stored[name]))]

    def _check_size(self, size: int) -> None:
        if size != self._size:
            reason = "it has changed since it was opened"
            raise CheckpointError("weights", str(self._path), reason, _REMEDY)

    def _mapped(self, first: int, length: int) -> Tensor:
        """Return bytes of the file; their pages are given back with the tensor."""
        try:
            with self._path.open("rb") as file:
                self._check_size(os.fstat(file.fileno()).st_size)
                lead = first % mmap.ALLOCATIONGRANULARITY
                pages = mmap.mmap(
                    file.fileno(), lead + length, access=mmap.ACCESS_COPY, offset=first - lead
                )
        except OSError as error:
            reason = f"it cannot be read ({error.strerror})"
            raise CheckpointError("weights", str(self._path), reason, _REMEDY) from error
        return torch.frombuffer(pages, dtype=torch.uint8, count=length, offset=lead)

    def _entry(self, name: str, entry: Any) -> tuple[Stored, int]:
        try:
            dtype, shape = _TYPES[entry["dtype"]], tuple(entry["shape"])
            first, last = entry["data_offsets"]
            whole = [*shape, first, last]
            fits = all(type(number) is int and number >= 0 for number in whole)
            fits = fits and last - first == math.prod(shape) * dtype.itemsize
            fits = fits and self._start + last <= self._size
        except (KeyError, TypeError, ValueError):
            fits = False
        if not fits:
            reason = f"its header says of {name!r} what the file does not hold"
            raise CheckpointError("weights", str(self._path), reason, _REMEDY)
        return Stored(shape, dtype), first


def _read_header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_PREFIX), "little")
        if size < _PREFIX or length > min(size - _PREFIX, _LONGEST_HEADER):
            raise ValueError("it is cut short, or no file of safetensors")
        header = parse_json(file.read(length).decode("utf-8"))
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    return header, _PREFIX + length


class TensorFileWriter:
    """Writes a file with the bytes that ``safetensors.torch.save_file`` gives these tensors.

    Args:
        path: The file, which is made, or opened again to go on.
        tensors: All that it will hold.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Stored]) -> None:
        order = sorted(tensors, key=lambda name: (_RANK[tensors[name].dtype], name))
        entries: dict[str, Any] = dict(_METADATA)
        place, self._places = 0, {}
        for name in order:
            stored = tensors[name]
            end = place + size_of(stored)
            entries[name] = {
                "dtype": _NAMES[stored.dtype],
                "shape": list(stored.shape),
                "data_offsets": [place, end],
            }
            self._places[name] = place
            place = end
        header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
        header += b" " * (-len(header) % _PREFIX)
        self._start = _PREFIX + len(header)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        os.ftruncate(self._file, self._start + place)
        os.pwrite(self._file, len(header).to_bytes(_PREFIX, "little") + header, 0)

    def write(self, name: str, tensor: Tensor, first: int = 0) -> None:
        """Put a tensor, or a run of its elements, in its place.

        Args:
            name: Of the tensor.
            tensor: Its elements, or some of them.
            first: Bytes of the tensor before these elements.
        """
        numbers: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        self._put(memoryview(numbers), self._start + self._places[name] + first)

    def copy(self, name: str, spans: Sequence[Span], copied: Copied | None = None) -> None:
        """Put the bytes of other files in a tensor's place.

        Args:
            name: Of the tensor.
            spans: All of its bytes.
            copied: Gets their checksums.

        Raises:
            CheckpointError: They cannot be read.
        """
        place = self._start + self._places[name]
        for data in chunks(spans, copied):
            self._put(data, place)
            place += len(data)

    def _put(self, data: memoryview, place: int) -> None:
        while data:
            done = os.pwrite(self._file, data, place)
            data, place = data[done:], place + done

    def close(self) -> None:
        """Close the file; what was not written is zero."""
        os.close(self._file)
