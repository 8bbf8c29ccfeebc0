# SPDX-License-Identifier: Apache-2.0
"""How fast Triton's kernels are, against the device's own copy of as many bytes.

``pytest -s tests/gpu/test_kernel_bandwidth.py`` prints the table.
"""

from statistics import median

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs an NVIDIA GPU (make test-gpu)"
)

MEGABYTES = 400
BLOCK = 256
RANKS = 4
DTYPES = (torch.float32, torch.bfloat16)


def seconds(run, repeats=21):
    """Return the median time of a call on the device, with cold caches."""
    flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(repeats + 3):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times[3:])


def copy_bandwidth():
    """Return bytes read and written per second by a copy."""
    source = torch.empty(MEGABYTES * 10**6, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source))


def measured(kernels, dtype, density, ragged):
    """Yield (kernel, bytes per second) for a bucket of the given share of non-zero blocks."""
    count = MEGABYTES * 10**6 // dtype.itemsize // BLOCK
    flat = torch.zeros(count * BLOCK - (BLOCK - 3 if ragged else 0), dtype=dtype, device="cuda")
    alive = torch.rand(count, device="cuda") < density
    index = alive.nonzero().flatten()
    # Only the last element of a block is set, so that nothing can stop early.
    flat[index[:-1] * BLOCK + BLOCK - 1] = 1
    bits = torch.zeros(-(-count // 8), dtype=torch.uint8, device="cuda")
    packed = torch.empty(index.numel() * BLOCK, dtype=dtype, device="cuda")
    moved = 2 * packed.nbytes + index.nbytes

    def rate(size, run):
        return size / seconds(run)

    yield "mask", rate(flat.nbytes + bits.nbytes, lambda: kernels.mask(flat, BLOCK, bits))
    yield "gather", rate(moved, lambda: kernels.gather(flat, BLOCK, index, packed))
    yield "scatter", rate(moved, lambda: kernels.scatter(packed, BLOCK, index, flat))
    rows = index.numel() // RANKS
    places = torch.arange(RANKS * rows, device="cuda").view(RANKS, rows)
    out = torch.empty(rows * BLOCK, dtype=dtype, device="cuda")
    summed = RANKS * out.nbytes + out.nbytes + places.nbytes
    yield "reduce", rate(summed, lambda: kernels.reduce(packed, places, BLOCK, 0.25, out))


def test_mask_reads_as_fast_as_the_device_copies():
    from wavemare.comm.kernels.triton_kernels import TritonKernels

    copy = copy_bandwidth()
    print(f"\n{torch.cuda.get_device_name()}: copies {copy / 1e9:.0f} GB/s (read and written)")
    print(f"{'kernel':8} {'dtype':14} {'density':>7} {'ragged':>6} {'tile':>6} {'GB/s':>6} of copy")
    masks = {}
    for tile in (8192, 16384, 32768):
        kernels = TritonKernels(tile=tile)
        for dtype in DTYPES:
            for density, ragged in ((1.0, False), (0.1, False), (0.1, True)):
                for kernel, rate in measured(kernels, dtype, density, ragged):
                    line = f"{kernel:8} {dtype!s:14} {density:7} {ragged!s:>6} {tile:6}"
                    print(f"{line} {rate / 1e9:6.0f} {rate / copy:7.2f}")
                    if kernel == "mask":
                        masks[tile, dtype, density, ragged] = rate / copy
    usual = TritonKernels().tile
    slow = {case: rate for case, rate in masks.items() if case[0] == usual and rate < 0.8}
    assert slow == {}
