# SPDX-License-Identifier: Apache-2.0
"""Tensors that lie in files of Megatron's checkpoints, and errors of these files."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from wavemare.errors import CheckpointError
from wavemare.models.source import Span

DAMAGED = "Copy the checkpoint anew, or name another one"
_LONGEST = 200  # characters of another library's message
_MAPPED = 64  # bytes: where a tensor has to begin so that it is mapped rather than copied


@dataclass(frozen=True)
class Array:
    """A tensor that lies in a file.

    Attributes:
        file: The file.
        start: Its first byte there.
        dtype: Of the elements.
        shape: Of the tensor.
        stride: Elements from one index to the next.
    """

    file: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the last."""
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def part(self, index: tuple[int | slice | None, ...]) -> Array:
        """Return a part of it: a number takes its dimension away, None adds one."""
        start, axis = 0, 0
        shape, stride = [], []
        for chosen in index:
            if chosen is None:
                shape.append(1)
                stride.append(0)
                continue
            if isinstance(chosen, slice):
                first, last, _ = chosen.indices(self.shape[axis])
                shape.append(max(last - first, 0))
                stride.append(self.stride[axis])
            else:
                first = range(self.shape[axis])[chosen]
            start += first * self.stride[axis]
            axis += 1
        return Array(
            self.file,
            self.start + start * self.dtype.itemsize,
            self.dtype,
            (*shape, *self.shape[axis:]),
            (*stride, *self.stride[axis:]),
        )

    @property
    def span(self) -> Span | None:
        """Where its bytes lie; None if they are not neighbours."""
        expected = self.dtype.itemsize
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step * self.dtype.itemsize != expected:
                return None
            expected *= size
        return Span(self.file, self.start, self.nbytes)

    def read(self) -> Tensor:
        """Return the tensor, whose memory is the caller's: writing to it changes no file.

        Raises:
            CheckpointError: The file has become shorter, or cannot be read.
        """
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype)
        size = self.nbytes
        with reading(self.file):
            aligned = self.start % _MAPPED == 0
            storage = self._mapped(size) if aligned else self._copied(size)
        return torch.empty(0, dtype=self.dtype).set_(storage, 0, self.shape, self.stride)

    def _mapped(self, size: int) -> torch.UntypedStorage:
        end = self.start + size
        with suppress(RuntimeError):  # more than the system's memory, or the file is shorter
            return torch.UntypedStorage.from_file(str(self.file), False, end)[self.start : end]
        return self._copied(size)

    def _copied(self, size: int) -> torch.UntypedStorage:
        content = torch.empty(size, dtype=torch.uint8)
        view, at = memoryview(content.numpy().data), self.start
        with open(self.file, "rb", buffering=0) as file:
            while view:
                count = os.preadv(file.fileno(), [view], at)
                if not count:
                    raise EOFError("it ends too early")
                view, at = view[count:], at + count
        return content.untyped_storage()


@dataclass(frozen=True)
class Held:
    """A tensor in memory, in place of an `Array`: of files from before torch 1.6.

    Attributes:
        file: The file.
        tensor: Its tensor.
    """

    file: Path
    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements."""
        return self.tensor.dtype

    @property
    def span(self) -> Span | None:
        """None: it lies in no file."""
        return None

    def part(self, index: tuple[int | slice | None, ...]) -> Held:
        """Return a part of it; see `Array.part`."""
        return Held(self.file, self.tensor[index])

    def read(self) -> Tensor:
        """Return the tensor."""
        return self.tensor


@contextmanager
def reading(path: str | os.PathLike[str], what: str = "") -> Iterator[None]:
    """Raise a `CheckpointError` for whatever goes wrong while a file is read.

    Args:
        path: The file.
        what: The part of it that is read.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # damaged bytes reach pickle, zip, struct and torch
        part = f"{what} in it" if what else "it"
        reason = f"{part} cannot be read ({said_by(error)})"
        raise CheckpointError("checkpoint", str(path), reason, DAMAGED) from error


def said_by(error: Exception) -> str:
    """Return what another library's error says, in one line; its name if it says nothing."""
    text = getattr(error, "strerror", None) or str(error)
    text = " ".join(text.split())[:_LONGEST] or type(error).__name__
    return "".join(c if c.isprintable() else "?" for c in text)


def regular_file(path: Path, folder: Path | None = None) -> int:
    """Return a file's size.

    Args:
        path: The file.
        folder: The folder that a link must not leave.

    Raises:
        CheckpointError: It is missing, no file, or lies elsewhere.
    """
    with reading(path):
        found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError("checkpoint", str(path), "it is not a regular file", DAMAGED)
    if folder is not None and not path.resolve().is_relative_to(folder.resolve()):
        reason, remedy = "it is a link out of the checkpoint", "Copy the folder with cp -rL"
        raise CheckpointError("checkpoint", str(path), reason, remedy)
    return found.st_size
