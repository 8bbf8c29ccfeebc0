# SPDX-License-Identifier: Apache-2.0
"""Masks of all ranks hold what was packed, little-endian in each byte."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from wavemare.comm.masks import Masks, mask_bytes

TABLES = st.integers(0, 40).flatmap(
    lambda blocks: st.lists(st.lists(st.booleans(), min_size=blocks, max_size=blocks), min_size=1)
)


@given(table=TABLES)
def test_masks_hold_what_was_packed(table):
    masks = Masks.of(np.array(table, dtype=bool).reshape(len(table), -1))
    blocks = len(table[0])
    union = [j for j in range(blocks) if any(row[j] for row in table)]
    assert (masks.num_ranks, masks.num_blocks) == (len(table), blocks)
    assert masks.matrix.tolist() == table
    assert masks.counts.tolist() == [sum(row) for row in table]
    assert masks.union.tolist() == union
    assert masks.union_size == len(union)
    for rank, row in enumerate(table):
        assert masks.of_rank(rank).tolist() == [j for j in range(blocks) if row[j]]
        backwards = np.arange(blocks)[::-1]
        assert masks.holds(backwards, slice(rank, None)).tolist() == [r[::-1] for r in table[rank:]]


@given(table=TABLES)
def test_bits_are_little_endian(table):
    masks = Masks.of(np.array(table, dtype=bool).reshape(len(table), -1))
    assert masks.bits.shape == (len(table), mask_bytes(len(table[0])))
    for row, packed in zip(table, masks.bits.tolist(), strict=True):
        number = sum(byte << 8 * place for place, byte in enumerate(packed))
        assert number == sum(1 << place for place, bit in enumerate(row) if bit)
