# SPDX-License-Identifier: Apache-2.0
"""Every schedule and layout with every feature: equal to one process, or refused with its reason.

CI takes a third of the cells, the nightly tests all.
"""

import random

import pytest

from schedule_features import CELLS, REFUSED, ROWS

SAMPLE = sorted(random.Random(1).sample(CELLS, len(CELLS) // 3), key=CELLS.index)
PARTS = 4


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
        finished = launch("schedule_features.py", *cells, ranks=4, timeout=280).check()
        check([finished.result(rank) for rank in range(4)])

    return run


@pytest.mark.world_size(4)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_third_of_all_cells(train, part):
    train(SAMPLE[part::PARTS])


@pytest.mark.nightly
@pytest.mark.world_size(4)
@pytest.mark.parametrize("schedule", ROWS)
def test_all_cells_of_a_schedule(train, schedule):
    train([cell for cell in CELLS if cell.startswith(f"{schedule}/")])
