# SPDX-License-Identifier: Apache-2.0
"""Steps that other programs disturb are told from those that they leave alone."""

import pytest

from wavemare.bench.wave.disturbance import Usage, others_share


def test_what_the_ranks_use_is_no_disturbance():
    before, after = Usage(0.0, 100.0, 0.0), Usage(2.0, 103.8, 1.8)
    assert others_share(before, after, own_s=3.6, cores=2) == pytest.approx(0.05)
    # Clocks of processes are finer than the machine's.
    assert others_share(before, after, own_s=4.0, cores=2) == 0.0
