# SPDX-License-Identifier: Apache-2.0
"""Chooses executors, by rates measured at start; alike on all ranks, as all its inputs are."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from wavemare.comm.blocks.layout import assign_owners
from wavemare.comm.blocks.masks import BlockCounts, Masks
from wavemare.comm.config import HALVES, LOOSE_MODES
from wavemare.comm.executors.base import CollectiveCall, Scratch
from wavemare.comm.selection.cost import Constants, predict, traffic
from wavemare.comm.transport.base import Transport

HYSTERESIS = 0.1
"""Keep the last executor unless another is predicted to be faster by this share."""
DENSE = ("dense", "ordered")
_LEARNING_RATE = 0.3
_MOST_CORRECTION = 4.0
_FORGETTING = 0.02


@dataclass(frozen=True)
class ExecutorChoice:
    """The executor for a bucket, and the predicted costs of all executors.

    Args:
        executor: The chosen one.
        masks: Of all ranks.
        block_bytes: Bytes of a block.
        predicted_s: Seconds of each executor that may be chosen.
        halves: Whether it is a reduce-scatter.
    """

    executor: str
    masks: Masks | BlockCounts
    block_bytes: int
    predicted_s: Mapping[str, float]
    halves: bool = False

    def __str__(self) -> str:
        masks = self.masks
        blocks = max(masks.num_blocks, 1)
        lines = [
            f"{masks.num_blocks} blocks of {self.block_bytes} bytes on {masks.num_ranks} ranks: "
            f"density {masks.counts.mean() / blocks:.4f}, union {masks.union_size / blocks:.4f}, "
            f"densest rank {masks.counts.max()} blocks"
        ]
        table = traffic(masks, self.block_bytes, halves=self.halves)
        for name, seconds in sorted(self.predicted_s.items(), key=lambda item: item[1]):
            moved = table[name]
            mark = ">" if name == self.executor else " "
            lines.append(
                f"{mark} {name:<10} {1000 * seconds:10.2f} ms   up {moved.up / 2**20:9.2f} MiB   "
                f"down {moved.down / 2**20:9.2f} MiB"
            )
        return "\n".join(lines)


def choose_executor(
    masks: Masks | BlockCounts,
    block_bytes: int,
    constants: Constants,
    allowed: Sequence[str],
    *,
    last: str | None = None,
    corrections: Mapping[str, float] | None = None,
    halves: bool = False,
    searched: bool = True,
) -> ExecutorChoice:
    """Choose an executor; a pure function of what all ranks know.

    Args:
        masks: Of all ranks.
        block_bytes: Bytes of a block.
        constants: Of this machine, the same on all ranks.
        allowed: Names of `wavemare.comm.selection.cost.EXECUTORS`.
        last: The previous choice; kept unless another is faster by `HYSTERESIS`.
        corrections: Measured over predicted time, by executor.
        halves: Whether to choose a reduce-scatter.
        searched: Whether the bucket is read to find its non-zero blocks.
    """
    factors = corrections or {}
    predictions = predict(masks, block_bytes, constants, halves=halves, searched=searched)
    predicted = {name: predictions[name] * factors.get(name, 1.0) for name in allowed}
    best = min(predicted, key=lambda name: (predicted[name], name))
    if last in predicted and predicted[last] <= predicted[best] * (1 + HYSTERESIS):
        best = last
    return ExecutorChoice(best, masks, block_bytes, predicted, halves)


@dataclass
class _History:
    last: str | None = None
    corrections: dict[str, float] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)


class Selector:
    """Chooses for each bucket by its own history.

    Args:
        constants: Of this machine, the same on all ranks.
        allowed: Names of executors.
    """

    def __init__(self, constants: Constants, allowed: Sequence[str]) -> None:
        self.constants = constants
        self.allowed = tuple(allowed)
        self._histories: defaultdict[str, _History] = defaultdict(_History)

    def choose(
        self,
        key: str,
        masks: Masks | BlockCounts,
        block_bytes: int,
        *,
        halves: bool = False,
        searched: bool = True,
        reduces: bool = True,
        tentative: bool = False,
    ) -> ExecutorChoice:
        """Choose an executor for a call.

        Args:
            key: Name of the bucket.
            masks: Of all ranks; without masks all blocks are sent, unless it is tentative.
            block_bytes: Bytes of a block.
            halves: Whether only sums at their owners are wanted.
            searched: Whether the bucket is read to find its non-zero blocks.
            reduces: Whether the library reduces this type; else `LOOSE_MODES` sum in rank order,
                and do not cost what the library's reduction does.
            tentative: Whether nothing is remembered.
        """
        allowed = tuple(name for name in self.allowed if reduces or name not in LOOSE_MODES)
        if isinstance(masks, BlockCounts) and not tentative:
            allowed = tuple(name for name in allowed if name in DENSE)
        history = self._histories[key]
        choice = choose_executor(
            masks,
            block_bytes,
            self.constants,
            [name for name in HALVES if name in allowed] if halves else allowed,
            last=history.last,
            corrections=history.corrections,
            halves=halves,
            searched=searched,
        )
        if not tentative:
            history.last = choice.executor
        return choice

    def learn(self, key: str, executor: str, ratio: float) -> None:
        """Correct the predictions by a measured call.

        Args:
            key: Name of the bucket.
            executor: Which was used.
            ratio: Seconds taken over seconds predicted; the same on all ranks.
        """
        history = self._histories[key]
        if executor not in history.used:
            # The first call touches fresh pages and may compile kernels.
            history.used.add(executor)
            return
        corrections = history.corrections
        for other in corrections.keys() - {executor}:
            # Unused executors are not measured: let their corrections fade.
            corrections[other] += _FORGETTING * (1 - corrections[other])
        before = corrections.get(executor, 1.0)
        # The prediction was corrected already.
        target = min(max(before * ratio, 1 / _MOST_CORRECTION), _MOST_CORRECTION)
        corrections[executor] = before + _LEARNING_RATE * (target - before)


# --- the speed of network and kernels, measured on all ranks at once ------------------------------

_SIZES = (1 << 16, 1 << 20, 1 << 23, 1 << 25)
"""Bytes that each rank moves; larger sizes are skipped after a slow one."""
_ENOUGH_S = 0.15
_KERNEL_BYTES = 16 << 20
_REPEATS = 5


def calibrate(
    transport: Transport, block: int, device: torch.device, *, everyone: Transport | None = None
) -> Constants:
    """Measure the constants of the cost model; all ranks must call it together.

    Args:
        transport: To the other ranks.
        block: Elements per block.
        device: Where the buckets will be.
        everyone: To more ranks, which measure in groups of their own and must agree with this one.

    Returns:
        Rank 0's view of the slowest rank's figures, the same on all ranks.
    """
    exchange = _fit(_measure(transport, device, _exchange))
    dense = _fit(_measure(transport, device, _dense))
    kernels = _kernels(transport, block, device)
    figures = torch.tensor([*exchange, *dense, *kernels], dtype=torch.float64)
    (everyone or transport).broadcast(figures)
    return Constants(*figures.tolist())


def _exchange(transport: Transport, buffer: Tensor, out: Tensor) -> None:
    parts, arriving = buffer.chunk(transport.size), out.chunk(transport.size)
    transport.begin_messages(lambda peer: [arriving[peer]], lambda peer: [parts[peer]]).wait()


def _dense(transport: Transport, buffer: Tensor, out: Tensor) -> None:
    transport.all_reduce(buffer)


def _measure(
    transport: Transport,
    device: torch.device,
    function: Callable[[Transport, Tensor, Tensor], None],
) -> list[tuple[float, float]]:
    """Return pairs of bytes and seconds; for an exchange the bytes are those that a rank sends."""
    samples = []
    for size in _SIZES:
        numel = size // 4 // transport.size * transport.size
        buffer, out = (torch.zeros(numel, device=device) for _ in range(2))
        # The median: the shortest time has none of the waiting that calls have.
        seconds = median(_timed(transport, device, function, buffer, out) for _ in range(_REPEATS))
        others = (transport.size - 1) / transport.size if function is _exchange else 1.0
        samples.append((4.0 * numel * others, seconds))
        if seconds > _ENOUGH_S:
            break
    return samples


def _timed(
    transport: Transport,
    device: torch.device,
    function: Callable[[Transport, Tensor, Tensor], None],
    *arguments: Tensor,
) -> float:
    """Return the slowest rank's seconds, the same on all ranks."""
    transport.all_gather(*_flags(transport, 0.0, device))
    _finish(device)  # over NCCL the stream alone has waited for the other ranks
    started = time.perf_counter()
    function(transport, *arguments)
    _finish(device)
    mine, table = _flags(transport, time.perf_counter() - started, device)
    transport.all_gather(mine, table)
    return float(table.max())


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _flags(transport: Transport, value: float, device: torch.device) -> tuple[Tensor, Tensor]:
    mine = torch.tensor([value], dtype=torch.float64, device=device)
    return mine, torch.empty(transport.size, 1, dtype=torch.float64, device=device)


def _fit(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return latency and seconds per byte: from the quickest and the largest measured.

    The smallest is not always the quickest: what is new to a network is slow at first. A largest
    one that is the quickest tells bytes from latency no more: then all its time is by bytes.
    """
    large, last = samples[-1]
    small, first = min(samples, key=lambda sample: sample[1])
    per_byte = max((last - first) / (large - small) if large > small else last / large, 1e-12)
    return max(first - small * per_byte, 1e-6), per_byte


def _kernels(transport: Transport, block: int, device: torch.device) -> list[float]:
    """Return seconds per byte of mask, pack, reduce and unpack, and per block of planning."""
    blocks = max(_KERNEL_BYTES // 4 // block // 2, 1) * 2
    numel = blocks * block
    flat = torch.ones(numel, device=device)
    call = CollectiveCall(flat, block, 0.5, transport, Scratch())
    bits = torch.empty(-(-blocks // 8), dtype=torch.uint8, device=device)
    every = torch.arange(blocks, device=device)
    packed, out = call.packed("packed", blocks), call.packed("out", blocks // 2)
    sources = torch.arange(blocks, device=device).view(2, -1)[:, : blocks // 2].contiguous()
    kernels = call.kernels
    # Worst case of the mask: it must read all of a block to find it zero.
    zeros = torch.zeros_like(flat)
    generator = torch.Generator().manual_seed(0)
    masks = Masks.of(torch.randint(2, (2, blocks), generator=generator).numpy())

    def planned() -> None:
        layout = assign_owners(masks)
        layout.push_counts(slice(1))
        layout.arriving_counts(0)
        layout.pushed(0)
        layout.sources(0)

    measured = [
        (lambda: kernels.mask(zeros, block, bits), 4 * numel),
        (lambda: kernels.gather(flat, block, every, packed), 4 * numel),
        (lambda: kernels.reduce(packed, sources, block, 0.5, out), 6 * numel),
        (lambda: kernels.scatter(packed, block, every, flat), 4 * numel),
        (planned, 2 * blocks),
    ]
    rates = []
    for function, amount in measured:
        times = [
            _timed(transport, device, lambda *_: function(), flat)  # noqa: B023
            for _ in range(_REPEATS)
        ]
        rates.append(min(times) / amount)
    return rates
