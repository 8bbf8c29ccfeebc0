# SPDX-License-Identifier: Apache-2.0
"""The text grid, against grids made by hand and a slow search for the earliest ticks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.refusals import refuses
from wavemare.errors import PlanError
from wavemare.pipeline.draw import grid
from wavemare.pipeline.plan.orders import one_f_one_b, pipemare
from wavemare.pipeline.plan.plan import COMPUTE, Kind, Plan
from wavemare.pipeline.plan.schedules import build_plan

SCHEDULES = st.sampled_from(["1f1b", "inference", "pipemare"])


def plan_of(*ranks):
    header = f"plan schedule=hand stages={len(ranks)} micro_batches=2 steps=1 send_slots=1\n"
    return Plan.parse(header + "".join(f"{rank}: {text}\n" for rank, text in enumerate(ranks)))


def lines(text):
    """Return the golden text below without its margin."""
    return "\n".join(line.removeprefix("    ") for line in text.strip("\n").splitlines())


def test_one_f_one_b_empties_the_pipeline():
    assert grid(one_f_one_b(2, 2, 2)) == lines(
        """
    tick   0   1   2   3   4   5   6   7   8   9   10  11
    rank 0 F0  F1  ..  B0  ..  B1* F2  F3  ..  B2  ..  B3*
    rank 1 ..  F0  B0  F1  B1* ..  ..  F2  B2  F3  B3* ..
    """.rstrip(" ")
    )


def test_pipemare_never_does():
    assert grid(pipemare(2, 1, 3)) == lines(
        """
    tick   0   1   2   3   4   5   6   7
    rank 0 F0  F1  ..  B0* F2  B1* ..  B2*
    rank 1 ..  F0  B0* F1  B1* F2  B2* ..
    """.rstrip(" ")
    )


@pytest.mark.parametrize("width", [1, 20, 40, 80, 133])
def test_blocks_keep_the_width_and_lose_nothing(width):
    text = grid(pipemare(12, 3, 4), width=width)
    assert max(map(len, text.splitlines())) <= max(width, len("rank 11 B10*"))
    rows = [line for line in text.splitlines() if line.startswith("rank 11 ")]
    passes = [cell for row in rows for cell in row.split()[2:] if cell != ".."]
    assert len(passes) == 2 * 12
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_a_norm_from_the_other_end_holds_a_rank_up():
    # Rank 0 may start micro-batch 1 only when it has the norm that rank 1 sends after B0.
    text = grid(plan_of("0F0 0SA0 0RN0 0S0 0F1", "1RA0 1F0 1B0 1SN0"))
    assert text.splitlines()[1] == "rank 0 F0* ..  ..  F1"


def test_stages_are_named_where_a_rank_has_several():
    text = grid(plan_of("0F0 1F0 1B0 0B0 0S0"))
    assert text.splitlines()[1].split()[2:] == ["0F0", "1F0", "1B0", "0B0*"]


def test_a_stuck_plan_is_refused():
    with refuses(PlanError, "plan", "hand") as caught:
        grid(plan_of("0F0 0SA0 0SA1 0RG0 0B0", "1RG7 1RA0 1F0"))
    assert "rank 0: 0F0 0SA0 0SA1 <-- waits for 1RA0" in str(caught.value)


def test_ranks_without_actions():
    assert grid(plan_of("", "")) == "tick\nrank 0\nrank 1"


def earliest(plan):
    """Return the first possible tick of each pass: raise all that are too early till none is."""
    orders = [[a for a in actions if a.kind in COMPUTE] for actions in plan.ranks]
    ticks = {(a.kind, a.stage, a.micro_batch): 0 for order in orders for a in order}
    while True:
        before = dict(ticks)
        for order in orders:
            for position, (kind, stage, micro_batch, *_) in enumerate(order):
                neighbour = stage - 1 if kind is Kind.FORWARD else stage + 1
                needs = [(kind, neighbour, micro_batch)]
                if position:
                    needs.append(order[position - 1][:3])
                least = max((ticks[need] + 1 for need in needs if need in ticks), default=0)
                ticks[kind, stage, micro_batch] = max(ticks[kind, stage, micro_batch], least)
        if ticks == before:
            return ticks


@given(SCHEDULES, st.integers(1, 6), st.integers(1, 6), st.integers(1, 3))
def test_each_pass_stands_in_its_first_possible_tick(
    schedule, num_stages, micro_batches, num_steps
):
    plan = build_plan(schedule, num_stages, micro_batches, num_steps)
    _, *rows = (line.split()[1:] for line in grid(plan, width=9999).splitlines())
    found = {}
    for stage, (_, *cells) in enumerate(rows):
        for tick, cell in enumerate(cells):
            if cell != "..":
                found[Kind(cell[0]), stage, int(cell[1:].removesuffix("*"))] = tick
    assert found == earliest(plan)
    steps = sum(cell.endswith("*") for row in rows for cell in row)
    assert steps == plan.num_steps * num_stages
