# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's messages between pipeline stages, each followed by its checksum."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
from deepspeed.runtime.pipe import engine as pipe_engine
from torch import Tensor

from wavemare.comm.checksums import changed, checksum_of

__all__ = ["CheckedMessages", "check_arrived", "trailer_of"]


class CheckedMessages:
    """Stands in for ``deepspeed.runtime.pipe.p2p`` while an engine sends or receives.

    Args:
        stage_to_global: Of the engine's grid: a stage's global rank.
    """

    def __init__(self, stage_to_global: Any) -> None:
        self._inner = pipe_engine.p2p
        self._stage_to_global = stage_to_global
        self._contents = ""

    @contextmanager
    def carrying(self, contents: str) -> Iterator[None]:
        """Check the messages of a block.

        Args:
            contents: What they are, such as ``gradient``.
        """
        self._contents = contents
        pipe_engine.p2p = self
        try:
            yield
        finally:
            pipe_engine.p2p = self._inner

    def send(self, tensor: Tensor, dest_stage: int) -> None:
        """Send a tensor and its checksum to a stage."""
        trailer = trailer_of(tensor)
        self._inner.send(tensor, dest_stage)
        self._inner.send(trailer, dest_stage)

    def recv(self, tensor: Tensor, src_stage: int) -> None:
        """Fill a tensor with the next message of a stage.

        Raises:
            MessageError: It is not as it was sent.
        """
        trailer = trailer_of(None, tensor.device)
        self._inner.recv(tensor, src_stage)
        self._inner.recv(trailer, src_stage)
        check_arrived(tensor, trailer, self._stage_to_global(src_stage), self._contents)


def trailer_of(tensor: Tensor | None, device: torch.device | None = None) -> Tensor:
    """Return what follows a message, (1,) int64; without one, room for it on a device."""
    value, place = (0, device) if tensor is None else (checksum_of(tensor), tensor.device)
    return torch.tensor([value], dtype=torch.int64, device=place)


def check_arrived(tensor: Tensor, trailer: Tensor, sender: int, contents: str) -> None:
    """Compare a message with what followed it.

    Args:
        tensor: The message.
        trailer: From `trailer_of` on its sender.
        sender: Its global rank.
        contents: What it is.

    Raises:
        MessageError: They differ.
    """
    if checksum_of(tensor) != int(trailer):
        raise changed(sender, torch.distributed.get_rank(), contents, tensor.nbytes)
