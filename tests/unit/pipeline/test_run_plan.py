# SPDX-License-Identifier: Apache-2.0
"""The plan that is checked before a run, against what the engines take step by step."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wavemare.pipeline.action import Kind
from wavemare.pipeline.check import check
from wavemare.pipeline.config import PipelineConfig
from wavemare.pipeline.order import Stream
from wavemare.pipeline.passes import pair_passes
from wavemare.pipeline.run_plan import MOST_PASSES, run_plan
from wavemare.pipeline.schedules import drain_boundary, one_f_one_b_stage, paired_one_f_one_b_stage

some = settings(max_examples=50, deadline=None)
shapes = {"num_stages": st.integers(1, 8), "micro_batches": st.integers(1, 8)}


def asynchronous(pairs=False, **given):
    return PipelineConfig.parse(
        {"schedule": "pipemare", "pair_passes": pairs, "pipemare": dict(given)}
    )


@pytest.mark.parametrize(
    ("pairs", "stage_of"), [(False, one_f_one_b_stage), (True, paired_one_f_one_b_stage)]
)
def test_a_synchronous_run_repeats_one_step(pairs, stage_of):
    plan = run_plan(PipelineConfig(pair_passes=pairs), 4, 8, clips=False)
    assert plan.ranks == tuple(tuple(stage_of(stage, 4, 8)) for stage in range(4))


@some
@given(
    **shapes,
    pairs=st.booleans(),
    clips=st.booleans(),
    slack=st.integers(0, 2),
    warmup_steps=st.integers(0, 3),
    drain_interval=st.integers(0, 4),
    mode=st.sampled_from(["auto", "off", "exact", "predict"]),
    clipping=st.sampled_from(["global", "stage"]),
)
def test_an_asynchronous_run_is_what_the_engine_takes_window_by_window(
    num_stages, micro_batches, pairs, clips, mode, **given
):
    config = asynchronous(pairs, discrepancy_correction={"mode": mode}, **given)
    plan = run_plan(config, num_stages, micro_batches, clips=clips)
    drains = {
        "warmup_steps": min(given["warmup_steps"], 1),
        "drain_interval": given["drain_interval"],
        "last_step": plan.num_steps,
    }
    for stage, actions in enumerate(plan.ranks):
        stream = Stream(
            stage,
            num_stages,
            micro_batches,
            norms=clips and given["clipping"] == "global",
            correct=mode in ("auto", "exact"),
            slack=given["slack"],
        )
        taken = []
        for step in range(plan.num_steps):
            window = stream.window(drain_boundary(step, stream.first, micro_batches, **drains))
            taken += pair_passes(window) if pairs else window
        assert actions == tuple(taken)
    report = check(plan)
    if not given["drain_interval"]:
        whole = check(run_plan(asynchronous(**given), num_stages, micro_batches, clips=False))
        assert report.max_staleness == whole.max_staleness


def test_staleness_grows_to_its_most():
    report = check(run_plan(asynchronous(), 4, 1, clips=False))
    assert report.max_staleness == (3, 2, 1, 0)
    warmed = check(run_plan(asynchronous(warmup_steps=1000), 4, 1, clips=False))
    assert warmed.max_staleness == (3, 2, 1, 0)
    assert warmed.num_steps == report.num_steps + 1 == 5


@pytest.mark.parametrize("num_stages", [1, 2, 8, 64])
@pytest.mark.parametrize("micro_batches", [1, 64, 4096])
@pytest.mark.parametrize(
    "config", [PipelineConfig(), asynchronous(), asynchronous(slack=2, warmup_steps=10**6)]
)
def test_a_long_run_is_checked_by_its_beginning(config, num_stages, micro_batches):
    plan = run_plan(config, num_stages, micro_batches, clips=True)
    passes = [action for rank in plan.ranks for action in rank if action.kind is Kind.FORWARD]
    assert num_stages <= len(passes) <= MOST_PASSES
    if config.schedule == "pipemare" and num_stages > 1:
        assert max(check(plan).max_staleness) > 0
    else:
        check(plan)
