# SPDX-License-Identifier: Apache-2.0
"""How fast Triton's kernels are, against the device's own copy of as many bytes.

``pytest -s tests/gpu/test_kernel_bandwidth.py`` prints the table.
"""

from statistics import median

import pytest
import torch

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU (make test-gpu)"),
]

NUM_BYTES = 400 * 10**6
BLOCK = 256


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("density", "ragged"), [(1.0, False), (0.1, False), (0.1, True)])
def test_mask_reads_as_fast_as_the_device_copies(dtype, density, ragged):
    from wavemare.comm.kernels.triton_kernels import TritonKernels

    source = torch.empty(NUM_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * NUM_BYTES / seconds(lambda: target.copy_(source))
    count = NUM_BYTES // dtype.itemsize // BLOCK
    flat = torch.zeros(count * BLOCK - (BLOCK - 3 if ragged else 0), dtype=dtype, device="cuda")
    index = (torch.rand(count, device="cuda") < density).nonzero().flatten()
    # Only the last element of a block is set, so that nothing can stop early.
    flat[index[:-1] * BLOCK + BLOCK - 1] = 1
    bits = torch.zeros(-(-count // 8), dtype=torch.uint8, device="cuda")
    read = flat.nbytes / seconds(lambda: TritonKernels().mask(flat, BLOCK, bits))
    print(f"{dtype!s:14} {density} {ragged}: {read / 1e9:.0f} GB/s, {read / copied:.2f} of a copy")
    assert read >= 0.8 * copied


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_move_about_as_fast_as_the_device_copies(dtype):
    """Every other block on average, in the order of their numbers, as executors move them."""
    from wavemare.comm.kernels.triton_kernels import TritonKernels

    kernels, ranks = TritonKernels(), 4
    count = NUM_BYTES // dtype.itemsize // BLOCK // ranks * ranks
    wide = torch.randn(2 * count * BLOCK, device="cuda").to(dtype)
    packed = torch.empty(count * BLOCK, dtype=dtype, device="cuda")
    index = torch.randperm(2 * count, device="cuda")[:count].sort().values
    sources, summed = (
        torch.arange(count, device="cuda").view(ranks, -1),
        wide[: count // ranks * BLOCK],
    )
    copied = 2 * packed.nbytes / seconds(lambda: packed.copy_(wide[: packed.numel()]))
    moved = {
        "gather": (2.0, lambda: kernels.gather(wide, BLOCK, index, packed)),
        "scatter": (2.0, lambda: kernels.scatter(packed, BLOCK, index, wide)),
        "reduce": (1 + 1 / ranks, lambda: kernels.reduce(packed, sources, BLOCK, 0.5, summed)),
    }
    for name, (share, run) in moved.items():
        speed = share * packed.nbytes / seconds(run)
        print(f"{dtype!s:14} {name:8} {speed / 1e9:.0f} GB/s, {speed / copied:.2f} of a copy")
        assert speed >= 0.6 * copied, name
