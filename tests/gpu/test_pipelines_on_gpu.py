# SPDX-License-Identifier: Apache-2.0
"""Pipelines of two stages train over NCCL, with activations of a real size."""

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs an NVIDIA GPU (make test-gpu)"
)

SCHEDULES = ["1f1b", "zb-h1", "pipemare"]


def test_every_schedule_trains_a_gpt(launch):
    finished = launch("pipelines_on_gpu.py", *SCHEDULES, timeout=280, accelerator="cuda").check()
    for rank in range(2):
        found = finished.result(rank)
        print(rank, found)
        assert found["zb-h1"] == pytest.approx(found["1f1b"], rel=1e-3)
        assert all(losses[-1] < losses[0] for losses in found.values())
