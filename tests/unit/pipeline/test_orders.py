# SPDX-License-Identifier: Apache-2.0
"""Interleaved, ZB-H1 and ZBV: PyTorch's own orders, and idle times in closed form."""

from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as stock

from support.refusals import refuses
from wavemare.errors import PlanError
from wavemare.pipeline.clock.clock import execute
from wavemare.pipeline.plan.check import check
from wavemare.pipeline.plan.files import parse_csv, to_csv
from wavemare.pipeline.plan.lowering import lower
from wavemare.pipeline.plan.orders import interleaved, one_f_one_b, zb_h1, zbv
from wavemare.pipeline.plan.plan import COMPUTE, Kind, Plan

STOCK = {
    interleaved: stock.ScheduleInterleaved1F1B,
    zb_h1: stock.ScheduleInterleavedZeroBubble,
    zbv: stock.ScheduleZBVZeroBubble,
}


def stock_csv(make, num_ranks, micro_batches, chunks, file):
    """Return what torch dumps of its schedule, without its idle ticks."""
    stages = [
        SimpleNamespace(
            num_stages=num_ranks * chunks,
            group_size=num_ranks,
            group_rank=0,
            stage_index=chunk * num_ranks,
            is_first=chunk == 0,
            is_last=False,
            has_backward=True,
            submod=None,
        )
        for chunk in range(chunks)
    ]
    schedule = STOCK[make](stages, micro_batches, loss_fn=lambda *_: None)
    schedule._dump_csv(file, format="compute_only")
    lines = file.read_text().splitlines()
    return "".join(",".join(filter(None, line.split(","))) + "\n" for line in lines)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("times", [1, 2, 4])
@pytest.mark.parametrize("make", STOCK)
def test_the_order_is_torchs(make, times, num_ranks, tmp_path):
    file = tmp_path / "torch.csv"
    micro_batches = times * num_ranks
    expected = stock_csv(make, num_ranks, micro_batches, 1 if make is zb_h1 else 2, file)
    plan = make(num_ranks, micro_batches)
    assert to_csv(plan) == expected
    # Its file, with its idle ticks, gives the whole plan.
    assert lower(parse_csv(file.read_text(), plan.schedule)) == plan


def idle(plan, forward, backward, weight, latency=0, send_slots=None):
    """Return the time beyond the work of one rank, exactly; times are those of a rank."""
    chunks = plan.num_stages // len(plan.ranks)
    lengths = {Kind.FORWARD: forward, Kind.BACKWARD: backward + weight}
    lengths |= {Kind.BACKWARD_INPUT: backward, Kind.BACKWARD_WEIGHT: weight}
    if send_slots is not None:
        plan = replace(plan, send_slots=send_slots)
    times = execute(
        plan, lambda kind, _: Fraction(lengths.get(kind, 0)) / chunks, lambda _: Fraction(latency)
    )
    work = plan.micro_batches * plan.num_steps * (forward + backward + weight)
    return max(rank[-1] for rank in times) - work


TIMES = [(1, 1, 1), (1, Fraction(13, 10), Fraction(7, 10)), (2, 1, 1), (1, 2, 1)]
# By (ranks, micro-batches): for 1F1B, interleaved, ZB-H1 and ZBV the idle time over F + B + W to
# two digits, and the peak in micro-batches of a whole rank, for equal passes.
TABLE = {
    (2, 2): ("1.00 2", "0.50 2", "0.33 2", "0.33 2"),
    (2, 8): ("1.00 2", "0.50 2.5", "0.33 2", "0.17 2"),
    (4, 4): ("3.00 4", "1.50 4", "1.00 4", "1.00 4"),
    (4, 8): ("3.00 4", "1.50 5.5", "1.00 4", "0.50 4"),
    (8, 8): ("7.00 8", "3.50 8", "2.33 8", "2.33 8"),
    (8, 16): ("7.00 8", "3.50 11.5", "2.33 8", "1.17 8"),
}


@pytest.mark.parametrize("sizes", TABLE)
def test_idle_time_and_memory_are_those_of_the_table(sizes):
    for make, expected in zip([one_f_one_b, interleaved, zb_h1, zbv], TABLE[sizes], strict=True):
        plan = make(*sizes)
        report = check(plan)
        # The plan's own slots make no send wait.
        assert f"{float(idle(plan, 1, 1, 1) / 3):.2f} {max(peaks(report)):g}" == expected
        assert idle(plan, 1, 1, 1) == idle(plan, 1, 1, 1, send_slots=plan.send_slots and 999)


def peaks(report):
    return report.peak_memory or report.peak_activations


@pytest.mark.parametrize("times", TIMES)
def test_idle_time_in_closed_form(times):
    forward, backward, weight = times
    whole = sum(times)
    for num_ranks in range(1, 9):
        hops = num_ranks - 1
        for micro_batches in sorted(
            {num_ranks, num_ranks + 1, *(n * num_ranks for n in (2, 3, 4))}
        ):
            sizes = num_ranks, micro_batches
            assert idle(one_f_one_b(*sizes), *times) == hops * whole
            assert idle(zb_h1(*sizes), *times) == hops * (forward + backward - weight)
            if micro_batches >= 2 * num_ranks and backward >= forward:
                assert idle(zbv(*sizes), *times) == hops * Fraction(backward) / 2
            for chunks in (2, 3) if micro_batches % num_ranks == 0 else ():
                plan = interleaved(*sizes, chunks=chunks)
                assert idle(plan, *times) == Fraction(hops * whole, chunks)


def test_each_step_begins_with_an_empty_pipeline_and_waits_for_all_norms():
    for make in STOCK:
        one, three = make(4, 8), make(4, 8, 3)
        assert check(three).staleness == ((0,) * 24,) * three.num_stages
        assert idle(three, 1, 1, 1) == 3 * idle(one, 1, 1, 1)
        text = str(one)
        assert Plan.parse(text) == one
        assert ("homes=" in text) == (make is not zb_h1)


@pytest.mark.parametrize("make", STOCK)
def test_small_pipelines_are_sound(make):
    for num_ranks in range(1, 5):
        for micro_batches in range(1, 5):
            if make is interleaved and micro_batches % num_ranks:
                continue
            plan = make(num_ranks, micro_batches, 2)
            report = check(plan)
            # The turn of the V is local, and where rank 0 has both ends it loads once for both.
            boundaries = plan.num_stages - 1 - (make is zbv) if num_ranks > 1 else 0
            kinds = (Kind.SEND_ACTIVATION, Kind.SEND_GRAD) if boundaries else ()
            assert report.messages == dict.fromkeys(kinds, 2 * micro_batches * boundaries)
            loads = {a.stage for rank in plan.ranks for a in rank if a.kind is Kind.LOAD}
            alone = make is zbv or num_ranks == 1
            assert loads == {0} | (set() if alone else {plan.num_stages - 1})


def test_what_interleaved_cannot_do_is_refused():
    with refuses(PlanError, "micro_batches", 6):
        interleaved(4, 6)
    with refuses(PlanError, "chunks", 0):
        interleaved(4, 8, chunks=0)


def test_passes_alone_are_completed():
    plan = zbv(3, 7, 2)
    passes = tuple(
        tuple(a._replace(version=-1) for a in rank if a.kind in COMPUTE) for rank in plan.ranks
    )
    assert lower(replace(plan, ranks=passes, send_slots=0)) == plan
    # Of their own each rank has what its step needs, once, as its first stage.
    for rank, actions in enumerate(plan.ranks):
        once = [str(a) for a in actions if a.kind in {Kind.REDUCE, Kind.NORM, Kind.STEP}]
        assert once == [f"{rank}{k}{m}@{m // 7}" for m in (6, 13) for k in "RNS"]
    # One slot fewer than the plan's is the fewest with which it ends.
    check(replace(plan, send_slots=2))
    assert plan.send_slots == 3
    with refuses(PlanError, "plan", "zbv"):
        check(replace(plan, send_slots=1))
