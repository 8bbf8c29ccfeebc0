# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from wavemare.comm.collective_queue import Handle
from wavemare.comm.masks import OwnedRange
from wavemare.engine.sparse.buckets import BucketReducer, Member, make_buckets

SIZES = {"a": (3, 2), "b": (5,), "c": (2, 2), "d": (9,)}


class Comm:
    """Doubles what it gets, as two equal ranks would, when `answer` is called."""

    size = 2

    def __init__(self):
        self.calls = []
        self.first = None  # what rank 0 sends to all

    def allgather_(self, flat, partition):
        assert list(partition) == [0, len(flat), len(flat)]
        if self.first is not None:
            flat.copy_(torch.tensor(self.first))

    def allreduce_(self, flat, *, key, blocks, async_op):
        assert async_op
        assert blocks is None
        handle = Handle()
        self.calls.append((key, flat.clone(), handle, flat, None))
        return handle

    def reduce_scatter_(self, flat, ranges, *, key, blocks, async_op):
        handle = self.allreduce_(flat, key=key, blocks=blocks, async_op=async_op)
        self.calls[-1] = (*self.calls[-1][:-1], ranges)
        return handle

    def answer(self, number):
        *_, handle, flat, _ = self.calls[number]
        flat *= 2
        handle.finish(flat, None)

    @property
    def keys(self):
        return [call[0] for call in self.calls]


@pytest.fixture
def comm():
    return Comm()


def rounds_of(comm, **settings):
    members = [
        Member(name, torch.Size(size).numel(), torch.float32) for name, size in SIZES.items()
    ]
    taken = []
    rounds = BucketReducer(
        comm,
        make_buckets(members, 4, 4 * 13),
        device=torch.device("cpu"),
        write=lambda name, reduced, here: taken.append((name, reduced.tolist(), here)),
        **settings,
    )
    assert [bucket.key for bucket in rounds.buckets] == ["d", "c to b", "a"]
    return rounds, taken


def gradient(name):
    size = SIZES[name]
    return torch.arange(1.0, 1 + torch.Size(size).numel()).view(size)


def end(rounds, comm):
    """End a round whose collectives answer as soon as they are all sent."""
    first = [number for number, call in enumerate(comm.calls) if not call[2].done()]
    for number in first:
        comm.answer(number)
    send = comm.allreduce_
    comm.allreduce_ = lambda *args, **kwargs: (send(*args, **kwargs), comm.answer(-1))[0]
    rounds.end()
    comm.allreduce_ = send


def test_buckets_leave_in_their_order_as_soon_as_they_are_complete(comm):
    rounds, _ = rounds_of(comm)
    for name, sent in (("b", []), ("a", []), ("d", ["d"]), ("c", ["d", "c to b", "a"])):
        rounds.put(name, gradient(name))
        rounds.send_complete()
        assert comm.keys == sent
    assert rounds.num_sent == 3
    assert rounds.sent("a")


@pytest.mark.parametrize(
    ("came", "first", "expected"),
    [
        ("dcba", None, ["d", "c to b", "a"]),
        ("adcb", None, ["a", "d", "c to b"]),
        ("acdb", None, ["a", "d", "c to b"]),  # a bucket is complete with its last gradient
        ("bca", None, ["c to b", "a", "d"]),  # what did not come is last
        ("dcba", [2, 0, 1], ["a", "d", "c to b"]),  # rank 0 decides
    ],
)
@pytest.mark.parametrize("keep", [True, False])
def test_buckets_leave_in_the_order_in_which_gradients_came(comm, keep, came, first, expected):
    rounds, taken = rounds_of(comm, keep=keep)
    for name in came:
        rounds.put(name, gradient(name))
    assert rounds.came == list(came)
    end(rounds, comm)
    comm.first = first
    rounds.arrange(list(came))
    comm.calls.clear()
    taken.clear()
    for name in SIZES:
        rounds.put(name, 10 * gradient(name))
    end(rounds, comm)
    assert comm.keys == expected
    assert {name: value for name, value, _ in taken} == {
        name: (20 * gradient(name)).flatten().tolist() for name in SIZES
    }


def test_what_has_come_back_is_taken_while_others_are_on_their_way(comm):
    rounds, taken = rounds_of(comm)
    for name in SIZES:
        rounds.put(name, gradient(name))
    rounds.send_complete()
    comm.answer(1)
    rounds.take_reduced()
    assert taken == []  # in the order of the buckets
    comm.answer(0)
    rounds.take_reduced()
    assert [name for name, *_ in taken] == ["d", "c", "b"]
    assert taken[1] == ("c", [2.0, 4.0, 6.0, 8.0], True)


@pytest.mark.parametrize("keep", [True, False])
def test_a_gradient_that_did_not_come_is_zero_even_after_a_round_in_which_it_did(comm, keep):
    rounds, taken = rounds_of(comm, keep=keep)
    for name in SIZES:
        rounds.put(name, gradient(name))
    end(rounds, comm)
    assert len(taken) == 4
    taken.clear()
    assert not rounds.begun
    rounds.put("b", gradient("b"))
    assert rounds.begun
    end(rounds, comm)
    assert [(name, here) for name, _, here in taken] == [
        ("d", False),
        ("c", False),
        ("b", True),
        ("a", False),
    ]
    assert not any(taken[0][1] + taken[1][1] + taken[3][1])
    assert taken[2][1] == (2 * gradient("b")).tolist()
    # Between the parameters, and where nothing came, what travels is zero.
    assert comm.calls[4][1].count_nonzero() == SIZES["b"][0]


def test_an_error_of_a_collective_ends_the_round(comm):
    rounds, _ = rounds_of(comm)
    rounds.put("d", gradient("d"))
    rounds.send_complete()
    comm.calls[0][2].finish(None, ValueError("lost"))
    with pytest.raises(ValueError, match="lost"):
        rounds.end()


def test_ranges_are_those_of_the_buckets(comm):
    ranges = {key: [OwnedRange(0, 4, 0)] for key in ("d", "c to b", "a")}
    rounds, _ = rounds_of(comm, ranges=ranges, keep=False)
    for name in SIZES:
        rounds.put(name, gradient(name))
    rounds.send_complete()
    assert comm.keys == list(ranges)
    assert all(given is ranges[key] for key, *_, given in comm.calls)


def test_a_gradient_that_fills_its_bucket_is_reduced_where_it_is(comm):
    rounds, taken = rounds_of(comm)
    alone = next(bucket.slots[0] for bucket in rounds.buckets if len(bucket.slots) == 1)
    gradient = torch.ones(SIZES[alone.name])
    rounds.put(alone.name, gradient, in_place=True)
    for name, size in SIZES.items():
        if name != alone.name:
            rounds.put(name, torch.ones(size), in_place=True)
    rounds.send_complete()
    for number in range(len(comm.calls)):
        comm.answer(number)
    rounds.end()
    assert gradient.eq(2).all()
    assert len(taken) == len(SIZES)


def test_a_sparse_gradient_leaves_in_its_turn_as_rows(comm):
    members = [
        Member("late", 8, torch.float32),
        Member("table", 6, torch.float32, embedding=True, columns=2),
        Member("early", 8, torch.float32),
    ]
    sent = []

    def allreduce_rows_(ids, rows, num_rows, *, async_op):
        assert async_op
        handle = Handle()
        comm.calls.append(("table", rows, handle, rows, None))
        sent.append((ids.tolist(), rows.tolist(), num_rows))
        handle.finish((torch.tensor([0, 2]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])), None)
        return handle

    comm.allreduce_rows_ = allreduce_rows_
    taken = {}
    rounds = BucketReducer(
        comm,
        make_buckets(members, 4, 32),
        device=torch.device("cpu"),
        write=lambda name, reduced, here: taken.update({name: (reduced.clone(), here)}),
    )
    for given in (torch.tensor([[0.0, 0.0], [5.0, 6.0], [0.0, 0.0]]).to_sparse(1), None):
        comm.calls.clear()
        rounds.put("early", torch.ones(8))
        if given is not None:
            rounds.put("table", given)
        rounds.send_complete()
        # Without a gradient the table waits for the end of the round.
        assert comm.keys == (["early"] if given is None else ["early", "table"])
        rounds.put("late", torch.ones(8))
        end(rounds, comm)
        assert comm.keys == ["early", "table", "late"]
        reduced, here = taken["table"]
        assert reduced.is_sparse
        assert reduced.is_coalesced()
        assert reduced.to_dense().tolist() == [[1, 2], [0, 0], [3, 4]]
        assert here == (given is not None)
    assert sent == [([1], [[5.0, 6.0]], 3), ([], [], 3)]
