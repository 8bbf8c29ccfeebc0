# SPDX-License-Identifier: Apache-2.0
"""Coalescing: summing the rows of a sparse gradient that have the same id.

An embedding's gradient has a row for each token, and so the same id many times. The order in which
such rows are summed is that of their positions, so that the sums are the same in every run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wavemare.comm.kernels import DTYPES
from wavemare.comm.kernels.words import sum_dtype
from wavemare.errors import ConfigError

try:
    from wavemare.comm import row_loops
except ImportError:  # numba is not installed
    row_loops = None  # type: ignore[assignment]

__all__ = ["coalesce"]

_CHUNK = 1 << 18
"""Elements that are converted at a time: they stay in a core's cache."""


@torch.no_grad()
def coalesce(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the rows of each id.

    Each sum is ``((+0.0 + row) + row) + ...`` in the order of the positions, in float32 (float64
    for float64); for 16-bit rows it is rounded once, to nearest even. An id stays if its rows sum
    to zero.

    On CPUs with numba the rows are read where they are; else they are copied in the order of their
    ids first, in float32.

    Args:
        ids: (n,), int64 or int32, any numbers; on the device of the rows.
        rows: (n, d), floats.

    Returns:
        (m,), int64, the distinct ids in ascending order, and (m, d), their sums, of rows' dtype.

    Raises:
        ConfigError: Shapes or types are others.
    """
    if ids.dim() != 1 or ids.dtype not in (torch.int64, torch.int32):
        value = f"{ids.dtype} {tuple(ids.shape)}"
        raise ConfigError("ids", value, "ids are a flat tensor of int64 or int32", "Convert them")
    if rows.shape[:-1] != ids.shape:
        reason = f"each of the {len(ids)} ids has one row"
        raise ConfigError("rows", tuple(rows.shape), reason, "Give as many rows as ids")
    if rows.dtype not in DTYPES or not rows.dtype.is_floating_point:
        reason = "rows are floats of 16 to 64 bits"
        raise ConfigError("rows", rows.dtype, reason, "Convert them")
    ids = ids.to(torch.int64)
    if row_loops is not None and rows.device.type == "cpu":
        return _coalesce_in_place(ids, rows)
    return _coalesce_sorted(ids, rows)


def _coalesce_in_place(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    unique, inverse = torch.unique(ids, return_inverse=True)
    sums = torch.zeros(len(unique), rows.shape[1], dtype=sum_dtype(rows.dtype))
    # One part, unless parts must be converted.
    size = len(rows) if rows.dtype == sums.dtype else _CHUNK // max(1, rows.shape[1])
    parts = rows.contiguous().split(max(1, size)), inverse.split(max(1, size))
    for part, places in zip(*parts, strict=True):
        row_loops.sum_rows(places.numpy(), part.to(sums.dtype).numpy(), sums.numpy())
    return unique, sums.to(rows.dtype)


def _coalesce_sorted(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    ordered, position = ids.sort(stable=True)
    unique, lengths = torch.unique_consecutive(ordered, return_counts=True)
    if unique.numel() == 0 or rows.shape[1] == 0:
        return unique, rows.new_zeros(len(unique), rows.shape[1])
    # Neither scatter_add nor index_add keeps an order on GPUs; this sums each segment in a loop.
    terms = rows.index_select(0, position).to(sum_dtype(rows.dtype))
    sums = torch.segment_reduce(terms, "sum", lengths=lengths, unsafe=True, initial=0.0)
    return unique, sums.to(rows.dtype)
