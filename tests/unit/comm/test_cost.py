# SPDX-License-Identifier: Apache-2.0
"""The bytes of the cost model against counting, and its seconds against sums made by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavemare.comm.cost import Constants, predict, traffic
from wavemare.comm.masks import Masks, assign_owners

FREE = Constants(*(0.0,) * 9)


def random_table(ranks, blocks, density, seed=0):
    return np.random.default_rng(seed).random((ranks, blocks)) < density


@given(
    ranks=st.integers(1, 6),
    blocks=st.integers(0, 60),
    density=st.sampled_from([0, 0.05, 0.5, 1]),
    seed=st.integers(0, 999),
)
def test_bytes_are_those_that_are_counted(ranks, blocks, density, seed):
    table = random_table(ranks, blocks, density, seed)
    masks, size = Masks.of(table), 1024
    moved = traffic(masks, size)
    counts = table.sum(axis=1) * size
    union = int(table.any(axis=0).sum()) * size

    assert moved["allgather"].up == max(counts, default=0) * (ranks - 1)
    assert moved["allgather"].down == max(counts.sum() - own for own in counts)
    for name, whole in (("dense", blocks * size), ("ordered", blocks * size), ("packed", union)):
        assert moved[name].up == moved[name].down == pytest.approx(2 * (ranks - 1) / ranks * whole)

    # Of push/pull, ownership decides: the formula is its mean, and dealt blocks come near it.
    layout = assign_owners(masks)
    pushes = layout.push_counts() * size
    np.fill_diagonal(pushes, 0)
    owned = np.diff(layout.edges) * size
    up = pushes.sum(axis=1) + (ranks - 1) * owned
    down = pushes.sum(axis=0) + union - owned
    assert up.sum() == down.sum()
    slack = ranks * ranks * size  # one block more or less from each rank to each other one
    assert abs(moved["pushpull"].up - up.max(initial=0)) <= 2 * slack
    assert abs(moved["pushpull"].down - down.mean()) <= slack


def test_each_constant_counts_as_often_as_it_is_used():
    table = np.array([[1, 1, 0, 0, 1, 0, 0, 0, 0], [1, 0, 0, 1, 0, 0, 0, 0, 0]], dtype=bool)
    masks, size = Masks.of(table), 100
    whole, union, total, most = 900, 400, 500, 300
    bits = 2  # of the other rank's mask

    def seconds(**constants):
        return predict(masks, size, replace(FREE, **constants))

    names = ("dense", "ordered", "packed", "pushpull", "allgather")
    assert seconds(message_s=1.0) == dict(zip(names, (0, 2, 1, 3, 2), strict=True))
    exchanged = seconds(exchange_s=1.0)
    assert exchanged["dense"] == 0.0
    assert exchanged["ordered"] == whole
    assert exchanged["packed"] == bits
    assert exchanged["pushpull"] == bits + max(most / 2 + union / 2, total / 4 + union / 2)
    assert exchanged["allgather"] == bits + max(most, total - 200)
    assert seconds(dense_s=1.0)["dense"] == whole
    assert seconds(dense_s=1.0)["packed"] == union
    assert seconds(mask_s=1.0) == dict(zip(names, (0, 0, whole, whole, whole), strict=True))
    assert seconds(pack_s=1.0)["pushpull"] == most
    assert seconds(pack_s=1.0)["packed"] == union
    assert seconds(reduce_s=1.0)["allgather"] == total + union
    assert seconds(reduce_s=1.0)["pushpull"] == total / 2 + union / 2
    assert seconds(reduce_s=1.0)["ordered"] == whole + whole / 2
    assert seconds(unpack_s=1.0)["pushpull"] == union
    assert seconds(plan_s=1.0)["pushpull"] == 2 * 9
    assert seconds(plan_s=1.0)["ordered"] == 0
