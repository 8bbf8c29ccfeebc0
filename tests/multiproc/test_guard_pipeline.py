# SPDX-License-Identifier: Apache-2.0
"""Numbers that go wrong in pipelines: who skips, who stops, and what is said."""

import json
import math
from functools import partial

import pytest

ACTIVATION, GRADIENT = "activation", "gradient"
TROUBLES = [[stage, what, 5] for stage in (0, 1) for what in (ACTIVATION, GRADIENT)]


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
UNCLIPPED = {"zero_optimization": {"stage": 1}}
BF16 = {"bf16": {"enabled": True}}
AT_ONCE = {
    "clipping": ZEROS[0],
    "clipping ZeRO-1": ZEROS[1],
    "ZeRO-1": UNCLIPPED,
    "bf16": BF16,
    "bf16 zb-h1": {**BF16, "schedule": "zb-h1"},
    "zbv clipping": {**ZEROS[0], "schedule": "zbv", "homes": HOMES["zbv"]},
    "zbv ZeRO-1": {**UNCLIPPED, "schedule": "zbv", "homes": HOMES["zbv"]},
}
LATER = {
    "1f1b": {},
    "zb-h1": {"schedule": "zb-h1"},
    "pipemare": {"section": {}},
    "pipemare ahead": {"section": {}, "micro_batches": 1},
    "pipemare ZeRO-1": {"section": {}, **UNCLIPPED},
    "pipemare bf16": {"section": {}, **BF16},
}
CASES = {
    2: {
        **{f"skip {t}": troubled("skip", t) for t in TROUBLES},
        "skip ZeRO-1": troubled("skip", [0, GRADIENT, 5], **ZEROS[1]),
        **{f"later {n} {t}": troubled("stop", t, **LATER[n]) for n in LATER for t in TROUBLES},
        **{
            f"stop {schedule} {trouble}": troubled(
                "stop", trouble, schedule=schedule, homes=HOMES[schedule]
            )
            for schedule, trouble in CHUNKED
        },
        **{f"at once {n}": troubled("stop", [0, GRADIENT, 5], **AT_ONCE[n]) for n in AT_ONCE},
        **{
            f"stop clipping {zero}": troubled("stop", [1, "weight", 5], section={}, **ZEROS[zero])
            for zero in (0, 1)
        },
        **{
            f"last {n}": troubled("last", [0, GRADIENT, 5], folder=n, **LATER[n])
            for n in ("1f1b", "pipemare")
        },
    },
    4: REPLAYS,
}


@pytest.fixture
def found(launch_cases):
    return partial(launch_cases, "guard_pipeline.py", CASES)


def place(stage, what, call, homes=(0, 1), micro_batches=2):
    """Where a message says that it was: at the loss, or where gradients begin to be bad."""
    last = len(homes) - 1
    if what == ACTIVATION:
        return (
            f"rank {homes[last]} (stage {last}), micro-batch {call % micro_batches + 1}: the loss"
        )
    name = f"{4 * stage}.{'weight' if what == 'weight' else 'bias'}"
    where = f"rank {homes[stage]} (stage {stage})"
    return f"{where}: the gradient of module '{4 * stage}' (of its parameter '{name}')"


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
    settings = REPLAYS[name][1]
    (stage, what, call), micro_batches = settings["trouble"], settings["micro_batches"]
    bad = call // micro_batches
    for rank, ours in enumerate(found(name)):
        losses, expected = ours["losses"]
        assert math.isnan(losses[bad]) == (what == ACTIVATION)
        assert losses == pytest.approx(expected, abs=1e-6, nan_ok=True)
        # A gradient is bad where it is made and before; stages after that have stepped soundly.
        skips = what == ACTIVATION or rank <= stage
        assert ours["applied"] == [not (skips and step == bad) for step in range(14)]
        assert ours["finite"]
        assert ours["distance"] < 1e-6
        named = f"(stage {rank}): the gradient of module '{4 * rank + 3}'"
        if what == ACTIVATION and rank == 3:
            named = f"(stage 3), micro-batch {call % micro_batches + 1}: the loss"
        elif what == GRADIENT and rank == stage:
            named = f"(stage {rank}): the gradient of module '{4 * rank}'"
        assert [named in line for line in ours["said"]] == [True] * skips


@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("trouble", TROUBLES)
def test_all_stages_stop_later_with_one_voice(found, trouble, name):
    """No stage waits for the others before it steps, and the bad one keeps its weights."""
    first, second = found(f"later {name} {trouble}")
    micro_batches = LATER[name].get("micro_batches", 2)
    bad, where = trouble[2] // micro_batches, place(*trouble, micro_batches=micro_batches)
    assert first["error"] == second["error"]
    assert first["lead"] == (micro_batches == 1)
    for ours in (first, second):
        assert ours["type"] == "NumericsError"
        assert ours["at"] == bad + 1 + first["lead"]
        assert ours["finite"]
        told = f"in optimizer step {bad + 1} a number is not finite; first on {where}"
        assert told in ours["error"]


@pytest.mark.parametrize("name", AT_ONCE)
def test_with_a_norm_of_all_stages_they_stop_at_once(found, name):
    first, second = found(f"at once {name}")
    settings = AT_ONCE[name]
    where = place(0, GRADIENT, 5, settings.get("homes") or (0, 1))
    for ours in (first, second):
        assert ours["error"] == first["error"]
        assert ours["type"] == "NumericsError"
        assert (ours["at"], ours["finite"]) == (2, True)
        assert f"in optimizer step 3 a number is not finite; first on {where}" in ours["error"]


@pytest.mark.parametrize("name", [name for name in CASES[2] if name.split()[1] in HOMES])
def test_a_stage_among_several_of_a_rank_is_named(found, name):
    settings = CASES[2][name][1]
    first, second = found(name)
    assert first["error"] == second["error"]
    assert f"first on {place(*settings['trouble'], settings['homes'])}" in first["error"]
    assert first["type"] == "NumericsError"
    assert (first["at"], first["finite"]) == (1, True)


@pytest.mark.parametrize("zero", [0, 1])
def test_clipping_tells_earlier_stages_of_a_gradient_that_leaves_no_other_trace(found, zero):
    first, second = found(f"stop clipping {zero}")
    for ours in (first, second):
        assert ours["type"] == "NumericsError"
        assert ours["at"] == 3 + ours["lead"]
        assert ours["finite"]
        assert f"first on {place(1, 'weight', 5)}" in ours["error"]


@pytest.mark.parametrize("name", ["1f1b", "pipemare"])
def test_nothing_is_saved_or_evaluated_after_a_bad_last_step(found, name):
    for ours in found(f"last {name}"):
        for told in (ours["saved"], ours["evaluated"]):
            assert told.startswith("NumericsError")
            assert (
                f"in optimizer step 3 a number is not finite; first on {place(0, GRADIENT, 5)}"
                in (told)
            )
        assert ours["there"] == ["sound"]
        assert ours["latest"] == "sound"


@pytest.mark.parametrize("name", ["1f1b", "pipemare"])
def test_a_run_goes_on_from_the_checkpoint_before_a_bad_step(found, name):
    for ours in found(f"last {name}"):
        assert ours["same"]
        assert ours["finite"]


def test_stages_that_stop_end_with_the_exit_code_of_the_error(launch):
    settings = {"trouble": [0, GRADIENT, 5], "micro_batches": 2, "section": {}, "uncaught": True}
    finished = launch("guard_pipeline.py", json.dumps({"stop": ["stop", settings]}), own=True)
    assert finished.codes == [2, 2]
    output = "".join(finished.outputs)
    assert (
        output.count(f"first on {place(0, GRADIENT, 5)}") == 1
    )  # all say the same, and one prints
    assert "Traceback" not in output
