# SPDX-License-Identifier: Apache-2.0
"""Writing Megatron's indexed data: sequence by sequence, from text, or from other data sets.

Both files get their names when they are complete, the tokens first.
"""

from __future__ import annotations

import os
import shutil
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from wavemare.data.indexed import (
    HEADER,
    MAGIC,
    TYPES,
    VERSION,
    IndexedData,
    data_file,
    index_file,
    open_indexed,
)
from wavemare.data.sources import check_prefix
from wavemare.errors import DataError
from wavemare.files import temporary_sibling

_COPY_BYTES = 1 << 24
_LARGEST_LENGTH = np.iinfo(np.int32).max


class IndexedWriter:
    """Writes ``PREFIX.bin`` and ``PREFIX.idx``, the bytes that Megatron-core would write.

    A context manager: both files appear when its block ends well; if it raises, nothing is left.
    Tokens go to disk at once. The index needs 12 bytes of memory per sequence.

    Args:
        prefix: The target, without ``.bin`` and ``.idx``; its folder is made.
        dtype: Type of the tokens, one that the format knows.
        overwrite: Replace files of the target's name.

    Raises:
        DataError: The format has no such type, a file of the target's name exists, or nothing can
            be written there.
    """

    def __init__(self, prefix: str | Path, dtype: Any, *, overwrite: bool = False) -> None:
        self.prefix = Path(os.path.expanduser(prefix))
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = _code_of(self.dtype)
        check_prefix("--output", self.prefix)
        if not overwrite:
            self._refuse_existing()
        self.tokens = 0
        self._lengths, self._bounds = array("i"), array("q", [0])
        self._partial = temporary_sibling(data_file(self.prefix))
        try:
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._partial.open("wb")
        except OSError as error:
            reason = f"nothing can be written there ({error.strerror})"
            raise DataError("--output", str(prefix), reason, "Name another place") from None

    @property
    def documents(self) -> int:
        """Number of documents that have ended."""
        return len(self._bounds) - 1

    def add_sequence(self, tokens: Sequence[int] | NDArray[Any]) -> None:
        """Append one sequence to the present document.

        Raises:
            DataError: A token is no whole number or does not fit the type, or the sequence is
                longer than the format allows.
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
        self._file.write(values.astype(self.dtype, copy=False).tobytes())
        self._lengths.append(values.size)
        self.tokens += values.size

    def end_document(self) -> None:
        """End the document; the next sequence begins another."""
        self._bounds.append(len(self._lengths))

    def add_indexed(self, data: IndexedData) -> None:
        """Append a whole data set of the same type with its documents."""
        with data_file(data.prefix).open("rb") as source:
            shutil.copyfileobj(source, self._file, _COPY_BYTES)
        bounds = np.asarray(data.bounds[1:]) + len(self._lengths)
        self._lengths.frombytes(np.asarray(data.lengths, np.intc).tobytes())
        self._bounds.frombytes(bounds.astype(np.int64).tobytes())
        self.tokens += len(data.tokens)

    def finish(self) -> None:
        """Write the index and give both files their names."""
        index = temporary_sibling(index_file(self.prefix))
        index.write_bytes(self._index())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._partial, data_file(self.prefix))
        os.replace(index, index_file(self.prefix))

    def discard(self) -> None:
        """Remove the unfinished file."""
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.discard()

    def _index(self) -> bytes:
        lengths = np.frombuffer(self._lengths, np.intc).astype("<i4")
        pointers = np.zeros(len(lengths), "<i8")
        if len(lengths):
            np.cumsum(lengths[:-1], out=pointers[1:], dtype="<i8")
        pointers *= self.dtype.itemsize
        bounds = np.frombuffer(self._bounds, np.int64).astype("<i8")
        header = HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(bounds))
        return b"".join([header, lengths.tobytes(), pointers.tobytes(), bounds.tobytes()])

    def _refuse_existing(self) -> None:
        for file in (data_file(self.prefix), index_file(self.prefix)):
            if file.exists():
                reason = f"the file {file} exists"
                raise DataError(
                    "--output", str(self.prefix), reason, "Give --overwrite to replace it"
                )


def merge_indexed(
    prefixes: Sequence[str | Path], output: str | Path, *, overwrite: bool = False
) -> None:
    """Concatenate data sets.

    Args:
        prefixes: The data sets, in this order.
        output: Prefix of the target, none of them.
        overwrite: Replace files of the target's name.

    Raises:
        DataError: They differ in the type of tokens, a file is damaged, or the target exists or is
            one of them.
    """
    parts = [open_indexed(prefix) for prefix in prefixes]
    if not parts:
        raise DataError("PREFIX", [], "there is nothing to merge", "Name data sets to merge")
    dtype, target = parts[0].tokens.dtype, Path(os.path.expanduser(output))
    for part in parts:
        if part.prefix.resolve() == target.resolve():
            reason = "the target is one of the data sets to merge"
            raise DataError("--output", str(output), reason, "Choose another name")
        if part.tokens.dtype != dtype:
            reason = f"its tokens are {part.tokens.dtype}, and those of {parts[0].prefix} {dtype}"
            raise DataError("PREFIX", str(part.prefix), reason, "Build both in the same way")
    with IndexedWriter(target, dtype, overwrite=overwrite) as writer:
        for part in parts:
            writer.add_indexed(part)


def _code_of(dtype: np.dtype[Any]) -> int:
    for code, known in TYPES.items():
        if known == dtype:
            return code
    names = ", ".join(known.name for known in TYPES.values())
    raise DataError("dtype", str(dtype), "the format has no such type", f"Choose one of {names}")
