# SPDX-License-Identifier: Apache-2.0
"""The speed of links for a share of exposed communication."""

import pytest

from benchmarks.wave.links import adjusted_mbit, link_mbit, sent_bytes

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
