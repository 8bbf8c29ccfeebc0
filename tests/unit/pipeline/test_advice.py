# SPDX-License-Identifier: Apache-2.0
"""What a pipeline is told of its staleness at its start."""

import pytest

from wavemare.pipeline.advice import bounding_micro_batches, largest_staleness, staleness_warning
from wavemare.pipeline.staleness import max_staleness


@pytest.mark.parametrize("slack", [0, 1])
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_the_bound_is_the_fewest_micro_batches_that_keep_staleness_at_one(stages, slack):
    enough = bounding_micro_batches(stages, slack)
    for micro_batches in range(1, 20):
        stale = [max_staleness(s, stages, micro_batches, slack) for s in range(stages)]
        assert (max(stale) <= 1) == (micro_batches >= enough)
        assert largest_staleness(stages, micro_batches, slack)[0] == max(stale)
        assert (staleness_warning(stages, micro_batches, slack) is None) == (max(stale) <= 1)


def test_the_warning_has_the_numbers():
    warning = staleness_warning(8, 2)
    assert "2 micro-batches" in warning
    assert "8 stages" in warning
    assert "up to 4 steps old (3.50 in the mean)" in warning
    assert "with 7 or more" in warning
