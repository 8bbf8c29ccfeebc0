# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels against slow twins, and how they are compiled."""

import importlib.util
import sys
import threading
from pathlib import Path

import block_cases
import numpy as np
import pytest
import reduce_cases
import torch
from slow_twins import Subject, bucket, same, slow_mask

from wavemare.comm.kernels.numba_kernels import NumbaKernels
from wavemare.comm.kernels.words import compiled

CHECKS = {
    name.removeprefix("check_"): check
    for name, check in {**vars(block_cases), **vars(reduce_cases)}.items()
    if name.startswith("check_")
}


@pytest.fixture
def kernels():
    return NumbaKernels()


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


SPIN = """
def spin(flag, counts, limit):
    for i in range(limit):
        counts[i & 7] += 1
        if flag[0]:
            return True
    return False
"""


@pytest.fixture(params=["kept on disk", "not kept"])
def spin(request, tmp_path):
    """Return a function of a file, beside which numba can keep it, or one without a file."""
    file = tmp_path / "spinning.py"
    file.write_text(SPIN)
    names = {}
    exec(SPIN, names)
    if request.param == "not kept":
        return names["spin"]
    spec = importlib.util.spec_from_file_location("spinning", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.spin


def test_compiled_functions_let_other_threads_run(spin):
    spin = compiled(spin)
    flag, counts = np.zeros(1, np.int64), np.zeros(8, np.int64)
    assert not spin(flag, counts, 1)
    begun, seen = threading.Event(), []

    def work():
        begun.set()
        # It ends early only if the other thread can set the flag meanwhile.
        seen.append(spin(flag, counts, 20_000_000_000))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # a thread that keeps the interpreter's lock is not interrupted
    try:
        thread = threading.Thread(target=work)
        thread.start()
        begun.wait()
        flag[0] = 1
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert seen == [True]


def test_compiled_functions_are_kept_on_disk_where_they_have_a_file(spin, tmp_path):
    def run():
        assert not compiled(spin)(np.zeros(1, np.int64), np.zeros(8, np.int64), 1)
        return {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nb?")}

    first = run()
    assert run() == first
    assert bool(first) == Path(spin.__code__.co_filename).exists()
