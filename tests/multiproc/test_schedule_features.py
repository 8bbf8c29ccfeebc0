# SPDX-License-Identifier: Apache-2.0
"""Every schedule and layout with every feature: equal to one process, or refused with its reason.

CI takes each feature beside one schedule or layout and a third of the refusals, the nightly tests
take all.
"""

import pytest

from schedule_features import CELLS, FEATURES, REFUSED, ROWS

PARTS = 2


def sample():
    """One cell of each feature that is trained, and the refusals."""
    for number, feature in enumerate(FEATURES):
        cells = [cell for cell in CELLS if cell.split("/")[1] == feature]
        if trained := [cell for cell in cells if cell not in REFUSED]:
            yield trained[number % len(trained)]
    yield from list(REFUSED)[::3]


SAMPLE = sorted(sample(), key=CELLS.index)


def check(ranks):
    for cell, found in ranks[0].items():
        everywhere = [results[cell] for results in ranks]
        if cell in REFUSED:
            assert {result.get("refused") for result in everywhere} == {found.get("refused")}, cell
            assert str(found.get("refused")).startswith(REFUSED[cell]), (cell, found)
        else:
            assert found.get("equal") is True, (cell, everywhere)


@pytest.fixture
def train(launch):
    """Train cells on four ranks, and check what they gave."""

    def run(cells):
        finished = launch("schedule_features.py", *cells, ranks=4).check()
        check([finished.result(rank) for rank in range(4)])

    return run


@pytest.mark.world_size(4)
@pytest.mark.parametrize("part", range(PARTS))
def test_each_feature_beside_one_schedule(train, part):
    train(SAMPLE[part::PARTS])


@pytest.mark.nightly
@pytest.mark.world_size(4)
@pytest.mark.parametrize("schedule", ROWS)
def test_all_cells_of_a_schedule(train, schedule):
    train([cell for cell in CELLS if cell.startswith(f"{schedule}/")])
