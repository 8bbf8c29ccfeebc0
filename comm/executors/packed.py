# SPDX-License-Identifier: Apache-2.0
"""The union of all ranks' blocks, packed, through the library's dense reduction."""

from __future__ import annotations

from dataclasses import replace

from wavemare.comm.blocks.masks import Masks
from wavemare.comm.executors.base import CollectiveCall, Executor
from wavemare.comm.executors.dense import Dense

__all__ = ["Packed"]


class Packed(Executor):
    """Best where all ranks have the same blocks, and on networks whose reduction is the fastest."""

    name = "packed"
    deterministic = False

    def all_reduce(self, call: CollectiveCall, masks: Masks | None) -> None:
        """Pack the union, reduce it, and put it back."""
        assert masks is not None
        with call.phase("pack"):
            index = call.index(masks.union)
            packed = call.packed("packed", index.numel())
            call.kernels.gather(call.flat, call.block, index, packed)
        if packed.numel():
            Dense().all_reduce(replace(call, flat=packed))
        with call.phase("unpack"):
            call.kernels.scatter(packed, call.block, index, call.flat)
