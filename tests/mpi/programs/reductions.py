# SPDX-License-Identifier: Apache-2.0
"""Allreduce by every executor, for every type, block and pattern."""

import torch
from common import digest, sparse_comm
from inputs import ALL, SPECIAL, buckets
from oracle import close, mask_of, ordered_sum, same_bits, traffic

from wavemare.comm.executors import EXECUTORS_BY_MODE
from wavemare.comm.kernels import num_blocks
from wavemare.comm.masks import mask_bytes

MODES = ("ordered", "pushpull", "allgather", "auto", "packed", "dense")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHORT = ("half", "zero", "negative zeros")
EMPTY_SIZES = (0, 1, 7, 255)
HUGE = 1 << 21


def cases(block, average):
    """Return (pattern, elements, type): everything at one block size, less at the others."""
    if block == HUGE:  # so large that an owner's blocks are sent in chunks, some of them empty
        numel = 4 * block + 7
        return [("one rank empty", numel, torch.float32), ("half", numel, torch.bfloat16)]
    ragged = {64: 64 * 43 + 19, 256: 256 * 24 + 255, 4096: 4096 * 5 + 1, 100: 100 * 23 + 7}[block]
    listed = []
    if block == 64:
        listed += [(name, ragged, torch.float32) for name in ALL]
        listed += [
            (name, ragged, dtype)
            for dtype in (*FLOATS[1:], torch.int32)
            for name in ("half", "one rank empty", *SPECIAL)
            if not (dtype == torch.int32 and name in {"not finite", "negative zeros"})
        ]
        listed += [("half", block * 32, torch.float32)]
    if block == 256:
        listed += [(name, ragged, dtype) for dtype in FLOATS for name in ("half", "not finite")]
        listed += [("subnormal", ragged, torch.float32), ("subnormal", ragged, torch.bfloat16)]
        listed += [("dense", numel, dtype) for numel in EMPTY_SIZES for dtype in FLOATS[:2]]
        listed += [("half", block * 3, torch.float32), ("dense", block, torch.float16)]
    if block in {100, 4096}:
        listed += [(name, ragged, torch.float32) for name in SHORT]
        listed += [("half", ragged, torch.bfloat16), ("only the last element", ragged, FLOATS[3])]
    return listed


def reductions(world, checks, sizes, blocks=(64, 256, 4096, 100), modes=MODES, whole=True):
    for ranks in sizes:
        group, rank, count = world.groups_of(ranks)
        for block in blocks:
            for mode in modes:
                average = block != 64
                exact = mode == "auto" or EXECUTORS_BY_MODE[mode].deterministic
                settings = {"mode": mode, "block": block, "average": average}
                with sparse_comm(world, group, deterministic=exact, **settings) as comm:
                    checks((comm.rank, comm.size) == (rank, count), "place", rank, count)
                    told = [_one(checks, comm, case, whole) for case in cases(block, average)]
                table = world.gather((world.rank - rank, told))
                group_told = [theirs for first, theirs in table if first == world.rank - rank]
                for number, all_told in enumerate(zip(*group_told, strict=True)):
                    replicas = {each[:2] for each in all_told}
                    checks(len(replicas) == 1, "replicas differ:", mode, block, count, number)
                    lost = sum(each[2] for each in all_told)
                    checks(lost == 0, mode, block, count, number, "sent but not received:", lost)


def _one(checks, comm, case, whole):
    name, numel, dtype = case
    what = (comm.mode, comm.block, comm.size, *case)
    everyone = buckets(name, comm.size, numel, comm.block, dtype)
    flat = everyone[comm.rank].clone()
    # With a key of its own, as a bucket that stays dense is soon summed without a header.
    handle = comm.allreduce_(flat, key=f"{name} {numel} {dtype}")
    scale = 1.0 / comm.size if comm.average else 1.0
    if comm.deterministic:
        checks(same_bits(flat, ordered_sum(everyone, scale)), *what)
    else:
        checks(close(flat, everyone, scale), *what)
    stats = handle.stats
    checks(handle.wait() is flat, *what, "gave another tensor")
    # Each chunk of a dense bucket has its own borders between owners.
    counted = MODES if whole else ("pushpull",)
    if stats.executor in counted:
        expected = traffic(stats.executor, everyone, comm.rank, comm.block)
        if comm.mode == "auto" and stats.executor == "ordered" and stats.union is not None:
            metadata = (comm.size - 1) * mask_bytes(num_blocks(numel, comm.block))
            expected = tuple(moved + metadata for moved in expected)
        found = (stats.bytes_up, stats.bytes_down)
        checks(found == expected, *what, stats.executor, "moved", found, "not", expected)
    if stats.union is not None:
        masks = [mask_of(tensor, comm.block) for tensor in everyone]
        total = len(masks) * -(-numel // comm.block)
        union = len({number for mask in masks for number in mask}) / (total / len(masks))
        density = sum(map(len, masks)) / total
        checks(abs(stats.density - density) < 1e-12 and stats.union == union, *what, "densities")
    return stats.executor, digest(flat), stats.bytes_up - stats.bytes_down


def few(world, checks, sizes):
    """Every executor at two sizes of blocks."""
    reductions(world, checks, sizes, (256, 100))


def chunks(world, checks, sizes):
    """Buckets that are sent in several chunks, of which some are empty for some owners."""
    sizes = [min(max(sizes), 2)]
    reductions(world, checks, sizes, (HUGE,), ("ordered", "pushpull"), whole=False)
