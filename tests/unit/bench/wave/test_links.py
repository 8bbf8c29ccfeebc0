# SPDX-License-Identifier: Apache-2.0
"""The speed of links for a share of exposed communication, how ranks get it; disturbed steps."""

import threading
from types import SimpleNamespace

import pytest

from wavemare.bench.wave.disturbance import Usage, others_share
from wavemare.bench.wave.links import (
    adjusted_mbit,
    ask_for_links,
    link_mbit,
    links_on_demand,
    sent_bytes,
)
from wavemare.errors import LaunchError

FRAMING = 1514 / 1448


def wire_s(mbit, sent):
    return sent * FRAMING * 8 / (mbit * 1e6)


def test_a_ring_sends_a_tensor_once_on_two_ranks_and_nearly_twice_on_many():
    assert sent_bytes(100.0, 2) == 100.0
    assert sent_bytes(100.0, 4) == 150.0


def test_a_speed_is_mended_for_what_messages_take_beyond_the_wire():
    sent, compute_s, overhead_s, share = 1e7, 3.0, 0.3, 0.25
    first = link_mbit(share, compute_s, sent)
    waiting_s = wire_s(first, sent) + overhead_s
    second = adjusted_mbit(first, share, sent, compute_s=compute_s, waiting_s=waiting_s)
    waiting_s = wire_s(second, sent) + overhead_s
    assert waiting_s / (compute_s + waiting_s) == pytest.approx(share)


def test_a_speed_stays_finite_where_overhead_alone_is_more_than_the_share():
    mbit = adjusted_mbit(100.0, 0.1, 1e7, compute_s=1.0, waiting_s=50.0)
    assert mbit == pytest.approx(400.0)


def test_ranks_get_the_links_they_ask_for(tmp_path):
    speeds = []
    laboratory = SimpleNamespace(shape=speeds.append)
    before = threading.active_count()
    with links_on_demand(laboratory, tmp_path):
        for mbit in (100.0, None, 12.5):
            ask_for_links(tmp_path, mbit)
            assert speeds[-1] == mbit
    assert speeds == [100.0, None, 12.5]
    assert threading.active_count() == before
    with pytest.raises(LaunchError, match="nobody has changed the links"):
        ask_for_links(tmp_path, 100.0, timeout_s=0.05)


def test_what_the_ranks_use_is_no_disturbance():
    before, after = Usage(0.0, 100.0, 0.0), Usage(2.0, 103.8, 1.8)
    assert others_share(before, after, own_s=3.6, cores=2) == pytest.approx(0.05)
    # Clocks of processes are finer than the machine's.
    assert others_share(before, after, own_s=4.0, cores=2) == 0.0
