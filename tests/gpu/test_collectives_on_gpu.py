# SPDX-License-Identifier: Apache-2.0
"""Two ranks on one GPU over gloo, and over NCCL on one each, give the bits of the host."""

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs an NVIDIA GPU (make test-gpu)"
)

MODES = ["ordered", "pushpull", "allgather"]


@pytest.mark.world_size(2)
def test_sums_on_the_device_are_those_of_the_host(launch):
    finished = launch("sparse_gpu.py", *MODES, timeout=280).check()
    for rank in range(2):
        result = finished.result(rank)
        assert len(result["exact"]) == 3 * len(MODES)
        assert all(result["exact"].values()), result["exact"]
    for name, measured in finished.result(0)["speed"].items():
        phases = {key: round(1000 * value, 2) for key, value in measured["phases_s"].items()}
        print(f"{name:>16}: {1000 * measured['seconds']:8.2f} ms  {phases}")


def test_sums_over_nccl_are_those_in_rank_order(launch):
    # NCCL refuses two ranks on one GPU: with a single one a rank talks to itself.
    ranks = min(torch.cuda.device_count(), 2)
    finished = launch("sparse_nccl.py", *MODES, ranks=ranks, timeout=280).check()
    for rank in range(ranks):
        exact = finished.result(rank)["exact"]
        assert len(exact) == 2 * len(MODES)
        assert all(exact.values()), exact
    for name, spent in finished.result(0)["speed"].items():
        print(f"{name:>16}: {1000 * spent:8.2f} ms for 100 MiB on {ranks} ranks")
