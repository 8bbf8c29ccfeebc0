# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels against slow twins, and how they are compiled."""

import block_cases
import pytest
import reduce_cases
import torch
from slow_twins import Subject, bucket, same, slow_mask

from wavemare.comm.kernels import BlockKernels

CHECKS = {
    name.removeprefix("check_"): check
    for name, check in {**vars(block_cases), **vars(reduce_cases)}.items()
    if name.startswith("check_")
}


@pytest.fixture
def kernels():
    return BlockKernels()


@pytest.mark.long
@pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # sums that overflow are meant
def test_kernels_are_bit_exact(kernels, check, long):
    cases = list(CHECKS[check](Subject(kernels, kernels, long=long)))
    assert [case for case, right in cases if not right] == []
    assert cases or not long


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_elements_may_lie_at_odd_addresses(kernels, dtype):
    flat = bucket(dtype, 205, 20, seed=3)
    memory = bytearray(flat.numel() * dtype.itemsize + 1)
    memory[1:] = flat.view(torch.uint8).numpy().tobytes()
    odd = torch.frombuffer(memory, dtype=dtype, offset=1)
    bits = torch.empty(2, dtype=torch.uint8)
    kernels.mask(odd, 20, bits)
    expected, after = slow_mask(flat, 20)
    assert bits.tolist() == expected
    assert same(odd, after)
