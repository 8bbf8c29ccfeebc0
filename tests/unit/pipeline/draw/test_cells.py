# SPDX-License-Identifier: Apache-2.0
"""The text grid, against grids made by hand and a slow search for the earliest ticks."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavemare.pipeline.draw import grid
from wavemare.pipeline.draw.cells import place
from wavemare.pipeline.plan.action import COMPUTE, Kind
from wavemare.pipeline.plan.plan import Plan
from wavemare.pipeline.plan.schedules import build_plan, one_f_one_b, pipemare

SCHEDULES = st.sampled_from(["1f1b", "inference", "pipemare"])


def plan_of(*ranks):
    header = f"plan schedule=hand stages={len(ranks)} micro_batches=2 steps=1 send_slots=0\n"
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
    assert grid(pipemare(2, 1, 3), versions=True) == lines(
        """
    tick   0     1     2     3     4     5     6     7
    rank 0 F0@0  F1@0  ..    B0@0* F2@1  B1@1* ..    B2@2*
    rank 1 ..    F0@0  B0@0* F1@1  B1@1* F2@2  B2@2* ..
    """.rstrip(" ")
    )


def test_wide_plans_are_folded():
    text = grid(one_f_one_b(2, 2), width=20)
    assert text == lines(
        """
    tick   0   1   2
    rank 0 F0  F1  ..
    rank 1 ..  F0  B0

    tick   3   4   5
    rank 0 B0  ..  B1*
    rank 1 F1  B1* ..
    """.rstrip(" ")
    )


@pytest.mark.parametrize("width", [1, 20, 40, 80, 133])
def test_blocks_keep_the_width_and_lose_nothing(width):
    text = grid(pipemare(12, 3, 4), width=width, versions=True)
    assert max(map(len, text.splitlines())) <= max(width, len("rank 11 F10@10*"))
    rows = [line for line in text.splitlines() if line.startswith("rank 11 ")]
    passes = [cell for row in rows for cell in row.split()[2:] if cell != ".."]
    assert len(passes) == 2 * 12
    assert not any(line.endswith(" ") for line in text.splitlines())


def without_messages(plan):
    kept = COMPUTE | {Kind.STEP}
    return replace(
        plan, ranks=tuple(tuple(a for a in actions if a.kind in kept) for actions in plan.ranks)
    )


@pytest.mark.parametrize("plan", [one_f_one_b(3, 4, 2), pipemare(4, 2, 3, norms=True)])
def test_passes_wait_without_messages_in_the_plan_too(plan):
    assert grid(without_messages(plan)) == grid(plan)


def test_a_norm_from_the_other_end_holds_a_rank_up():
    # Rank 0 may start micro-batch 1 only when it has the norm that rank 1 sends after B0.
    text = grid(plan_of("0F0 0SA0 0RN0 0S0 0F1", "1RA0 1F0 1B0 1SN0"))
    assert text.splitlines()[1] == "rank 0 F0* ..  ..  F1"


def test_stages_are_named_where_a_rank_has_several():
    text = grid(plan_of("0F0 1F0 1B0/1 0B0 0S0"))
    assert text.splitlines()[1].split()[2:] == ["0F0", "1F0", "1B0/1", "0B0*"]


def test_steps_without_a_pass_before_them_stand_alone():
    assert grid(plan_of("0S0 0F0 0S0 0S1")).splitlines()[1] == "rank 0 S0* F0* S1*"


def test_stages_on_one_rank_take_their_step_together():
    text = grid(plan_of("0F0 1F0 1B0 0B0 0R0 1R0 0S0 1S0 0F1 1F1 1B1 0B1 0S1 1S1"))
    cells = text.splitlines()[1].split()[2:]
    assert cells == ["0F0", "1F0", "1B0", "0B0*", "0F1", "1F1", "1B1", "0B1*"]


def test_a_stuck_rank_ends_in_what_it_waits_for():
    text = grid(plan_of("0F0 0SA0 0RG0 0B0", "1RG7 1RA0 1F0"))
    assert text == "tick   0    1\nrank 0 F0   RG0?\nrank 1 RG7? .."


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
    plan = without_messages(build_plan(schedule, num_stages, micro_batches, num_steps))
    rows = place(plan)
    found = {cell.action[:3]: cell.tick for row in rows for cell in row}
    assert found == earliest(plan)
    assert sum(cell.step for row in rows for cell in row) == plan.num_steps * num_stages
    for row, actions in zip(rows, plan.ranks, strict=True):
        assert [cell.action for cell in row] == [a for a in actions if a.kind in COMPUTE]
        assert not any(cell.stuck for cell in row)
