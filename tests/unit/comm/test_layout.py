# SPDX-License-Identifier: Apache-2.0
"""Layouts against card games and lists, and messages played from all ranks' sides."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavemare.comm.executors import equal_cuts
from wavemare.comm.masks import Masks, OwnedRange, assign_owners, assign_ranges, gathered, ranges_of


@st.composite
def tables(draw, max_ranks=6, max_blocks=50):
    ranks, blocks = draw(st.integers(1, max_ranks)), draw(st.integers(0, max_blocks))
    seed, density = draw(st.integers(0, 2**32)), draw(st.sampled_from([0, 0.1, 0.5, 0.9, 1]))
    rng = np.random.default_rng(seed)
    # Some ranks are denser than others.
    return rng.random((ranks, blocks)) < density * rng.random((ranks, 1)) ** 0.2


def check_messages(layout, table):
    """Play all messages: an owner must find each rank's copy of each of its blocks."""
    ranks = len(table)
    counts = layout.push_counts()
    for owner in range(ranks):
        group = layout.blocks[layout.group(owner)].tolist()
        received = []
        for source in (*range(owner, ranks), *range(owner)):  # the owner's own blocks come first
            message = layout.pushed(source, owner).tolist()
            assert message == [block for block in group if table[source][block]]
            assert counts[source, owner] == len(message)
            received += [(source, block) for block in message]
        sources = layout.sources(owner)
        assert sources.shape == (ranks, len(group))
        for source in range(ranks):
            for column, block in enumerate(group):
                number = sources[source, column]
                if table[source][block]:
                    assert received[number] == (source, block)
                else:
                    assert number == -1


@given(table=tables())
def test_blocks_are_assigned_in_turn_sorted_by_holders(table):
    layout = assign_owners(Masks.of(table))
    ranks, blocks = table.shape
    holders = {j: sum(row[j] for row in table) for j in range(blocks)}
    cards = sorted((j for j in holders if holders[j]), key=lambda j: (holders[j], j))
    for owner in range(ranks):
        assert layout.blocks[layout.group(owner)].tolist() == sorted(cards[owner::ranks])
    check_messages(layout, table)


@given(table=tables())
def test_every_rank_gets_the_union(table):
    masks = Masks.of(table)
    layout = gathered(masks)
    assert layout.blocks.tolist() == masks.union.tolist()
    received = [(r, j) for r, row in enumerate(table) for j in np.flatnonzero(row).tolist()]
    for column, block in enumerate(layout.blocks.tolist()):
        for rank, row in enumerate(table):
            source = layout.sources(0)[rank, column]
            assert (source == -1) == (not row[block])
            assert source == -1 or received[source] == (rank, block)


@given(table=tables(max_blocks=20), block=st.integers(1, 7), data=st.data())
def test_partitions_give_an_owner_all_blocks_that_it_touches(table, block, data):
    ranks, blocks = table.shape
    numel = blocks * block
    cuts = sorted(data.draw(st.lists(st.integers(0, numel), max_size=8)))
    owners = st.integers(0, ranks - 1)
    ranges = [OwnedRange(*pair, data.draw(owners)) for pair in pairwise(cuts)]
    given = ranges_of(data.draw(st.permutations(ranges)), numel, ranks)
    layout = assign_ranges(Masks.of(table), block, given)
    for owner in range(ranks):
        elements = {i for p in ranges if p.owner == owner for i in range(p.start, p.stop)}
        touched = sorted({i // block for i in elements})
        expected = [j for j in touched if any(row[j] for row in table)]
        assert layout.blocks[layout.group(owner)].tolist() == expected
    check_messages(layout, table)


@given(table=tables(), count=st.integers(1, 9))
def test_chunks_part_each_owners_blocks(table, count):
    layout = assign_owners(Masks.of(table))
    parts = layout.chunks(count)
    assert len(parts) == count
    for owner in range(len(table)):
        joined = [j for part in parts for j in part.blocks[part.group(owner)].tolist()]
        assert joined == layout.blocks[layout.group(owner)].tolist()
        sizes = [np.diff(part.edges)[owner] for part in parts]
        assert max(sizes) - min(sizes) <= 1
    for part in parts:
        check_messages(part, table)


@pytest.mark.parametrize("density", [0.0005, 0.05])
def test_layouts_of_a_thousand_ranks_are_those_of_loops_over_ranks(density):
    ranks, blocks, block = 1024, 2000, 7
    rng = np.random.default_rng(0)
    table = rng.random((ranks, blocks)) < density * np.linspace(0, 2, ranks)[:, None]
    cuts = np.sort(rng.choice(blocks * block, 3000)).tolist()
    owners = rng.integers(ranks, size=2999).tolist()
    ranges = [OwnedRange(*pair, owner) for pair, owner in zip(pairwise(cuts), owners, strict=True)]
    masks, union = Masks.of(table), set(np.flatnonzero(table.any(axis=0)).tolist())
    touched = [set() for _ in range(ranks)]
    for owned in ranges:
        touched[owned.owner].update(i // block for i in range(owned.start, owned.stop))
    wanted = [sorted(each & union) for each in touched]
    given = ranges_of([ranges[i] for i in rng.permutation(2999)], blocks * block, ranks)
    by_ranges = assign_ranges(masks, block, given)
    assert [by_ranges.blocks[by_ranges.group(o)].tolist() for o in range(ranks)] == wanted

    for layout in (assign_owners(masks), by_ranges):
        groups = [layout.blocks[layout.group(owner)].tolist() for owner in range(ranks)]
        counts = layout.push_counts()
        for rank in range(0, ranks, 93):
            sent = [[block for block in group if table[rank, block]] for group in groups]
            assert layout.pushed(rank).tolist() == [block for part in sent for block in part]
            assert counts[rank].tolist() == [len(part) for part in sent]
            assert layout.push_counts(slice(rank, rank + 1)).tolist() == [counts[rank].tolist()]
            arriving = [sum(bool(row[block]) for block in groups[rank]) for row in table]
            assert layout.arriving_counts(rank).tolist() == arriving


@pytest.mark.parametrize("density", [0.02, 0.1])
def test_owners_of_a_skewed_table_are_balanced(density):
    ranks, blocks = 16, 20_000
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, blocks + 1) ** 1.1
    table = np.zeros((ranks, blocks), dtype=bool)
    for row in table:
        row[rng.choice(blocks, int(density * blocks), replace=False, p=weights / weights.sum())] = 1
    layout = assign_owners(Masks.of(table))
    counts = layout.push_counts()
    pushed = counts.sum(axis=0) - counts.diagonal()
    pulled = np.diff(layout.edges)
    assert pushed.max() <= 1.02 * pushed.mean()
    assert pulled.max() <= 1.02 * pulled.mean()
    # Of equal ranges the first would have several times as much.
    ranges = table.sum(axis=0).reshape(ranks, -1).sum(axis=1)
    assert ranges.max() > 3 * ranges.mean()


@given(numel=st.integers(0, 3000), block=st.integers(1, 300), ranks=st.integers(1, 9))
def test_equal_pieces_are_whole_blocks_of_about_one_size(numel, block, ranks):
    cuts = equal_cuts(numel, block, ranks)
    assert len(cuts) == ranks + 1
    assert (cuts[0], cuts[-1]) == (0, numel)
    assert all(cut % block == 0 or cut == numel for cut in cuts)
    blocks = -(-np.diff(cuts) // block)
    assert blocks.max() - blocks.min() <= 1
    assert blocks.min() >= 0
