# SPDX-License-Identifier: Apache-2.0
"""Front ends, layouts, models and data: as transformers and peft in one process, or refused.

CI takes two front ends of each layout, with a seeded model and data; the nightly tests take all.
"""

import random

import pytest
import torch

from front_end_cells import (
    CELLS,
    FRONT_ENDS,
    LAYOUTS,
    is_local,
    ranks_of,
    refusal_of,
    replicas_of,
    twin_of,
)

pytestmark = pytest.mark.timeout(1800)  # two programs, one after the other
CELLS_AT_ONCE = 20  # of all ranks
GROUPS = (
    ("ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3", "waves", "local steps"),
    ("1f1b", "zbv", "pipemare"),
    ("experts", "tensor parallelism", "tensor parallelism and experts"),
    ("local steps of zbv", "local steps of split layers"),
)


def sample():
    """Two cells of each layout; each front end is in half of the layouts. One of routers' loss."""
    draw = random.Random(1)
    for number, layout in enumerate(LAYOUTS):
        for front in (FRONT_ENDS[number % 4], FRONT_ENDS[(number + 1) % 4]):
            yield draw.choice([cell for cell in CELLS if cell.startswith(f"{front}/{layout}/")])
    yield "trainer/experts/LoRA/auxiliary"  # which transformers multiplies by the replicas


SAMPLE = sorted(sample(), key=CELLS.index)


def tensors_of(finished, cell):
    return torch.load(finished.folder / f"{cell.replace('/', '-')}.pt", weights_only=True)


def check(cell, ranks, found, twin, expected):
    """Compare a cell with its twin: logs, predictions, saved weights, and the resumed run."""
    front, layout, _, data = cell.split("/")
    # A routers' loss is of the rows of one replica, and so may be a loss of one's own.
    own = data in ("own loss", "auxiliary")
    by_two = front in ("trainer", "patch") and replicas_of(layout) == 2 and not own
    for rank in ranks:
        evaluated = twin["evaluated by two" if by_two else "evaluated"]
        wanted = {**twin, "evaluated": evaluated, "predicted": evaluated}
        names = {"loss", "grad_norm", "eval_loss", "evaluated", "predicted"} & rank.keys()
        # Between exchanges each replica has its own norm.
        for name in names - ({"grad_norm"} if is_local(layout) else set()):
            assert rank[name] == pytest.approx(wanted[name], rel=1e-4), name
        if "learning_rate" in twin:
            assert rank["learning_rate"] == pytest.approx(twin["learning_rate"])
        assert rank.get("labels") == twin.get("labels")
        assert rank["resumed"] is True
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=2e-5, msg=name)


@pytest.fixture
def train(launch, tmp_path):
    """Train cells, all on as many ranks, and their twins in one process."""

    def run(cells):
        program, failed = "front_ends.py", {}
        twins = sorted({twin_of(cell) for cell in cells if refusal_of(cell) is None})
        for folder in ("alone", "ranks"):
            (tmp_path / folder).mkdir()
        alone, expected = None, {}
        if twins:
            alone = launch(program, *twins, ranks=1, folder=tmp_path / "alone").check()
            expected = alone.result(0)
        (count,) = {ranks_of(cell.split("/")[1]) for cell in cells}
        ranks = [{} for _ in range(count)]
        # The groups of a cell stay until its program ends, each with a thread that wakes up often.
        at_once = CELLS_AT_ONCE // count
        for start in range(0, len(cells), at_once):
            some = cells[start : start + at_once]
            shared = launch(program, *some, ranks=count, folder=tmp_path / "ranks").check()
            for rank, results in enumerate(ranks):
                results.update(shared.result(rank))
        for cell in cells:
            try:
                refusal = refusal_of(cell)
                results = [rank[cell] for rank in ranks]
                if refusal is not None:
                    assert all(r.get("refused", "").startswith(refusal) for r in results)
                    continue
                told = {result["refused"] for result in results if "refused" in result}
                assert not told
                twin = twin_of(cell)
                check(
                    cell, results, tensors_of(shared, cell), expected[twin], tensors_of(alone, twin)
                )
            except AssertionError as error:
                failed[cell] = str(error)
        assert not failed, "\n\n".join(f"{cell}: {text[:700]}" for cell, text in failed.items())

    return run


@pytest.mark.world_size(4)
@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_a_sample_of_all_cells(train, group):
    train([cell for cell in SAMPLE if cell.split("/")[1] in GROUPS[group]])


@pytest.mark.nightly
@pytest.mark.world_size(4)
@pytest.mark.parametrize("front", ["trainer", "patch", "loop", "accelerate"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_cells_of_a_layout(train, layout, front):
    train([cell for cell in CELLS if cell.startswith(f"{front}/{layout}/")])
