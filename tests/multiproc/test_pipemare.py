# SPDX-License-Identifier: Apache-2.0
"""The asynchronous engine: what it must have in common with 1F1B, and what it must not do."""

import math
from functools import partial
from itertools import product

import pytest

from wavemare.pipeline.plan.check import check
from wavemare.pipeline.plan.orders import pipemare

SGD = {"type": "SGD", "params": {"lr": 0.1}}
ZERO = {"zero_optimization": {"stage": 1}}
BF16 = {"bf16": {"enabled": True}, **ZERO}
CLIP = 0.02
# Stage by optimizer step: each stage spoils a step of its own.
BAD = {"2": 0, "5": 1}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 0.01}}
SPOILT = {"gradient_clipping": CLIP, "scheduler": WARMUP, **BF16}
CLIPPED = {"gradient_clipping": CLIP, "optimizer": SGD}


def on(num_stages, micro_batches, **settings):
    return {"num_stages": num_stages, "micro_batches": micro_batches, **settings}


# All properties that need as many ranks run in the same processes: starting them takes longest.
CASES = {
    1: {"one stage": ["synchronous", on(1, 3, config={})]},
    2: {
        "two stages": ["synchronous", on(2, 3, config={})],
        "bf16": ["synchronous", on(2, 3, config=BF16)],
        "clipped": ["synchronous", on(2, 2, config={"gradient_clipping": 0.05, **ZERO})],
        "epochs": ["epochs", on(2, 2, config={})],
        "clipped epochs": ["epochs", on(2, 1, config=CLIPPED)],
        "slack 1 of 2": ["slack", on(2, 1, slack=1)],
        "slack 2 of 2": ["slack", on(2, 1, slack=2)],
        "wrapped 2": ["wrapped", on(2, 1)],
        "left": ["left", on(2, 2)],
        **{
            f"thawed {mode}": ["thawed", on(2, 1, mode=mode)]
            for mode in ("exact", "ema", "predict")
        },
        **{f"changed {way}": ["changed", on(2, 1, way=way)] for way in ("halved", "averaged")},
        **{
            f"overflow {guard}": ["overflow", on(2, 2, bad=BAD, guard=guard, config=SPOILT)]
            for guard in ("off", "skip")
        },
    },
    4: {
        "replicas, ZeRO-1": ["synchronous", on(2, 3, config=ZERO)],
        "ends": ["ends", on(4, 2)],
        "drains": ["drains", on(4, 2)],
        "slack 1 of 4": ["slack", on(4, 1, slack=1)],
        "wrapped 4": ["wrapped", on(4, 1)],
        "reload": ["reload", on(4, 1)],
        "half": ["half", on(4, 1)],
        "norms": ["norms", on(4, 2, config=CLIPPED, section={})],
        **{f"versions {m}": ["versions", on(4, m)] for m in (1, 2, 4)},
        "collectives 0": ["collectives", on(2, 2, config={"gradient_clipping": 0.1})],
        "collectives 1": ["collectives", on(2, 2, config={"gradient_clipping": 0.1, **ZERO})],
        "collectives zb-h1": ["collectives", on(2, 2, config={"schedule": "zb-h1"})],
        "joined 0": ["replicas", on(2, 2, config={})],
        "joined 1": ["replicas", on(2, 2, config=ZERO)],
    },
}


@pytest.fixture
def found(launch_cases):
    return partial(launch_cases, "pipemare.py", CASES)


@pytest.mark.parametrize("name", ["one stage", "two stages", "replicas, ZeRO-1", "bf16"])
def test_a_drain_at_each_step_is_1f1b_bitwise(found, name):
    for ours in found(name):
        # In half precision DeepSpeed sums the losses in bf16, and we in fp32.
        compared = slice(1, 2) if name == "bf16" else slice(0, 2)
        assert ours["drained"][compared] == ours["1f1b"][compared]
        assert ours["warmup"][compared] == ours["1f1b"][compared]


def test_clipping_in_synchronous_steps_is_that_of_the_whole_model(found):
    for ours in found("clipped"):
        losses, _ = ours["1f1b"]
        for name in ("drained", "warmup"):
            assert ours[name][0] == pytest.approx(losses, abs=1e-6)


def test_data_that_ends_within_a_step_loses_no_micro_batch(found):
    results = found("ends")
    for ours in results:
        assert len(ours["losses"]) == 4
        assert ours["samples"] == 2 * 7  # seven micro-batches of two
        assert ours["losses"] == results[0]["losses"]
        assert len(ours["epoch"]) == 3


@pytest.mark.parametrize("name", ["epochs", "clipped epochs"])
def test_a_caller_may_count_epochs_and_never_see_the_end(found, name):
    for longer, drained in found(name):
        assert longer == drained
    assert name == "epochs" or len(set(longer[0])) == 6  # by what it clips


def test_evaluation_and_saving_drain_and_a_resume_is_bitwise(found):
    for ours in found("drains"):
        first, again = ours["evaluations"]
        assert first == again
        assert ours["drained"] == [True, True]
        assert ours["resumed"] == ours["continued"]


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_versions_activations_and_copies_are_those_of_the_plan(found, micro_batches):
    num_stages, steps = 4, 12
    report = check(pipemare(num_stages, micro_batches, steps))
    results = found(f"versions {micro_batches}")
    for stage, ours in enumerate(results):
        delay = num_stages - 1 - stage
        expected = [
            step - sum(max(0, (m - delay) // micro_batches) for m in numbers) / micro_batches
            for step in range(steps)
            for numbers in [range(step * micro_batches, (step + 1) * micro_batches)]
        ]
        # The first stage hears of a later one's step with the gradients of the next.
        assert results[0]["staleness"][stage] == expected[: steps if stage == 0 else -1]
        assert report.peak_activations[stage] == num_stages - stage
        assert ours["held"] == pytest.approx(num_stages - stage, rel=0.05)


@pytest.mark.parametrize("case", ["0", "1", "zb-h1"])
def test_no_collective_leaves_a_stage(found, case):
    """But one sum for each of three steps, of which no stage waits before it goes on."""
    for rank, ours in enumerate(found(f"collectives {case}")):
        replicas = [2 * ours["stage"], 2 * ours["stage"] + 1]
        neighbours = sorted({ours["data_rank"], 2 + ours["data_rank"]})
        assert rank == 2 * ours["stage"] + ours["data_rank"]
        names = {name for name, _ in ours["called"]}
        assert "all_reduce" in names
        assert {"isend", "irecv"} <= names
        assert not names & {"send", "recv", "barrier"}
        later = [ranks for name, ranks in ours["called"] if name == "all_reduce later"]
        assert later == [neighbours] * 3
        for name, ranks in ours["called"]:
            between = name in ("isend", "irecv", "all_reduce later")
            assert ranks == (neighbours if between else replicas), name


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_replicas_of_stages_train_as_one_on_their_joined_batches(found, zero_stage):
    for ours in found(f"joined {zero_stage}"):
        assert ours["weights"] <= 2e-5
        assert ours["losses"] <= 1e-5


def test_the_clipping_norm_is_exact_for_later_stages_and_lags_for_earlier_ones(found):
    results = found("norms")
    own = [[step[0] for step in ours] for ours in results]
    most = math.ceil((len(results) - 1) / 2) + 1
    for stage, ours in enumerate(results):
        for step, (_, norm, moved) in enumerate(ours):
            later = math.fsum(norms[step] for norms in own[stage:])
            if step >= most:
                gap = norm**2 - later
                assert any(
                    gap == pytest.approx(lagging(own[:stage], step, lags), abs=1e-6 * norm**2)
                    for lags in every_lag(stage, most)
                ), (stage, step)
            coefficient = min(1.0, CLIP / (norm + 1e-6))
            assert coefficient < 1
            assert moved == pytest.approx(math.sqrt(own[stage][step]) * coefficient, rel=1e-3)


def lagging(own, step, lags):
    return math.fsum(norms[step - lag] for norms, lag in zip(own, lags, strict=True))


def every_lag(stages, most):
    if not stages:
        return [()]
    return [(lag, *rest) for lag in range(1, most + 1) for rest in every_lag(stages - 1, most)]


def test_half_precision_weights_are_the_rounded_masters_after_corrections(found):
    assert all(ours["equal"] and ours["finite"] for ours in found("half"))


@pytest.mark.parametrize("name", ["slack 1 of 2", "slack 2 of 2", "slack 1 of 4"])
def test_an_evaluation_drains_more_activations_than_a_step_has(found, name):
    for ours in found(name):
        assert ours["evaluated"] == ours["planned"]


@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_stream_may_be_wrapped_anew_for_each_step_and_no_wrapper_is_kept(found, num_stages):
    for ours in found(f"wrapped {num_stages}"):
        assert ours["wrapped"] == ours["bare"]
        assert max(ours["held"]) == 1


def test_a_step_that_did_not_end_leaves_nothing_in_flight_after_a_load(found):
    first, last = found("left")
    assert last["told"].startswith("DataError: data_iter = 'micro-batch ")
    assert first["told"].startswith("CommError: optimizer step = 3: rank 1 left the step (DataErr")
    for ours in (first, last):
        evaluated, expected = ours["evaluations"]
        assert evaluated == expected


def test_a_checkpoint_may_be_loaded_in_the_middle_of_a_run(found):
    for ours in found("reload"):
        assert ours["same"] == ours["behind"]
        assert ours["anew"] == ours["fresh"]
        assert ours["same"] != ours["fresh"]


@pytest.mark.parametrize("guard", ["off", "skip"])
def test_a_stage_that_skips_a_step_keeps_to_the_schedule_and_the_bound(found, guard):
    results = found(f"overflow {guard}")
    rates = [[rate for rate, _, _ in ours["steps"]] for ours in results]
    assert rates[0] == rates[1]
    assert len(set(rates[0])) == len(rates[0])
    for stage, ours in enumerate(results):
        skipped = [step for step, (_, applied, _) in enumerate(ours["steps"]) if not applied]
        # A guarded stage also learns from the norm what a later one has found.
        sees = [stage] if guard == "off" else range(stage, 2)
        assert skipped == [int(step) for step, bad in BAD.items() if bad in sees]
        assert ours["finite"]
        assert [kept for _, _, kept in ours["steps"]] == [[CLIP, CLIP]] * len(rates[0])


STEPS, LAYERS = 6, 2
CHECKPOINTING = ["non-reentrant", "reentrant"]
DROPOUT = [0.0, 0.2]


@pytest.mark.parametrize("num_stages", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_recomputed_activations_are_the_first_ones_where_weights_are_exact(launch_once, num_stages):
    results = launch_once("pipemare_recompute.py", num_stages, ranks=num_stages)
    for stage, ours in enumerate(results):
        staleness = num_stages - 1 - stage
        for kind, dropout in product(CHECKPOINTING, DROPOUT):
            exact, off = (ours[f"{kind} {mode} {dropout}"] for mode in ("exact", "off"))
            for found in (exact, off):
                # The last step has forwarded so many micro-batches ahead; each of the others was
                # recomputed.
                once = (STEPS + staleness) * LAYERS
                assert found["forwards"] == [once, once + STEPS * LAYERS], (stage, kind)
            assert (exact["weights"], exact["losses"]) == (0.0, 0.0), (stage, kind, dropout)
            # With the newest weights the activations are others than those that were sent on.
            assert off["losses"] > 1e-5, (stage, kind, dropout)
            assert off["weights"] > 1e-4, (stage, kind, dropout)
        for kind, mode in product(CHECKPOINTING, ("exact", "off")):
            without, dropped = (ours[f"{kind} {mode} {dropout}"]["last"] for dropout in DROPOUT)
            assert abs(without - dropped) > 1e-3  # dropout takes place


@pytest.mark.parametrize("mode", ["exact", "ema", "predict"])
def test_layers_are_frozen_and_thawed_where_the_pipeline_is_empty(found, mode):
    for ours in found(f"thawed {mode}"):
        assert ours["told"] == [True, True, False, False, True, True]
        assert ours["plain"] in ([True, True, False, False], [True, True, False])
        assert "engine.drain() on all ranks" in ours["refused"]


@pytest.mark.parametrize("way", ["halved", "averaged"])
def test_weights_that_a_caller_changes_are_predicted_from_themselves(found, way):
    first, last = found(f"changed {way}")
    (newest, _), (far, predicted) = first  # of the step's micro-batch, and of the next one's
    assert newest == 0.0
    assert predicted < 1e-6
    assert far > 1e-4
    assert [distance for distance, _ in last] == [0.0]
