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
    command = [sys.executable, str(PROGRAM), str(result), *options]
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
