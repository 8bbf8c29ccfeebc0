# SPDX-License-Identifier: Apache-2.0
"""Two ranks give the bits of the host, over gloo on one GPU, and over NCCL."""

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs an NVIDIA GPU (make test-gpu)"
)

MODES = ["ordered", "pushpull", "allgather"]


@pytest.mark.world_size(2)
def test_sums_on_the_device_are_those_of_the_host(launch):
    finished = launch("sparse_gpu.py", *MODES, timeout=280, accelerator="cpu").check()
    for rank in range(2):
        result = finished.result(rank)
        assert len(result["exact"]) == 3 * len(MODES)
        assert all(result["exact"].values()), result["exact"]


def test_sums_over_nccl_are_those_in_rank_order(launch):
    finished = launch("sparse_nccl.py", *MODES, timeout=280, accelerator="cuda").check()
    for rank in range(2):
        exact = finished.result(rank)["exact"]
        assert len(exact) == 2 * len(MODES)
        assert all(exact.values()), exact
