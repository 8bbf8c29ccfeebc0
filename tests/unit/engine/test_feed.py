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


def feed():
    return Feed(next)


def test_labels_let_older_iterators_go():
    ours = feed()
    for epoch in range(3):
        ours.use(numbered(epoch, 1))
    assert ours.next_labels(2) == (1, 0)
    with pytest.raises(DataError, match="iterator 1"):
        ours.next_labels(1)
    assert ours.next_labels(3) == (2, 0)


def test_labels_that_ended_say_so():
    ours = feed()
    ours.use(numbered(0, 0))
    with pytest.raises(DataError, match="fewer micro-batches"):
        ours.next_labels(1)


def test_no_iterator_at_all_says_so():
    with pytest.raises(DataError, match="there is no iterator"):
        feed().next_inputs()


def test_dropped_batches_are_counted_and_passed_over_on_the_last_stage():
    first, last = feed(), feed()
    for stage in (first, last):
        stage.use(numbered(0, 5))
    read = [first.next_inputs() for _ in range(3)]
    assert last.next_labels(1) == (0, 0)
    first.put_back(read[1:])
    dropped = first.drop_put_back()
    assert dropped == [1, 1]
    last.skip(dropped)
    source, batch = first.next_inputs()
    assert last.next_labels(source) == batch == (0, 3)


def test_batches_read_ahead_from_several_iterators_are_passed_over_in_each():
    first, last = feed(), feed()
    stream, labels = numbered(0, 9), numbered(0, 9)
    read = []
    for _ in range(3):  # one stream in a new wrapper for each call
        first.use(item for item in stream)
        last.use(item for item in labels)
        read.append(first.next_inputs())
    source, batch = read[0]
    assert last.next_labels(source) == batch
    first.put_back(read[1:])
    dropped = first.drop_put_back()
    assert dropped == [2, 3]
    last.skip(dropped)
    source, batch = first.next_inputs()
    assert last.next_labels(source) == batch == (0, 3)


def test_the_end_is_none_and_the_data_goes_on_with_another_iterator():
    ours = feed()
    assert ours.goes_on
    ours.use(numbered(0, 1))
    assert ours.next_inputs() == (1, (0, 0))
    assert ours.goes_on  # nobody has seen the end yet
    assert ours.next_inputs() is None
    assert not ours.goes_on
    assert ours.next_inputs() is None
    ours.use(numbered(1, 1))
    assert ours.goes_on
    assert ours.next_inputs() == (2, (1, 0))
    assert ours.next_inputs() is None
    assert not ours.goes_on


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.lists(st.sampled_from(["read", "train", "use", "drain"]), max_size=60),
)
def test_a_last_stage_behind_a_drained_and_refilled_first_one_gets_every_label_once(
    lengths, script
):
    """Each batch that is trained is met by its own label, in order, with no batch lost."""
    first, last = feed(), feed()
    epochs = deque(enumerate(lengths))
    trained, under_way, expected = [], deque(), []
    given_so_far = 0

    def use():
        nonlocal given_so_far
        epoch, length = epochs.popleft()
        for stage in (first, last):
            stage.use(numbered(epoch, length))
        expected.extend((epoch, number) for number in range(length))
        given_so_far += 1

    use()
    for word in script:
        if word == "read":
            found = first.next_inputs()
            if found is not None:
                under_way.append(found)
        elif word == "train" and under_way:
            source, batch = under_way.popleft()
            assert last.next_labels(source) == batch
            trained.append(batch)
        elif word == "use" and epochs and not first.goes_on:
            use()
        elif word == "drain":
            first.put_back(list(under_way))
            under_way.clear()
    assert trained == expected[: len(trained)]
