# SPDX-License-Identifier: Apache-2.0
"""By what ranks of one model tell that they have read the same micro-batch."""

import math
from itertools import pairwise, permutations

import pytest
import torch

from support.refusals import refuses
from wavemare.engine.same_batches import (
    COMPARED_EACH,
    NONE,
    UNKNOWN,
    SameBatches,
    added,
    check,
    compare,
    digests_of,
    is_due,
)
from wavemare.errors import DataError

EMPTY = [torch.empty(0), torch.tensor([-100]), torch.full((3,), math.nan), torch.tensor([math.nan])]
SHAPES = [(2, 3), (3, 1), (64, 784), (63, 785), (4096, 3), (5000, 64), (2, 100_000)]


def of_rows(rows):
    return digests_of(rows, None, on_device=False)[0]


def bordered(shape):
    """Rows that are zero but in their middle, as pictures of digits are."""
    rows, length = shape
    generator = torch.Generator().manual_seed(1)
    found = torch.zeros(shape)
    middle = slice(length // 3, 2 * length // 3 + 1)
    found[:, middle] = torch.rand(rows, len(range(length)[middle]), generator=generator)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", SHAPES)
def test_other_rows_have_other_digests(shape, dtype):
    rows = (1000 * bordered(shape)).to(dtype)
    again = of_rows(rows.clone())
    assert again == of_rows(rows) == of_rows(rows.t().contiguous().t())
    assert 0 < again == int(again) < 2**53
    assert of_rows(rows.roll(1, 0)) not in (0, again)


def test_rows_are_found_in_whatever_a_loader_gives():
    rows = torch.arange(6).view(2, 3)
    parts = [{"b": rows, "a": rows + 1}, {"a": rows + 1, "b": rows}, [rows + 1, (rows,)]]
    assert len({of_rows(part) for part in parts}) == 1
    assert of_rows({"a": rows, "b": rows + 1}) != of_rows(parts[0])
    beside = {"name": "text", "count": 3, "rows": rows, "sparse": torch.ones(2).to_sparse()}
    assert of_rows(beside) == of_rows(rows)


@pytest.mark.parametrize(
    "part",
    [*(None, (), "text", torch.zeros(3, 2), torch.full((4,), -100), torch.zeros(1)), *EMPTY],
    ids=repr,
)
def test_placeholders_tell_nothing(part):
    assert of_rows(part) == 0
    assert digests_of(part, part, on_device=True) == NONE


def test_a_class_of_one_row_tells_something():
    assert of_rows(torch.tensor([3])) not in (0, of_rows(torch.tensor([2])))


@pytest.mark.parametrize(
    "found",
    [
        [(0, (1.0, 2.0)), (3, (1.0, 2.0))],
        [(0, (1.0, 0.0)), (3, (0.0, 2.0))],  # each has a placeholder
        [(0, (1.0, 2.0)), (3, (1.0, 7.0))],  # labels with what their loss depends on
        [(0, (1.0, 2.0)), (3, (7.0, 2.0))],  # pictures that are cut otherwise
        [(0, (1.0, 0.0)), (3, (7.0, 0.0))],
        [(0, NONE), (3, (1.0, 2.0)), (4, NONE)],
    ],
)
def test_ranks_may_differ_in_the_part_that_they_do_not_need(found):
    check(found)


def test_ranks_that_differ_in_both_parts_are_named():
    with refuses(DataError, "data_iter"):
        check([(0, (1.0, 2.0)), (3, (7.0, 8.0))])
    with pytest.raises(DataError, match="ranks 4 and 6 "):
        check([(2, NONE), (4, (1.0, 2.0)), (5, (1.0, 2.0)), (6, (7.0, 8.0))])


@pytest.mark.parametrize("others", [(7.0, 8.0, 3.0, 4.0), (1.0, 2.0, 7.0, 8.0)])
def test_a_step_is_compared_with_the_other_micro_batches_of_the_one_before(others):
    own = (1.0, 2.0, 3.0, 4.0)
    for alike in (own, UNKNOWN, (*NONE, 3.0, 4.0), (1.0, 2.0, 3.0, 9.0)):
        compare((0, own), (3, alike))
    with refuses(DataError, "data_iter"):
        compare((0, own), (3, others))


def test_digests_of_several_micro_batches_tell_their_order():
    digests = [float(number) for number in (2**48 - 1, 5, 2**47 + 3)]
    found = set()
    for order in permutations(digests):
        total = 0.0
        for digest in order:
            total = added(added(total, digest), 0.0)  # what is not known adds nothing
        assert 0 < total == int(total) < 2**53
        found.add(total)
    assert len(found) == 6


def test_what_is_kept_is_told_once():
    same = SameBatches(None)
    same.keep((1.0, 0.0))
    same.keep((2.0, 0.0))
    first, labels = same.take()
    assert (first, labels) == (added(added(0.0, 1.0), 2.0), 0.0)
    assert same.take() == NONE


class Whole:
    """Labels that say what a rank has read."""

    def __init__(self, **whole):
        self.whole = whole


@pytest.mark.parametrize("labels", [torch.arange(8), torch.zeros(8).long(), torch.tensor(0)])
def test_ranks_that_have_read_a_whole_batch_may_differ_nowhere(labels):
    ids = torch.arange(8)
    one, same, other = (
        digests_of(ids, Whole(ids=ids, labels=each), on_device=False)
        for each in (labels, labels.clone(), labels + 1)
    )
    assert one == same
    check([(0, one), (1, same)])
    with refuses(DataError, "data_iter"):
        check([(0, one), (1, other)])
    plain = [digests_of(ids, each, on_device=False) for each in (labels, labels + 1)]
    check(list(enumerate(plain)))


def test_ranks_that_wait_for_each_other_compare_within_a_bounded_number_of_passes():
    compared = [number for number in range(1, 10 * COMPARED_EACH) if is_due(number)]
    assert compared[:8] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert max(b - a for a, b in pairwise(compared)) == COMPARED_EACH
