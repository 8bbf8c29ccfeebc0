# SPDX-License-Identifier: Apache-2.0
"""The path of GPUs without one, on a fake that records what the host waits for."""

import pytest

pytestmark = pytest.mark.spins


@pytest.mark.world_size(3)
@pytest.mark.parametrize("kind", ["torch", "mpi"])
def test_a_fake_gpu_gives_the_same_bits_and_the_host_hardly_waits(prove, kind):
    prove(kind, "3", "on_gpu", "on_gpu.waits", ranks=3)
