# SPDX-License-Identifier: Apache-2.0
"""Numbers that go wrong in pipelines: who skips, who stops, and what is said."""

import json
import math
from functools import partial

import pytest

ACTIVATION, GRADIENT = "activation", "gradient"
TROUBLES = [[stage, what, 5] for stage in (0, 1) for what in (ACTIVATION, GRADIENT)]
# Of a gradient that only the first stage has the last one does not hear.
HEARD = [t for t in TROUBLES if t[:2] != [0, GRADIENT]]


def troubled(name, trouble, micro_batches=2, **settings):
    return [name, {"trouble": trouble, "micro_batches": micro_batches, **settings}]


HOMES = {"zbv": (0, 1, 1, 0), "interleaved": (0, 1, 0, 1)}
CHUNKED = [("zbv", [stage, what, 1]) for stage in range(4) for what in (ACTIVATION, GRADIENT)]
CHUNKED += [("zbv", [3, "weight", 1]), ("interleaved", [2, "weight", 1])]
REPLAYS = {
    f"{mode} {micro_batches} {trouble}": troubled("replay", trouble, micro_batches, mode=mode)
    for mode, micro_batches, trouble in [
        ("off", 1, [3, ACTIVATION, 6]),
        ("exact", 1, [1, ACTIVATION, 6]),
        ("exact", 2, [2, GRADIENT, 9]),
        ("ema", 1, [2, GRADIENT, 6]),
    ]
}
ZEROS = [{"gradient_clipping": 0.5, "zero_optimization": {"stage": zero}} for zero in (0, 1)]
CASES = {
    2: {
        **{f"skip {t}": troubled("skip", t) for t in TROUBLES},
        "skip ZeRO-1": troubled("skip", [0, GRADIENT, 5], **ZEROS[1]),
        **{f"stop 1f1b {t}": troubled("stop", t) for t in TROUBLES},
        **{f"stop split {t}": troubled("stop", t, schedule="zb-h1") for t in TROUBLES},
        **{
            f"stop {schedule} {trouble}": troubled(
                "stop", trouble, schedule=schedule, homes=HOMES[schedule]
            )
            for schedule, trouble in CHUNKED
        },
        **{f"stop pipemare {t}": troubled("stop", t, section={}) for t in HEARD},
        **{
            f"stop clipping {zero}": troubled("stop", [1, "weight", 5], section={}, **ZEROS[zero])
            for zero in (0, 1)
        },
    },
    4: REPLAYS,
}


@pytest.fixture
def found(launch_cases):
    return partial(launch_cases, "guard_pipeline.py", CASES)


def place(stage, what, call, homes=(0, 1)):
    """Where a message says that it was."""
    where = f"rank {homes[stage]} (stage {stage})"
    if what == "weight" or (stage == 0 and what == GRADIENT):
        # No gradients leave the first stage: it knows those of its weights, after the last pass.
        name = f"{4 * stage}.{'weight' if what == 'weight' else 'bias'}"
        return f"{where}: the gradient of module '{4 * stage}' (of its parameter '{name}')"
    return f"{where}, micro-batch 2: the {what} of module '{4 * stage + 2}'"


@pytest.mark.parametrize("name", [name for name in CASES[2] if name.startswith("skip")])
def test_all_stages_of_a_synchronous_pipeline_skip_the_step(found, name):
    for ours in found(name):
        assert ours["applied"] == [True, True, False, True, True, True]
        assert ours["steps"] == 6
        assert ours["same"]
    first, second = found(name)
    where = place(*CASES[2][name][1]["trouble"])
    told = f"in optimizer step 3 a number is not finite; first on {where}"
    assert [line.startswith(f"guard: step skipped: {told}") for line in first["said"]] == [True]
    assert second["said"] == []


@pytest.mark.parametrize("name", REPLAYS)
def test_an_asynchronous_pipeline_skips_as_its_replay_version_by_version(found, name):
    stage, what, call = REPLAYS[name][1]["trouble"]
    bad = call // REPLAYS[name][1]["micro_batches"]
    for rank, ours in enumerate(found(name)):
        losses, expected = ours["losses"]
        assert math.isnan(losses[bad]) == (what == ACTIVATION)
        assert losses == pytest.approx(expected, abs=1e-6, nan_ok=True)
        # A gradient is bad where it is made and before; stages after that have stepped soundly.
        skips = what == ACTIVATION or rank <= stage
        assert ours["applied"] == [not (skips and step == bad) for step in range(14)]
        assert ours["finite"]
        assert ours["distance"] < 1e-6
        named = f"the {what} of module '{4 * stage + 2}'"
        assert [named in line for line in ours["said"]] == ([rank == stage] if skips else [])


@pytest.mark.parametrize("passes", ["1f1b", "split"])
@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_synchronous_pipeline_stops_with_one_voice(found, trouble, passes):
    first, second = found(f"stop {passes} {trouble}")
    for ours in (first, second):
        # The second pass, which finds the layer, leaves nothing to a micro-batch's W.
        assert len(set(ours.pop("kept"))) == (passes == "split")
    assert first == second
    assert first["type"] == "NumericsError"
    assert first["at"] == 2
    assert first["finite"]
    assert f"first on {place(*trouble)}" in first["error"]


@pytest.mark.parametrize("name", [name for name in CASES[2] if name.split()[1] in HOMES])
def test_a_stage_among_several_of_a_rank_is_named(found, name):
    settings = CASES[2][name][1]
    first, second = found(name)
    assert first["error"] == second["error"]
    assert f"first on {place(*settings['trouble'], settings['homes'])}" in first["error"]
    assert first["type"] == "NumericsError"
    assert (first["at"], first["finite"]) == (0, True)


@pytest.mark.parametrize("trouble", HEARD)
def test_each_asynchronous_stage_stops_before_it_steps(found, trouble):
    stage, what, _ = trouble
    results = found(f"stop pipemare {trouble}")
    for rank, ours in enumerate(results):
        assert ours["type"] == "NumericsError"
        assert ours["finite"]
        assert ours["at"] == 2
        # Forward it comes to later stages, backward to the earlier ones.
        seen = what if rank >= stage else GRADIENT
        assert f"on rank {rank} (stage {rank}), micro-batch 2: the {seen}" in ours["error"]
        assert ("came from a neighbouring stage" in ours["error"]) == (rank != stage)
    assert f"of module '{4 * stage + 2}'" in results[stage]["error"]


@pytest.mark.parametrize("zero", [0, 1])
def test_clipping_tells_earlier_stages_of_a_gradient_that_leaves_no_other_trace(found, zero):
    first, second = found(f"stop clipping {zero}")
    for ours in (first, second):
        assert ours["type"] == "NumericsError"
        assert ours["at"] == 2
        assert ours["finite"]
    assert "of which it knows the norm alone" in first["error"]
    assert "the gradient of module '4' (of its parameter '4.weight')" in second["error"]


def test_a_stage_that_stops_alone_is_followed_at_once(launch):
    """The others hear of no bad number, but lose their neighbour, which has told why."""
    settings = {"trouble": [0, GRADIENT, 5], "micro_batches": 2, "section": {}, "uncaught": True}
    finished = launch("guard_pipeline.py", json.dumps({"stop": ["stop", settings]}), own=True)
    assert finished.codes == [2, 1]  # within the seconds for which `launch` waits
    assert f"first on {place(0, GRADIENT, 5)}" in finished.outputs[0]
    assert "Traceback" not in "".join(finished.outputs)
