# SPDX-License-Identifier: Apache-2.0
"""How fast Triton's kernels are, against the device's own copy of as many bytes.

``pytest -s tests/gpu/test_kernel_bandwidth.py`` prints the table.
"""

import pytest
import torch

from benchmarks.gpu.kernels import measure
from benchmarks.gpu.request import GpuJob
from benchmarks.gpu.run import add_ratios
from benchmarks.gpu.timing import Scene

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU (make test-gpu)"),
]


def test_kernels_are_about_as_fast_as_the_device_copies():
    job = GpuJob(parts=("kernels",), ranks=1, backend="nccl", rounds=21, warmups=3)
    rows = list(measure(Scene(job, torch.device("cuda"), print)))
    add_ratios(rows)
    for row in rows:
        print(f"{row['case']:9} {row['system']:12} {row['gb_s']:5.0f} GB/s, {row['ratio']:.2f}")
        assert row["ratio"] >= (0.8 if row["system"].startswith("mask") else 0.6), row
