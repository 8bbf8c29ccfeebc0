# SPDX-License-Identifier: Apache-2.0
"""What a collective must do, by numpy alone and element by element: nothing of it is shared with
the code under test, but for the size of the header of each call.
"""

import numpy as np
import torch

from wavemare.comm.reduction import HEADER_BYTES

BITS = {
    torch.float32: np.uint32,
    torch.float64: np.uint64,
    torch.int32: np.uint32,
    torch.bfloat16: np.uint16,
    torch.float16: np.uint16,
}
SIGNLESS = {
    torch.float32: 0x7FFF_FFFF,
    torch.float64: 0x7FFF_FFFF_FFFF_FFFF,
    torch.int32: 0xFFFF_FFFF,
    torch.bfloat16: 0x7FFF,
    torch.float16: 0x7FFF,
}


def bits_of(tensor):
    """Return the bits of a tensor's elements as unsigned numbers."""
    if tensor.numel() == 0:
        return np.empty(0, BITS[tensor.dtype])
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return raw.view(BITS[tensor.dtype])


def widened(tensor):
    """Return a tensor's values in the type in which they are summed."""
    if tensor.dtype == torch.bfloat16:
        return (bits_of(tensor).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if tensor.dtype == torch.float16:
        return tensor.numpy().astype(np.float32)
    return tensor.numpy()


def rounded(values, dtype):
    """Round sums once, to nearest even, and return a tensor."""
    if dtype == torch.bfloat16:
        low = np.uint32(0xFFFF)
        bits = values.view(np.uint32)
        high = bits >> np.uint32(16)
        rest, half = bits & low, np.uint32(0x8000)
        up = (rest > half) | ((rest == half) & ((high & np.uint32(1)) == 1))
        high = np.where(np.isnan(values), np.uint32(0x7FC0), high + up.astype(np.uint32))
        return torch.from_numpy(high.astype(np.uint16).view(np.int16)).view(torch.bfloat16)
    if dtype == torch.float16:
        with np.errstate(over="ignore", invalid="ignore"):
            return torch.from_numpy(values.astype(np.float16))
    return torch.from_numpy(values)


def ordered_sum(inputs, scale=1.0):
    """Return the sum of the ranks' tensors in their order, beginning with +0.0."""
    first = widened(inputs[0])
    total = np.zeros(first.shape, first.dtype)
    with np.errstate(all="ignore"):
        for tensor in inputs:
            total = np.add(total, widened(tensor))
        if scale != 1.0:
            total = np.multiply(total, total.dtype.type(scale))
    return rounded(total, inputs[0].dtype)


def same_bits(found, expected):
    """Whether two tensors have the same bits; of NaN only that both are."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    if not found.dtype.is_floating_point:
        return torch.equal(found, expected)
    nan, expected_nan = torch.isnan(found).numpy(), torch.isnan(expected).numpy()
    alike = bits_of(found) == bits_of(expected)
    return bool(np.array_equal(nan, expected_nan) and alike[~nan.ravel()].all())


def close(found, inputs, scale=1.0):
    """Whether a sum in whatever order is as good as rounding allows."""
    dtype = found.dtype
    exact = ordered_sum(inputs, scale)
    if dtype not in (torch.float32, torch.float64):
        return same_bits(found, exact)
    values, reference = found.numpy(), exact.numpy()
    finite = np.isfinite(reference)
    if not np.array_equal(np.isnan(values), np.isnan(reference)):
        return False
    infinite = ~finite & ~np.isnan(reference)
    if not np.array_equal(values[infinite], reference[infinite]):
        return False
    unit = 2.0**-23 if dtype == torch.float32 else 2.0**-52
    with np.errstate(all="ignore"):
        size = sum(np.abs(tensor.numpy().astype(np.longdouble)) for tensor in inputs)
    # Below the normal numbers, rounding after the scale is absolute.
    bound = scale * len(inputs) * unit * size + 2 * np.finfo(values.dtype).smallest_subnormal
    with np.errstate(invalid="ignore"):
        difference = np.abs(values.astype(np.longdouble) - reference)
    return bool((difference[finite] <= bound[finite]).all())


def mask_of(tensor, block):
    """Return the numbers of a bucket's non-zero blocks, found block by block."""
    words = bits_of(tensor) & BITS[tensor.dtype](SIGNLESS[tensor.dtype])
    return [
        number
        for number, start in enumerate(range(0, words.size, block))
        if words[start : start + block].any()
    ]


def owners(masks, ranks):
    """Return the owner of each block: sorted by how many ranks have it, and dealt like cards."""
    holders = {}
    for mask in masks:
        for number in mask:
            holders[number] = holders.get(number, 0) + 1
    cards = sorted(holders, key=lambda number: (holders[number], number))
    return {number: place % ranks for place, number in enumerate(cards)}


def equal_borders(numel, block, ranks):
    """Return the borders at which a bucket is cut for the ordered dense sum."""
    blocks = (numel + block - 1) // block
    return [min(blocks * rank // ranks * block, numel) for rank in range(ranks)] + [numel]


def traffic(executor, inputs, rank, block):
    """Return what a rank sends and receives in an allreduce, header and masks included."""
    ranks, numel, width = len(inputs), inputs[0].numel(), inputs[0].element_size()
    others = ranks - 1
    if ranks == 1 or numel == 0:
        told = HEADER_BYTES * others
        return told, told
    told = HEADER_BYTES * others
    if executor in {"ordered", "dense"}:
        library = executor == "dense" and width != 2
        up, down = (2 * (ranks - 1) * numel * width // ranks,) * 2
        if not library:
            up, down = _ordered(numel, width, block, ranks, rank)
        return told + up, told + down
    told += others * (((numel + block - 1) // block + 7) // 8)
    masks = [mask_of(tensor, block) for tensor in inputs]
    size = block * width
    if executor == "allgather":
        held = [len(mask) * size for mask in masks]
        return told + others * held[rank], told + sum(held) - held[rank]
    owner = owners(masks, ranks)
    if executor == "packed":
        if width != 2:
            both = 2 * (ranks - 1) * len(owner) * size // ranks
            return told + both, told + both
        up, down = _ordered(len(owner) * block, width, block, ranks, rank)
        return told + up, told + down
    pushed = sum(owner[number] != rank for number in masks[rank]) * size
    arrived = sum(
        owner[number] == rank for peer, mask in enumerate(masks) if peer != rank for number in mask
    )
    owned = sum(who == rank for who in owner.values())
    return (
        told + pushed + others * owned * size,
        told + arrived * size + (len(owner) - owned) * size,
    )


def _ordered(numel, width, block, ranks, rank):
    borders = equal_borders(numel, block, ranks)
    own = (borders[rank + 1] - borders[rank]) * width
    rest = numel * width - own
    return rest + (ranks - 1) * own, (ranks - 1) * own + rest


def summed_rows(ids, rows, scale=1.0):
    """Return the ids and sums of `allreduce_rows_`: by rank, and within a rank by position.

    Args:
        ids: Of each rank, a list of numbers.
        rows: Of each rank, a tensor (k, dim).
    """
    dtype, dim = rows[0].dtype, rows[0].shape[1]
    every = sorted({number for numbers in ids for number in numbers})
    place = {number: position for position, number in enumerate(every)}
    parts = []
    for numbers, values in zip(ids, rows, strict=True):
        wide = widened(values).reshape(-1, dim)
        own = np.zeros((len(every), dim), wide.dtype)
        with np.errstate(all="ignore"):
            for number, row in zip(numbers, wide, strict=True):
                own[place[number]] = own[place[number]] + row
        # What travels is of the rows' type.
        parts.append(rounded(own.ravel(), dtype))
    return every, ordered_sum(parts, scale).view(-1, dim)
