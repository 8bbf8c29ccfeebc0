# SPDX-License-Identifier: Apache-2.0
"""Checksums of messages: a wrong bit is found before it is used."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from wavemare.errors import MessageError

__all__ = ["changed", "checksum", "checksum_of"]


def checksum(parts: Iterable[Any]) -> int:
    """Return the CRC-32 of buffers one after the other.

    It finds each wrong bit, each two, and all within 32.
    """
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value


def checksum_of(tensor: Tensor) -> int:
    """Return the checksum of a tensor's bytes.

    On an accelerator this waits for the device and copies the tensor to the host.
    """
    host = tensor.detach().cpu().contiguous()
    return checksum([host.view(-1).view(torch.uint8).numpy().data])


def changed(sender: int, receiver: int, contents: str, num_bytes: int) -> MessageError:
    """Return the error for a message that is not as it was sent.

    Args:
        sender: Its global rank.
        receiver: Its global rank.
        contents: What was sent, such as ``gradient``.
        num_bytes: Its length.
    """
    return MessageError(
        f"message from rank {sender} to rank {receiver}",
        contents,
        f"its checksum does not fit its {num_bytes} bytes: they have changed on the way",
        "Resume from the last checkpoint; check the memory and network of the two hosts",
    )
