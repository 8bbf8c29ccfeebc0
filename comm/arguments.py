# SPDX-License-Identifier: Apache-2.0
"""Checks of what callers give, before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from wavemare.comm.blocks.layout import Piece
from wavemare.comm.compress.error_feedback import Compressor
from wavemare.comm.config import MODES
from wavemare.comm.executors import EXECUTOR_TYPES
from wavemare.comm.kernels import DTYPES
from wavemare.errors import ConfigError, did_you_mean

__all__ = ["bucket_key", "check_bucket", "check_settings", "pieces_of"]


def bucket_key(
    key: str | None, flat: Tensor, weights: Tensor | None, compressor: Compressor | None
) -> str:
    """Return the name of a bucket, by default its size and type.

    Args:
        key: The name that was given.
        flat: The bucket.
        weights: Whose gradient it is, if they were given.
        compressor: What it is compressed by; it checks them.

    Raises:
        ConfigError: The compressor needs a name or weights, or the bucket does not fit it.
    """
    if compressor is None:
        return key or f"{flat.numel()} {flat.dtype}"
    if not key:
        reason = "what the compressor leaves out must wait under a name of the bucket's own"
        raise ConfigError("key", key, reason, "Give key=, another one for each bucket")
    compressor.check(key, flat.detach(), weights)
    return key


def check_bucket(flat: Tensor, *, averages: bool = False) -> None:
    """Check what is to be summed or sent.

    Args:
        flat: The bucket.
        averages: Whether its mean is wanted.

    Raises:
        ConfigError: It has another layout, shape or type than a bucket.
    """
    reason = remedy = None
    if flat.layout is not torch.strided:
        reason, remedy = f"its layout is {flat.layout}", "Use allreduce_rows_ for its rows"
    elif flat.dim() != 1 or not flat.is_contiguous():
        reason = f"it is not flat and contiguous (shape {tuple(flat.shape)}, {flat.stride()})"
        remedy = "Give tensor.contiguous().view(-1), or a bucket made by flattening"
    elif flat.dtype not in DTYPES:
        reason, remedy = (
            f"its type is {flat.dtype}",
            f"Use one of {', '.join(map(str, DTYPES))}",
        )
    elif flat.is_inference():
        reason, remedy = "it was made in inference mode", "Give a clone made outside of it"
    elif averages and not flat.dtype.is_floating_point:
        reason, remedy = "whole numbers have no mean", "Use SparseComm(average=False)"
    if reason is not None and remedy is not None:
        raise ConfigError("bucket", tuple(flat.shape), reason, remedy)


def check_settings(block: int, mode: str, deterministic: bool) -> None:
    """Check what a `SparseComm` is made with.

    Raises:
        ConfigError: A value cannot be.
    """
    if block < 1:
        raise ConfigError("block", block, "a block has at least one element", "Give 256")
    if mode not in MODES:
        raise ConfigError("mode", mode, "there is no such mode", did_you_mean(mode, MODES))
    if deterministic and mode != "auto" and not EXECUTOR_TYPES[mode].deterministic:
        raise ConfigError(
            "mode",
            mode,
            "it does not sum in the order of the ranks, which deterministic asks for",
            "Set deterministic to false, or choose auto, ordered, pushpull or allgather",
        )


def pieces_of(partition: Sequence[Any], numel: int, num_ranks: int) -> list[Piece]:
    """Return a partition as pieces.

    Args:
        partition: Pieces, or the N + 1 borders of one range for each rank.
        numel: Elements of the bucket.
        num_ranks: N.

    Raises:
        ConfigError: Ranges overlap, or lie outside.
    """
    if all(isinstance(item, Piece) for item in partition):
        pieces = list(partition)
    else:
        borders = [int(border) for border in partition]
        pieces = [Piece(*pair, owner) for owner, pair in enumerate(pairwise(borders))]
        if len(pieces) != num_ranks:
            reason = f"it has {len(pieces)} ranges for {num_ranks} ranks"
            raise ConfigError("partition", borders, reason, f"Give {num_ranks + 1} borders")
    ordered = sorted(pieces, key=lambda piece: (piece.start, piece.stop))
    inside = all(0 <= p.start <= p.stop <= numel and 0 <= p.owner < num_ranks for p in ordered)
    if not inside or any(a.stop > b.start for a, b in pairwise(ordered)):
        reason = f"its ranges overlap or lie outside of {numel} elements and {num_ranks} ranks"
        raise ConfigError("partition", pieces, reason, "Give ranges that do not overlap")
    return pieces
