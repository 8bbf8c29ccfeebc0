# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels in its interpreter, on the CPU, against slow twins."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "triton_cases.py"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("options", "fewest"), [([], 500), pytest.param(["--long"], 1500, marks=pytest.mark.nightly)]
)
def test_kernels_are_bit_exact(tmp_path, options, fewest):
    # The variable is read when triton is imported, so the cases have a process of their own.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = tmp_path / "result.json"
    command = [sys.executable, str(PROGRAM), str(result), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(result.read_text())
    assert {check: found["failures"] for check, found in results.items() if found["failures"]} == {}
    assert sum(found["cases"] for found in results.values()) > fewest
