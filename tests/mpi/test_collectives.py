# SPDX-License-Identifier: Apache-2.0
"""The collectives on real ranks, over MPI and torch, against sums made one element at a time."""

import psutil
import pytest

pytestmark = pytest.mark.spins

MANY = (
    "reductions",
    "reductions.chunks",
    "partitions.reduce_scatters",
    "partitions.allgathers",
    "partitions.changes",
    "rows",
    "lists",
    "lists.rows",
    "lists.strays",
    "lists.samples",
    "replicas",
    "settled.settled",
    "settled.thinned",
)
ONE = (
    *MANY,
    "side_by_side.handles",
    "side_by_side.two_communicators",
    "side_by_side.unnamed",
    "side_by_side.selection",
    "side_by_side.calibrated",
    "refusals.refusals",
    "refusals.unusual",
    "refusals.closing",
)
FOUR = (*ONE, "side_by_side.nodes", "disagreements.staging", "disagreements")


def case(kind, ranks, sizes, names):
    marks = [pytest.mark.world_size(ranks), pytest.mark.nightly]
    return pytest.param(kind, ranks, sizes, names, marks=marks)


@pytest.mark.world_size(3)
def test_a_transport_that_one_rank_tried_alone_opens_for_all(prove):
    prove("torch", "3", "side_by_side.retried", ranks=3)


@pytest.mark.world_size(4)
def test_four_ranks_sum_exactly_and_agree(prove):
    prove("mpi", "4", "reductions.few", *FOUR[1:], ranks=4)


@pytest.mark.parametrize(
    ("kind", "ranks", "sizes", "names"),
    [
        case("mpi", 4, "4", FOUR),
        case("torch", 4, "4", FOUR),
        case("mpi", 5, "1,2,3,5", MANY),
        case("torch", 3, "1,2,3", MANY),
        case("mpi", 1, "1", ONE),
        case("torch", 1, "1", ONE),
    ],
)
def test_groups_of_any_size_sum_exactly_and_agree(prove, kind, ranks, sizes, names):
    prove(kind, sizes, *names, ranks=ranks)


@pytest.mark.nightly
@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", ["mpi", "torch"])
def test_messages_of_more_than_two_gibibytes(prove, kind):
    if psutil.virtual_memory().available < 12 << 30:
        pytest.skip("needs 12 GiB of free memory")
    prove(kind, "2", "side_by_side.large_message", ranks=2)
