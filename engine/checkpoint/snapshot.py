# SPDX-License-Identifier: Apache-2.0
"""A copy in host memory of what ``torch.save`` would write, while training changes the original."""

from __future__ import annotations

import io
import mmap
import pickle
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["Snapshot", "num_bytes"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_CHUNK_BYTES = 2**20
_ALIGNMENT = 64


class Snapshot:
    """Tensors copied now, everything else pickled now; `restore` gives an equal object.

    Views of one storage are views of one copy, so that the file has the size that the original's
    would have.

    Args:
        state: What ``torch.save`` takes.

    Raises:
        Exception: Something in it cannot be pickled, as ``torch.save`` would say it.
    """

    def __init__(self, state: Any) -> None:
        stream = io.BytesIO()
        pickler = _Pickler(stream)
        pickler.dump(state)
        self._rest = stream.getvalue()
        self._tensors = pickler.copies

    def restore(self) -> Any:
        """Return the object; its tensors are the copies."""
        return _Unpickler(io.BytesIO(self._rest), self._tensors).load()


class _Pickler(pickle.Pickler):
    """Pickles everything but tensors, which it copies and numbers."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.copies: list[torch.Tensor] = []
        self._pages = _Pages()
        # By identity, which holds only as long as the original lives: it is kept beside.
        self._numbers: dict[int, tuple[torch.Tensor, int]] = {}
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def persistent_id(self, value: Any) -> int | None:
        if type(value) not in _PLAIN or value.layout != torch.strided:
            return None  # pickled with its content
        if id(value) not in self._numbers:
            self._numbers[id(value)] = value, len(self.copies)
            own = self._copy(value)
            self.copies.append(own)
            for name, held in vars(value).items():  # DeepSpeed marks tensors, and torch saves that
                number = self.persistent_id(held)
                setattr(own, name, held if number is None else self.copies[number])
        return self._numbers[id(value)][1]

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = storage, self._pages.copy(storage)
        copy = torch.empty(0, dtype=tensor.dtype)
        copy.set_(
            self._storages[storage._cdata][1],
            tensor.storage_offset(),
            tensor.size(),
            tensor.stride(),
        )
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
        return copy.requires_grad_(tensor.requires_grad)


class _Pages:
    """Memory that goes back to the system when nothing refers to it.

    Of the C library's, copies that live for a moment between tensors that stay would leave holes,
    and a process would grow by them (docs/results/soak.md).
    """

    def __init__(self) -> None:
        self._chunk = mmap.mmap(-1, _CHUNK_BYTES)
        self._used = 0

    def copy(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return a copy in host memory."""
        size = storage.nbytes()
        if size == 0:
            return torch.UntypedStorage(0)
        if size > len(self._chunk) - self._used:
            self._chunk, self._used = mmap.mmap(-1, max(size, _CHUNK_BYTES)), 0
        place = torch.frombuffer(self._chunk, dtype=torch.uint8, count=size, offset=self._used)
        self._used = min(-(-(self._used + size) // _ALIGNMENT) * _ALIGNMENT, len(self._chunk))
        return place.untyped_storage().copy_(storage)


class _Unpickler(pickle.Unpickler):
    """Reads what `_Pickler` has left in this process; nothing of a file comes here."""

    def __init__(self, stream: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(stream)
        self._tensors = tensors

    def persistent_load(self, number: int) -> torch.Tensor:
        return self._tensors[number]


def num_bytes(state: Any) -> int:
    """Return how many bytes the tensors in nested containers take in a file."""
    return sum({storage.data_ptr(): storage.nbytes() for storage in _storages(state)}.values())


def _storages(state: Any) -> Iterator[torch.UntypedStorage]:
    if isinstance(state, torch.Tensor) and state.layout == torch.strided:
        yield state.untyped_storage()
    elif isinstance(state, dict):
        for value in state.values():
            yield from _storages(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _storages(value)
