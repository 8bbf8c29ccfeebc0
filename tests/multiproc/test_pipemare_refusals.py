# SPDX-License-Identifier: Apache-2.0
"""The asynchronous engine refuses what it cannot do, and breaks with word of where and no hang."""

import pytest

SCHEDULE = "wavemare.pipeline.schedule"
EXPECTED = {
    "tied": ("ModelError", "tied layers", "ends", "LayerSpec instead of TiedLayerSpec"),
    "line search": ("ConfigError", "optimizer", "LBFGS", "AdamW, Adam or SGD"),
    "two waves": ("ConfigError", SCHEDULE, "pipemare", "Give a PipelineModule"),
    "no pipeline": ("ConfigError", "wavemare.pipeline.stages", "2", "or give 1 stage"),
    "no stages": ("ConfigError", SCHEDULE, "pipemare", "Give a PipelineModule"),
    "model axis": ("ConfigError", SCHEDULE, "pipemare", "the axes pipe and data alone"),
}
NAMED = {"two waves": "DualPipeVModule", "no pipeline": "Linear", "no stages": "Linear"}


def test_what_cannot_work_is_refused_on_all_ranks_before_the_first_step(launch_once):
    missing = []
    for found in launch_once("pipemare_refusals.py", "refused"):
        missing.append(found.pop("no data"))
        assert found.keys() == EXPECTED.keys()
        for name, (kind, key, value, remedy) in EXPECTED.items():
            error = found[name]
            assert (error["type"], error["key"], error["value"]) == (kind, key, value), name
            assert remedy in error["remedy"], name
            assert NAMED.get(name, "") in error["reason"]
            assert error["reason"][-1] not in ".?"
    own = [error for error in missing if error["type"] == "DataError"]
    assert {(error["key"], error["remedy"]) for error in own} == {
        ("data_iter", "Give train_batch an iterator")
    }
    assert all(error in own or error["type"] == "CommError" for error in missing)


@pytest.mark.parametrize(
    ("case", "step", "action", "message"),
    [
        (
            "additional",
            1,
            "1F0@0",
            "error on rank 1: get_additional_losses = 'WithAdditionalLosses': "
            "the schedule pipemare carries one loss.",
        ),
        (
            "data",
            4,
            "1L6@3",
            "error on rank 1: data_iter = 'micro-batch 6': "
            "the last stage has fewer micro-batches than the first stage read.",
        ),
        ("loss", 3, "1F5@2", "ArithmeticError: the loss function broke down"),
    ],
)
def test_what_breaks_within_a_step_says_where_and_ends_both_ranks(
    launch, case, step, action, message
):
    done = launch("pipemare_refusals.py", case, own=True)
    assert message in done.outputs[1]
    assert (
        f"rank 1, stage 1, optimizer step {step}: in action {action} of the plan"
        in (done.outputs[1])
    )
    # The other rank waits for a gradient. It ends by itself, and has nothing to say that would hide
    # the cause.
    assert "left the step" not in done.outputs[0]
    assert "Traceback" not in done.outputs[0]
    assert done.codes == [1, 1 if case == "loss" else 2]
    assert [done.result(rank) for rank in range(2)] == [step - 1] * 2  # whole steps before it


def test_a_change_of_shape_in_static_mode_is_refused_and_not_computed_wrongly(launch):
    done = launch("pipemare_refusals.py", "shapes", own=True)
    assert "error on rank 0: activations = '[1, 8] float32': " in done.outputs[0]
    assert '"dynamic_shape": true' in done.outputs[0]
    assert "rank 0, stage 0, optimizer step 2: in action 0SA3@" in done.outputs[0]
    # With rank 0 the store has gone, in which it said that it was the first.
    assert "rank 0 left the step (ModelError: activations = '[1, 8] float32'" in done.outputs[1]
    assert "Traceback" not in done.outputs[1]
    assert done.codes == [2, 1]
    assert [done.result(rank) for rank in range(2)] == [1, 1]
