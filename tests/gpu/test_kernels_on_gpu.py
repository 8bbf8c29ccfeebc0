# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels on a real GPU against slow twins: the cases of the interpreter's test."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs an NVIDIA GPU (make test-gpu)"
)

UNIT_TESTS = Path(__file__).parents[1] / "unit"
PROGRAM = UNIT_TESTS / "comm" / "kernels" / "programs" / "triton_cases.py"


@pytest.mark.timeout(1200)
def test_kernels_are_bit_exact_on_the_gpu(tmp_path):
    result = tmp_path / "result.json"
    command = [sys.executable, str(PROGRAM), str(result)]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    subprocess.run(command, env=environment, check=True, timeout=1200)
    results = json.loads(result.read_text())
    assert {check: found["failures"] for check, found in results.items() if found["failures"]} == {}
    assert sum(found["cases"] for found in results.values()) > 500
    # The mask of so many takes too long in the interpreter.
    assert results["more_than_two_to_the_31_elements"]["cases"] == 4
