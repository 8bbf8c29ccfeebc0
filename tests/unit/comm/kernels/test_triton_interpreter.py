# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels in its interpreter, on the CPU, against slow twins."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

PROGRAM = Path(__file__).parent / "programs" / "triton_cases.py"
QUICK = """
import runpy
import sys

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import ReduceOps


def apply(self, values, one_by_one=ReduceOps.apply_impl):
    [value] = values
    if self.combine_fn != tl.standard._or_combine:
        return one_by_one(self, values)
    assert not self.keep_dims
    words = value.handle.data
    apply.calls += 1
    found = self.to_tensor(np.bitwise_or.reduce(words, axis=self.axis), value.dtype)
    if apply.calls == 1:
        [slow] = one_by_one(self, values)
        assert (found.shape, found.dtype) == (slow.shape, slow.dtype)
        assert found.handle.data.tolist() == slow.handle.data.tolist()
    return [found]


apply.calls = 0
ReduceOps.apply_impl = apply
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Has the interpreter compute ``tl.reduce_or`` by numpy, as it does sums and maxima by itself.

Element by element it takes most of the time. The first one is computed in both ways.
"""
FEWEST_CASES = {
    "mask": 70,
    "mask_with_the_usual_tile": 2,
    "mask_of_unaligned_bucket": 20,
    "mask_of_large_and_tiny_blocks": 14,
    "mask_of_each_single_bit": 10,
    "mask_of_empty_bucket": 1,
    "gather_and_scatter": 210,
    "gather_and_scatter_of_odd_rows": 90,
    "gather_of_one_block_twice": 1,
    "reduce": 234,
    "reduce_of_odd_rows": 75,
    "reduce_of_nothing": 2,
    "reduce_known_sums": 13,
    "reduce_rounds_16_bits_to_nearest_even": 8,
    "bfloat16_of_any_float32": 5,
    "more_than_two_to_the_31_elements": 0,
    "random_buckets": 40,
}


def interpret(folder, *options):
    # The variable is read when triton is imported, so the cases have a process of their own.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = folder / "result.json"
    command = [sys.executable, "-c", QUICK, str(PROGRAM), str(result), *options]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=800
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(result.read_text())


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return interpret(tmp_path_factory.mktemp("interpreted"))


@pytest.mark.parametrize("check", FEWEST_CASES)
def test_kernels_are_bit_exact(results, check):
    assert results[check]["failures"] == []
    assert results[check]["cases"] >= FEWEST_CASES[check]


def test_no_check_is_left_out(results):
    assert results.keys() == FEWEST_CASES.keys()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_are_bit_exact_in_many_cases(tmp_path):
    results = interpret(tmp_path, "--long")
    assert {check: found["failures"] for check, found in results.items() if found["failures"]} == {}
    assert results["more_than_two_to_the_31_elements"]["cases"] == 3
    assert results["random_buckets"]["cases"] == 600
