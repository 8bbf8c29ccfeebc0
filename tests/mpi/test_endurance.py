# SPDX-License-Identifier: Apache-2.0
"""Long runs and large messages."""

import psutil
import pytest

pytestmark = pytest.mark.nightly
every_kind = pytest.mark.parametrize("kind", ["mpi", "torch"])


@pytest.mark.world_size(3)
@every_kind
def test_a_mixed_soak_leaks_nothing(prove, kind):
    prove(kind, "3", "soak", ranks=3)


@pytest.mark.world_size(2)
@every_kind
def test_messages_of_more_than_two_gibibytes(prove, kind):
    if psutil.virtual_memory().available < 12 << 30:
        pytest.skip("needs 12 GiB of free memory")
    prove(kind, "2", "side_by_side.large_message", ranks=2)
