# SPDX-License-Identifier: Apache-2.0
"""Ways to sum a bucket over all ranks."""

from __future__ import annotations

from collections.abc import Mapping

from wavemare.comm.executors.base import CollectiveCall, Executor, Scratch
from wavemare.comm.executors.block_allgather import BlockAllgather
from wavemare.comm.executors.dense import Dense, Ordered, Packed
from wavemare.comm.executors.push_pull import PushPull
from wavemare.comm.executors.streaming import Streaming

__all__ = ["EXECUTOR_TYPES", "CollectiveCall", "Executor", "Scratch"]

EXECUTOR_TYPES: Mapping[str, type[Executor]] = {
    executor.name: executor
    for executor in (Dense, Ordered, Packed, PushPull, BlockAllgather, Streaming)
}
"""By name."""
