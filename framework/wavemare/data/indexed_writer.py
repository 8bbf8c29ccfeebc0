# SPDX-License-Identifier: Apache-2.0
"""Writing Megatron's indexed data with little memory.

An index begins with its own length, so lengths and bounds are collected in files beside the target
and the index is put together at the end. Whatever happens before that, no file of the target's
name exists that is not whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from wavemare.data.megatron import (
    HEADER,
    MAGIC,
    TYPES,
    VERSION,
    IndexedData,
    data_file,
    index_file,
)
from wavemare.data.specs import check_prefix
from wavemare.errors import DataError

__all__ = [
    "IndexedWriter",
    "WriterPosition",
    "claimed",
    "finish_after_kill",
    "partial_file",
    "refuse_existing",
]

_CHUNK = 1 << 20
_COPY_BYTES = 1 << 24
_LARGEST_LENGTH = np.iinfo(np.int32).max


@dataclass(frozen=True)
class WriterPosition:
    """How much has been written: what a writer that goes on after a kill keeps."""

    tokens: int = 0
    sequences: int = 0
    documents: int = 0


class IndexedWriter:
    """Writes ``PREFIX.bin`` and ``PREFIX.idx`` a sequence at a time, as Megatron-core would.

    A context manager: if its block ends well, both files appear, complete; if it raises, the
    partial files stay for a writer that goes on from a `WriterPosition`, or are removed by
    `discard`.

    Args:
        prefix: The target, without ``.bin`` and ``.idx``; its folder is made.
        dtype: Type of the tokens, one that the format knows.
        modes: Whether each sequence has a mode (multimodal data).
        position: Go on from there; what was written after it is cut off.

    Raises:
        DataError: The format has no such type, or files of an earlier writer are missing.
    """

    def __init__(
        self,
        prefix: str | Path,
        dtype: Any,
        *,
        modes: bool = False,
        position: WriterPosition | None = None,
    ) -> None:
        self.prefix = Path(os.path.expanduser(prefix))
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = _code_of(self.dtype)
        self._position = asdict(position or WriterPosition())
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        kept = {
            "bin": self._position["tokens"] * self.dtype.itemsize,
            "lengths": self._position["sequences"] * 4,
            "bounds": self._position["documents"] * 8,
        } | ({"modes": self._position["sequences"]} if modes else {})
        self._paths = {name: partial_file(self.prefix, name) for name in kept}
        fresh = position is None
        if not fresh:
            self._check_left(kept)
        self._files: dict[str, BinaryIO] = {}
        for name, size in kept.items():
            file = self._paths[name].open("wb" if fresh else "r+b")
            file.truncate(size)
            file.seek(size)
            self._files[name] = file

    @property
    def position(self) -> WriterPosition:
        """What has been written so far; safe on disk after `flush`."""
        return WriterPosition(**self._position)

    def add_sequence(self, tokens: Sequence[int] | NDArray[Any], mode: int = 0) -> None:
        """Append one sequence to the document that is being written.

        Raises:
            DataError: A token is no whole number or does not fit the type, or the sequence is
                longer than the format can tell.
        """
        values = np.asarray(tokens)
        if values.size and values.dtype.kind not in "iu":
            reason = f"tokens are whole numbers, not {values.dtype}"
            raise DataError(str(self.prefix), "tokens", reason, "Give integers")
        if values.size and not np.can_cast(values.dtype, self.dtype):
            limits = np.iinfo(self.dtype)
            if values.min() < limits.min or values.max() > limits.max:
                reason = f"tokens from {values.min()} to {values.max()} do not fit {self.dtype}"
                raise DataError(str(self.prefix), "tokens", reason, "Choose a wider type")
        if values.size > _LARGEST_LENGTH:
            reason = f"a sequence of {values.size} tokens is longer than {_LARGEST_LENGTH}"
            raise DataError(str(self.prefix), "tokens", reason, "Cut the document")
        self._files["bin"].write(values.astype(self.dtype, copy=False).tobytes())
        self._files["lengths"].write(np.array(values.size, "<i4").tobytes())
        if "modes" in self._files:
            self._files["modes"].write(np.array(mode, "i1").tobytes())
        self._position["tokens"] += values.size
        self._position["sequences"] += 1

    def end_document(self) -> None:
        """End the document; the next sequence begins another."""
        self._files["bounds"].write(np.array(self._position["sequences"], "<i8").tobytes())
        self._position["documents"] += 1

    def add_indexed(self, data: IndexedData) -> None:
        """Append a whole data set of the same type, documents and all."""
        with data_file(data.prefix).open("rb") as source:
            shutil.copyfileobj(source, self._files["bin"], _COPY_BYTES)
        first = self._position["sequences"]
        _copy(data.lengths, "<i4", self._files["lengths"])
        _copy(data.bounds[1:], "<i8", self._files["bounds"], first)
        if data.modes is not None:
            _copy(data.modes, "i1", self._files["modes"])
        self._position["tokens"] += len(data.tokens)
        self._position["sequences"] += len(data.lengths)
        self._position["documents"] += len(data.bounds) - 1

    def flush(self) -> None:
        """Put all that was written safely on disk."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> None:
        """Write the index and give both files their names."""
        self.flush()
        self.close()
        index = partial_file(self.prefix, "idx")
        with index.open("wb") as file:
            self._write_index(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self._paths["bin"], data_file(self.prefix))
        os.replace(index, index_file(self.prefix))
        self.discard()

    def discard(self) -> None:
        """Remove the partial files."""
        self.close()
        for path in self._paths.values():
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the partial files; they stay."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.close()

    def _check_left(self, kept: dict[str, int]) -> None:
        for name, size in kept.items():
            path = self._paths[name]
            found = path.stat().st_size if path.exists() else 0
            if found < size:
                reason = f"it has {found} bytes where {size} were written before"
                raise DataError(str(self.prefix), str(path), reason, "Start again without resuming")

    def _write_index(self, file: BinaryIO) -> None:
        sequences, documents = self._position["sequences"], self._position["documents"]
        file.write(HEADER.pack(MAGIC, VERSION, self._code, sequences, documents + 1))
        with self._paths["lengths"].open("rb") as lengths:
            shutil.copyfileobj(lengths, file, _COPY_BYTES)
        at = 0
        with self._paths["lengths"].open("rb") as lengths:
            while chunk := lengths.read(4 * _CHUNK):
                ends = np.cumsum(np.frombuffer(chunk, "<i4"), dtype="<i8") * self.dtype.itemsize
                file.write((at + np.concatenate(([0], ends[:-1]))).astype("<i8").tobytes())
                at += int(ends[-1])
        file.write(np.array(0, "<i8").tobytes())
        for name in ("bounds", "modes"):
            if name in self._paths:
                with self._paths[name].open("rb") as rest:
                    shutil.copyfileobj(rest, file, _COPY_BYTES)


def partial_file(prefix: Path, name: str) -> Path:
    """Return where something that belongs to an unfinished target stands."""
    return prefix.with_name(f".{prefix.name}.{name}.partial")


@contextmanager
def claimed(prefix: Path) -> Iterator[None]:
    """Keep other processes from writing a target.

    Raises:
        DataError: Another one does, or no file can be made there.
    """
    check_prefix("--output", prefix)
    lock = FileLock(partial_file(prefix, "lock"))
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        reason = "another process builds it"
        raise DataError("--output", str(prefix), reason, "Wait for it, or choose another") from None
    except OSError as error:
        reason = f"nothing can be written there ({error.strerror})"
        raise DataError("--output", str(prefix), reason, "Name another place") from None
    try:
        yield
    finally:
        # While it is held: whoever has opened the file finds that its name has gone.
        partial_file(prefix, "lock").unlink(missing_ok=True)
        lock.release()


def refuse_existing(prefix: Path) -> None:
    """Refuse to write over data.

    Raises:
        DataError: A file of the target's name exists.
    """
    for file in (data_file(prefix), index_file(prefix)):
        if file.exists():
            reason = f"the file {file} exists"
            raise DataError("--output", str(prefix), reason, "Give --overwrite to replace it")


def finish_after_kill(prefix: Path) -> bool:
    """End what a writer was killed in: giving the files their names, the tokens first.

    Returns:
        Whether a writer had begun with that, and both files are in place.
    """
    if partial_file(prefix, "bin").exists() or not data_file(prefix).exists():
        return False
    index = partial_file(prefix, "idx")
    if index.exists():
        os.replace(index, index_file(prefix))
    for name in ("lengths", "bounds", "modes"):
        partial_file(prefix, name).unlink(missing_ok=True)
    return index_file(prefix).exists()


def _code_of(dtype: np.dtype[Any]) -> int:
    for code, known in TYPES.items():
        if known == dtype:
            return code
    names = ", ".join(known.name for known in TYPES.values())
    raise DataError("dtype", str(dtype), "the format has no such type", f"Choose one of {names}")


def _copy(values: NDArray[Any], dtype: str, file: BinaryIO, offset: int = 0) -> None:
    for start in range(0, len(values), _CHUNK):
        file.write((values[start : start + _CHUNK] + offset).astype(dtype).tobytes())
