# SPDX-License-Identifier: Apache-2.0
"""Headers: each field but the time makes calls differ, and the message says in what. Masks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wavemare.comm.agreement import HEADER_BYTES, Header, agree, digest_of, exchange_masks
from wavemare.comm.blocks.layout import OwnedRange
from wavemare.comm.blocks.masks import Masks, mask_bytes
from wavemare.errors import CommError

MINE = Header(7, "allreduce_", 1000, torch.float32, 256, took_ns=5, num_items=3, terms=9)


class Told:
    """A transport on which the other ranks have told something already."""

    message_device = torch.device("cpu")
    rank = 0

    def __init__(self, *others):
        self.others = others
        self.size = 1 + len(others)

    def all_gather(self, mine, table):
        table[0] = mine
        for rank, other in enumerate(self.others, 1):
            table[rank] = other


def test_a_header_has_its_size():
    assert MINE.as_tensor().nbytes == HEADER_BYTES


def test_ranks_that_agree_tell_their_times():
    others = [replace(MINE, took_ns=took).as_tensor() for took in (0, 11, 2**40)]
    assert agree(Told(*others), MINE) == [5, 0, 11, 2**40]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"number": 8}, "#8"),
        ({"operation": "allgather_"}, "allgather_"),
        ({"numel": 1001}, "1001"),
        ({"dtype": torch.bfloat16}, "bfloat16"),
        ({"block": 64}, "block 64"),
        ({"num_items": -1}, "any rows"),
        ({"num_items": 4}, "4 rows"),
        ({"terms": 10}, "key, partition, mode"),
    ],
)
def test_a_rank_that_differs_is_named(change, words):
    other = replace(MINE, took_ns=1).as_tensor()
    differing = replace(MINE, **change).as_tensor()
    with pytest.raises(CommError, match=f"rank 2 calls .*{words}"):
        agree(Told(other, differing, other), MINE)


def test_terms_differ_where_any_of_them_does():
    terms = [
        ("ordered", 0.5, [OwnedRange(0, 5, 0)]),
        ("ordered", 0.5, [OwnedRange(0, 5, 1)]),
        ("ordered", 0.25, [OwnedRange(0, 5, 0)]),
        ("pushpull", 0.5, [OwnedRange(0, 5, 0)]),
        ("ordered", 0.5, []),
    ]
    assert len({digest_of(*some) for some in terms}) == len(terms)
    assert digest_of(*terms[0]) == digest_of(*terms[0])


def test_masks_of_all_ranks():
    tables = np.array([[1, 0, 0, 1, 0, 0, 0, 0, 1], [0, 1, 0, 1, 0, 0, 0, 0, 0]], dtype=bool)
    packed = [torch.from_numpy(np.packbits(row, bitorder="little")) for row in tables]
    masks = exchange_masks(Told(packed[1]), packed[0], 9)
    assert masks.matrix.tolist() == tables.tolist()


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


@given(table=TABLES)
def test_bits_are_little_endian(table):
    masks = Masks.of(np.array(table, dtype=bool).reshape(len(table), -1))
    assert masks.bits.shape == (len(table), mask_bytes(len(table[0])))
    for row, packed in zip(table, masks.bits.tolist(), strict=True):
        number = sum(byte << 8 * place for place, byte in enumerate(packed))
        assert number == sum(1 << place for place, bit in enumerate(row) if bit)
