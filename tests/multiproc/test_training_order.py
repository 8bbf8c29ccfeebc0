# SPDX-License-Identifier: Apache-2.0
"""``training_data`` is read in one order, whichever layout trains on it."""

from itertools import chain

import pytest

BATCH, STEPS, SAMPLES = 8, 4, 24


def steps_of(results):
    """Return the samples of each step, sorted: those of all replicas, of whichever rank."""
    replicas = {found["replica"]: found["seen"] for found in results if found["seen"]}
    size = BATCH // len(replicas)
    for number in range(STEPS):
        parts = [seen[number * size : (number + 1) * size] for seen in replicas.values()]
        assert all(len(part) == size for part in parts)
        yield sorted(sample for part in parts for sample in part)


def check(launch, *layouts, ranks):
    finished = launch("training_order.py", "data", *layouts, ranks=ranks).check()
    found = [finished.result(rank) for rank in range(ranks)]
    expected = list(steps_of([each["data"] for each in found]))
    assert expected[0] != list(range(BATCH))  # it shuffles
    assert sorted(chain(*expected[:3])) == list(range(SAMPLES))
    for layout in layouts:
        assert list(steps_of([each[layout] for each in found])) == expected, layout
        for each in found:
            assert each[layout]["losses"] == pytest.approx(each["data"]["losses"], rel=1e-5)
            assert each[layout]["left"] == each["data"]["left"] == 0  # processes
            # Of half as many replicas, each has twice as many micro-batches.
            assert each[layout]["length"] == 2 * each["data"]["length"]


def test_a_pipeline_trains_on_the_samples_of_the_data_parallel_engine(launch):
    check(launch, "1f1b", "pipemare", ranks=2)


@pytest.mark.nightly
@pytest.mark.world_size(4)
def test_replicas_of_a_pipeline_read_disjoint_parts(launch):
    check(launch, "1f1b", "zb-h1", "zbv", ranks=4)


def test_without_our_section_a_pipeline_reads_as_stock(launch):
    finished = launch("training_order.py", "stock").check()
    (first, *_) = steps_of([finished.result(rank)["stock"] for rank in range(2)])
    assert first == list(range(BATCH))
