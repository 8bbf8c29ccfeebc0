# SPDX-License-Identifier: Apache-2.0
"""Sparse streams of SparCML (SC'19): sorted pairs of index and value, or all values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wavemare.comm.executors import pair_loops
from wavemare.comm.executors.pairs import index_dtype, nonzero_ids
from wavemare.comm.kernels.words import sum_dtype

__all__ = ["SparseStream", "merge_pairs"]


@dataclass(frozen=True, eq=False)
class SparseStream:
    """A vector, sparse as long as that is smaller; on the host.

    Args:
        numel: n, its length.
        ids: (k,), int32, or int64 for long vectors, ascending; None if it is dense.
        values: (k,) or, if it is dense, (n,).
    """

    numel: int
    ids: Tensor | None
    values: Tensor

    @classmethod
    def of(cls, flat: Tensor) -> SparseStream:
        """Take the values of a bucket, 16-bit floats as float32."""
        ids = nonzero_ids(flat)
        values = flat[ids].to(sum_dtype(flat.dtype))
        return cls(flat.numel(), ids.cpu(), values.cpu()).settled()

    @classmethod
    def empty(cls, numel: int, count: int, dtype: torch.dtype) -> SparseStream:
        """Return a stream to receive into.

        Args:
            numel: n.
            count: k, or -1 for a dense one.
            dtype: Of the values.
        """
        if count < 0:
            return cls(numel, None, torch.empty(numel, dtype=dtype))
        ids = torch.empty(count, dtype=index_dtype(numel))
        return cls(numel, ids, torch.empty(count, dtype=dtype))

    @property
    def count(self) -> int:
        """k; -1 if it is dense."""
        return -1 if self.ids is None else self.ids.numel()

    @property
    def tensors(self) -> list[Tensor]:
        """What must be sent."""
        return [self.values] if self.ids is None else [self.ids, self.values]

    def settled(self) -> SparseStream:
        """Return the dense stream if pairs take as many bytes as that."""
        if self.ids is None or self.ids.nbytes + self.values.nbytes < self._dense_bytes:
            return self
        values = self.values.new_zeros(self.numel)
        values[self.ids] = self.values
        return SparseStream(self.numel, None, values)

    def __add__(self, other: SparseStream) -> SparseStream:
        """Add element by element.

        Ranks that are to have the same bits must add in the same order: the sum of two NaN is one
        of them.
        """
        if self.ids is not None and other.ids is not None:
            pairs = merge_pairs(self.ids, self.values, other.ids, other.values)
            return SparseStream(self.numel, *pairs).settled()
        if self.ids is not None:
            values = other.values.clone()
            values[self.ids] = self.values + values[self.ids]
        elif other.ids is not None:
            values = self.values.clone()
            values[other.ids] += other.values
        else:
            values = self.values + other.values
        return SparseStream(self.numel, None, values)

    def write(self, flat: Tensor, scale: float) -> None:
        """Write the vector into a bucket.

        Args:
            flat: (n,); 16-bit floats are rounded to.
            scale: Factor of the values.
        """
        values = (self.values * scale if scale != 1 else self.values).to(flat.device)
        if self.ids is None:
            flat.copy_(values)
        else:
            flat.zero_()
            flat[self.ids.to(flat.device)] = values.to(flat.dtype)

    @property
    def _dense_bytes(self) -> int:
        return self.numel * self.values.element_size()


def merge_pairs(
    ids_a: Tensor, values_a: Tensor, ids_b: Tensor, values_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge sorted pairs; where both have an id, their values are added, a + b.

    Args:
        ids_a: (m,), ascending, no two alike.
        values_a: (m,).
        ids_b: (n,), as ids_a.
        values_b: (n,), as values_a.

    Returns:
        ids and values.
    """
    most = ids_a.numel() + ids_b.numel()
    ids, values = ids_a.new_empty(most), values_a.new_empty(most)
    tensors = (ids_a, values_a, ids_b, values_b, ids, values)
    count = pair_loops.merge(*(tensor.numpy() for tensor in tensors))
    return ids[:count], values[:count]
