# SPDX-License-Identifier: Apache-2.0
"""The feed of a stage that reads ahead: which batch of which iterator comes next."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavemare.engine.pipe.micro_batch import Feed
from wavemare.errors import DataError


def numbered(epoch, length):
    return iter([(epoch, number) for number in range(length)])


def feed(iterator=None):
    ours = Feed(next)
    ours.use(iterator)
    return ours


def all_of(ours):
    found = []
    while True:
        try:
            found.append(ours.next())
        except StopIteration:
            return found


def test_no_iterator_at_all_is_an_error_of_the_data():
    ours = feed()
    assert not ours.goes_on
    with pytest.raises(DataError) as caught:
        ours.next()
    assert caught.value.key == "data_iter"
    ours.prefetch(3)  # reads nothing
    ours.use(numbered(0, 1))
    assert all_of(ours) == [(0, 0)]


def test_it_goes_on_until_somebody_has_seen_the_end_and_with_another_iterator():
    ours = feed(numbered(0, 1))
    assert ours.next() == (0, 0)
    assert ours.goes_on
    for _ in range(2):
        with pytest.raises(StopIteration):
            ours.next()
        assert not ours.goes_on
    ours.use(numbered(1, 1))
    assert ours.goes_on
    assert all_of(ours) == [(1, 0)]


def test_the_iterator_that_has_ended_does_not_begin_again():
    data = numbered(0, 1)
    ours = feed(data)
    assert all_of(ours) == [(0, 0)]
    ours.use(data)
    assert not ours.goes_on
    ours.use(None)
    assert not ours.goes_on


def test_it_knows_the_iterator_that_training_reads_from():
    data, other = numbered(0, 1), numbered(1, 1)
    ours = feed()
    assert not ours.serves(None)
    ours.use(data)
    assert ours.serves(data)
    assert not ours.serves(other)
    assert not ours.serves(None)
    ours.use(other)
    assert ours.serves(other)
    assert not ours.serves(data)


def test_what_is_waiting_comes_before_another_iterator():
    ours = feed(numbered(0, 5))
    ours.prefetch(2)
    ours.use(numbered(1, 1))
    assert all_of(ours) == [(0, 0), (0, 1), (1, 0)]


def test_reading_ahead_counts_what_is_waiting_and_stops_at_the_end():
    data = numbered(0, 4)
    ours = feed(data)
    ours.prefetch(2)
    ours.prefetch(1)
    ours.prefetch(2)
    assert next(data) == (0, 2)  # it took two, once
    ours.put_back([(9, 9)])
    ours.prefetch(9)
    assert not ours.goes_on
    assert all_of(ours) == [(9, 9), (0, 0), (0, 1), (0, 3)]


def test_batches_given_back_are_the_next_ones_in_their_order():
    ours = feed(numbered(0, 4))
    read = [ours.next() for _ in range(3)]
    ours.put_back(read[1:])
    ours.put_back([])
    assert all_of(ours) == [(0, 1), (0, 2), (0, 3)]


def test_what_is_dropped_is_not_read_again():
    ours = feed(numbered(0, 4))
    ours.put_back([ours.next()])
    ours.prefetch(2)
    ours.drop_waiting()
    assert all_of(ours) == [(0, 2), (0, 3)]


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=4),
    st.integers(0, 3),
    st.lists(st.sampled_from(["step", "drain", "look"]), max_size=40),
)
def test_both_ends_of_a_pipeline_meet_each_batch_once_and_stand_at_one_place(
    lengths, ahead, script
):
    """The first stage reads ahead; the last one reads as far at the end of its step.

    Between two steps the pipeline may be drained, and somebody else may take a batch from both
    iterators.
    """
    streams = deque((numbered(epoch, n), numbered(epoch, n)) for epoch, n in enumerate(lengths))
    under_way, trained, taken = deque(), [], []
    (inputs, labels), first, last = streams.popleft(), feed(), feed()
    first.use(inputs)
    last.use(labels)

    def step():
        while len(under_way) <= ahead:
            try:
                under_way.append(first.next())
            except StopIteration:
                break
        if not under_way:
            return False
        trained.append(under_way.popleft())
        assert last.next() == trained[-1]
        last.prefetch(len(under_way))
        return True

    for word in [*script, *["step"] * (sum(lengths) + len(lengths))]:
        if word == "step" and not step() and streams:
            inputs, labels = streams.popleft()
            first.use(inputs)
            last.use(labels)
        elif word == "drain":
            first.put_back(under_way)
            under_way.clear()
        elif word == "look":
            found = next(inputs, None)
            assert next(labels, None) == found
            taken += [found] if found else []
    assert trained == sorted(trained)
    everything = [(epoch, number) for epoch, n in enumerate(lengths) for number in range(n)]
    assert sorted(trained + taken) == everything
