# SPDX-License-Identifier: Apache-2.0
"""What this job's own ranks can do: compute, memory and links, measured within seconds."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import psutil
import torch
from deepspeed.accelerator import get_accelerator
from torch import distributed as dist
from torch import nn

from wavemare.engine.launch.group import gather
from wavemare.errors import PlanError
from wavemare.models.timing import device_time
from wavemare.parallel.planner.cluster import BETWEEN, WITHIN, Cluster, Device, Link

__all__ = ["BlockSize", "group_types", "probe_cluster"]

_GIB = 2**30
_SAMPLES = (1, 4)
_SIZES = (2**12, 2**22)
_COPY = 2**25
_ROUNDS = 7
_WARMUPS = 2
_ROUND_S = 0.05
"""Least of a round: a device that gets its time in slices is measured over several of them."""
_PARTS = 4
"""Measurements between which the time is divided."""

_ALIKE = 1.15
_PASSES = 3


@dataclass(frozen=True)
class BlockSize:
    """The block that is measured: the model's own width.

    Args:
        width: Of the hidden states.
        inner: Of the feed-forward part.
        heads: Of the attention.
        sequence: Tokens.
    """

    width: int
    inner: int
    heads: int
    sequence: int

    @property
    def flops(self) -> float:
        """Operations of a forward pass of one sample."""
        weights = 4 * self.width**2 + 2 * self.width * self.inner
        return 2.0 * self.sequence * weights + 4.0 * self.sequence**2 * self.width


def probe_cluster(block: BlockSize, *, dtype: str = "fp32", limit_s: float = 20.0) -> Cluster:
    """Measure all ranks of the running job at once, as they will train at once.

    A block's forward and backward pass at two batch sizes gives the rate (slope) and what does not
    depend on the batch; a copy gives the bandwidth of the memory; messages and all-reduces of two
    sizes the links. All ranks call it together and get the same cluster, device ``r`` being that of
    rank ``r``.

    Args:
        block: Of the model.
        dtype: fp32, fp16 or bf16.
        limit_s: About how long it may take.

    Raises:
        PlanError: ``torch.distributed`` is not initialized.
    """
    if not dist.is_initialized():
        reason = "torch.distributed is not initialized"
        raise PlanError("torch.distributed", None, reason, "Call wavemare.init_distributed() first")
    part_s = limit_s / _PARTS
    kind = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    device = torch.device(get_accelerator().current_device_name())
    dist.barrier()
    with torch.random.fork_rng():  # dropout must not move what the job draws
        rate, overhead_s = _block(block, device, kind, 2 * part_s)
    own = Device(
        type=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        tflops=rate / 1e12,
        efficiency=1.0,
        memory_gib=_memory_bytes(device) / _GIB,
        memory_gb_s=_copy(device, part_s) / 1e9,
        node=socket.gethostname(),
        overhead_s=overhead_s,
    )
    devices = gather(own)
    nodes = [found.node for found in devices]
    within = _pair_link(_first_pair(nodes, same=True), device) or WITHIN
    between = _pair_link(_first_pair(nodes, same=False), device) or BETWEEN
    reduced = _reduction_link(device)
    if reduced is not None and len(set(nodes)) == 1:
        within = _slower(within, reduced)
    elif reduced is not None:
        between = _slower(between, reduced)
    return Cluster(
        devices=group_types(devices),
        within=within,
        between=between,
        measured={
            "hosts": sorted(set(nodes)),
            "driver": torch.version.cuda or torch.version.hip or "cpu",
            "torch": torch.__version__,
            "dtype": dtype,
        },
    )


def group_types(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Return devices of the same name and nearly the same speed as one type, with mean numbers.

    Devices of a name are ordered by speed and parted wherever the next one is more than 15 % faster
    than the first of the group; several groups are told apart by a number.
    """
    result = list(devices)
    for name in sorted({device.type for device in devices}):
        ranks = [rank for rank, device in enumerate(devices) if device.type == name]
        ranks.sort(key=lambda rank: (devices[rank].rate, rank))
        groups: list[list[int]] = []
        for rank in ranks:
            if groups and devices[rank].rate <= _ALIKE * devices[groups[-1][0]].rate:
                groups[-1].append(rank)
            else:
                groups.append([rank])
        for number, group in enumerate(groups):
            suffix = f"#{number}" if len(groups) > 1 else ""
            for rank in group:
                result[rank] = _mean([devices[r] for r in group], devices[rank], name + suffix)
    return tuple(result)


def _mean(group: Sequence[Device], own: Device, name: str) -> Device:
    def mean(field: str) -> float:
        return sum(getattr(device, field) for device in group) / len(group)

    return Device(
        type=name,
        tflops=mean("tflops"),
        efficiency=1.0,
        memory_gib=own.memory_gib,
        memory_gb_s=mean("memory_gb_s"),
        node=own.node,
        overhead_s=mean("overhead_s"),
    )


def _block(
    block: BlockSize, device: torch.device, dtype: torch.dtype, limit_s: float
) -> tuple[float, float]:
    """Return the operations per second of a block's passes, and its fixed seconds."""
    layer = nn.TransformerEncoderLayer(
        block.width, block.heads, block.inner, activation="gelu", batch_first=True
    ).to(device, dtype)
    seconds = []
    for samples in _SAMPLES:
        shape = (samples, block.sequence, block.width)
        hidden = torch.ones(shape, device=device, dtype=dtype, requires_grad=True)

        def run(hidden: torch.Tensor = hidden) -> None:
            layer(hidden).sum().backward()

        seconds.append(_seconds(run, limit_s / len(_SAMPLES)))
    few, many = _SAMPLES
    # Noise must not make a sample free: it takes at least half of its part of the larger batch.
    slope = max((seconds[1] - seconds[0]) / (many - few), seconds[1] / many / 2)
    return _PASSES * block.flops / slope, max(seconds[0] - few * slope, 0.0)


def _copy(device: torch.device, limit_s: float) -> float:
    """Return the bytes per second that a copy reads and writes."""
    source = torch.ones(_COPY, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * _COPY / _seconds(lambda: target.copy_(source), limit_s)


def _seconds(run: Callable[[], object], limit_s: float) -> float:
    """Return the median time of a run, in rounds of some, or of as many rounds as fit."""
    started = device_time()
    run()
    once = device_time() - started
    if once * _WARMUPS < limit_s:
        for _ in range(_WARMUPS):
            before = device_time()
            run()
            once = device_time() - before
    runs = max(1, math.ceil(_ROUND_S / max(once, 1e-9)))
    spent: list[float] = []
    while len(spent) < _ROUNDS and (not spent or device_time() - started < limit_s):
        before = device_time()
        for _ in range(runs):
            run()
        spent.append((device_time() - before) / runs)
    return median(spent)


def _first_pair(nodes: Sequence[str], *, same: bool) -> tuple[int, int] | None:
    """Return the first two ranks of one node, or of two."""
    for first, node in enumerate(nodes):
        for second in range(first + 1, len(nodes)):
            if (nodes[second] == node) == same:
                return first, second
    return None


def _pair_link(pair: tuple[int, int] | None, device: torch.device) -> Link | None:
    """Return the link between two ranks, from messages there and back; on all ranks."""
    if pair is None:
        return None
    seconds = []
    for size in _SIZES:
        message = torch.ones(size, dtype=torch.uint8, device=device)
        spent = 0.0
        if dist.get_rank() in pair:
            spent = _fixed_rounds(partial(_there_and_back, message, pair)) / 2
        seconds.append(gather(spent)[pair[0]])
    return _line(seconds, _SIZES)


def _there_and_back(message: torch.Tensor, pair: tuple[int, int]) -> None:
    rank = dist.get_rank()
    other = pair[1 - pair.index(rank)]
    if rank == pair[0]:
        dist.send(message, other)
        dist.recv(message, other)
    else:
        dist.recv(message, other)
        dist.send(message, other)


def _reduction_link(device: torch.device) -> Link | None:
    """Return the link of a ring that would take as long as all-reduces over all ranks do."""
    ranks = dist.get_world_size()
    if ranks == 1:
        return None
    seconds = []
    for size in _SIZES:
        numbers = torch.ones(size // 4, device=device)
        spent = _fixed_rounds(partial(dist.all_reduce, numbers))
        seconds.append(gather(spent)[0] / (2 * (ranks - 1)))
    return _line(seconds, [size / ranks for size in _SIZES])


def _fixed_rounds(run: Callable[[], object]) -> float:
    """Return the median time of a fixed number of rounds: all ranks must do as many."""
    run()
    spent = []
    for _ in range(_ROUNDS):
        before = device_time()
        run()
        spent.append(device_time() - before)
    return median(spent)


def _line(seconds: Sequence[float], sizes: Sequence[float]) -> Link:
    """Return the link through two points; noise must not make bytes free."""
    per_byte = max((seconds[1] - seconds[0]) / (sizes[1] - sizes[0]), seconds[1] / sizes[1] / 10)
    return Link(max(seconds[0] - sizes[0] * per_byte, 0.0), 1 / per_byte)


def _slower(first: Link, second: Link) -> Link:
    return Link(max(first.alpha_s, second.alpha_s), min(first.bytes_s, second.bytes_s))


def _memory_bytes(device: torch.device) -> float:
    """Return the device's memory; on the CPU this rank's part of the machine's."""
    if device.type == "cpu":
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return float(psutil.virtual_memory().total) / ranks
    return float(get_accelerator().total_memory())
