# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments, before anything is sent."""

from __future__ import annotations

import torch
from torch import Tensor

from wavemare.comm.compressor import Compressor
from wavemare.comm.config import MODES
from wavemare.comm.executors import EXECUTORS_BY_MODE
from wavemare.comm.kernels import DTYPES
from wavemare.errors import ConfigError, check_number, did_you_mean


def bucket_key(
    key: str | None, flat: Tensor, weights: Tensor | None, compressor: Compressor | None
) -> str:
    """Return the name of a bucket, by default its size and type.

    Args:
        key: The caller's name, if any.
        flat: The bucket.
        weights: The weights of this gradient, if given.
        compressor: Compresses it; checks bucket and weights.

    Raises:
        ConfigError: The compressor needs a name or weights, or refuses the bucket.
    """
    if compressor is None:
        return key or f"{flat.numel()} {flat.dtype}"
    if not key:
        reason = "the compressor keeps the residual of each bucket under its name"
        raise ConfigError("key", key, reason, "Give key=, a different one for each bucket")
    compressor.check(key, flat.detach(), weights)
    return key


def check_bucket(flat: Tensor, *, averages: bool = False) -> None:
    """Check a bucket that is to be summed or sent.

    Args:
        flat: The bucket.
        averages: Whether its mean is wanted.

    Raises:
        ConfigError: Its layout, shape or type is not supported.
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


def check_blocks(blocks: Tensor, num_blocks: int, device: torch.device) -> None:
    """Check a list of blocks; on an accelerator not its numbers, which would stall the caller.

    Raises:
        ConfigError: Its shape or type does not fit, or a number is not a block.
    """
    if blocks.dtype != torch.int64 or blocks.dim() != 1:
        reason = f"it is {blocks.dtype} of shape {tuple(blocks.shape)}"
        raise ConfigError("blocks", tuple(blocks.shape), reason, "Give (k,), int64")
    if blocks.device != device:
        reason = f"the bucket is on {device}"
        raise ConfigError("blocks", str(blocks.device), reason, "Give a list on the same device")
    if blocks.device.type == "cpu" and blocks.numel():
        least, most = (int(bound) for bound in blocks.aminmax())
        if least < 0 or most >= num_blocks:
            reason = f"the bucket has {num_blocks} blocks"
            value = least if least < 0 else most
            raise ConfigError("blocks", value, reason, "Give numbers from 0, below that number")


def check_settings(block: int, mode: str, deterministic: bool) -> None:
    """Check the settings of a `SparseComm`.

    Raises:
        ConfigError: A value is out of range.
    """
    check_number(ConfigError, "block", block, 1, whole=True)
    if mode not in MODES:
        raise ConfigError("mode", mode, "there is no such mode", did_you_mean(mode, MODES))
    if deterministic and mode != "auto" and not EXECUTORS_BY_MODE[mode].deterministic:
        raise ConfigError(
            "mode",
            mode,
            "it does not sum in the order of the ranks, which deterministic asks for",
            "Set deterministic to false, or choose auto, ordered, pushpull or allgather",
        )
