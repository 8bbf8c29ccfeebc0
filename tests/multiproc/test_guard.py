# SPDX-License-Identifier: Apache-2.0
"""Numbers that go wrong in data-parallel training: steps are skipped alike, or the run says why."""

from functools import partial

import pytest

ACT = "module 'transformer.h.1.mlp.act'"
ZEROS = (0, 1, 2, 3)
WAVES = {"wavelet": {"mode": "sync"}}
CASES = {
    2: {
        **{f"zero {zero}": ["skip", {"what": "activation", "zero": zero}] for zero in ZEROS},
        **{
            f"bf16 {zero}": ["skip", {"what": "gradient", "zero": zero, "bf16": True}]
            for zero in (0, 1)
        },
        "gradient": ["skip", {"what": "gradient", "rank": 0}],
        "gradient 2": ["skip", {"what": "gradient", "zero": 2}],
        "loss": ["skip", {"what": "loss"}],
        "loss 2": ["skip", {"what": "loss", "zero": 2}],
        "own loop": ["skip", {"what": "gradient", "loop": "own_loop", "zero": 1}],
        "sparse": ["skip", {"what": "gradient", "sparse": True}],
        "sparse 2": ["skip", {"what": "gradient", "sparse": True, "zero": 2}],
        "waves": ["skip", {"what": "activation", **WAVES}],
        "exact": ["exact", {}],
        "too many": ["too_many", {}],
        **{
            f"stop {what}": ["stop", {"what": what, "zero": 1}]
            for what in ("activation", "gradient", "loss")
        },
        "stop own loss": ["stop", {"what": "gradient", "loop": "own_loss"}],
        "more": ["resized", {"counts": [2, 2, 8, 8, 8], "bad": 6}],
        "fewer": ["resized", {"counts": [8, 2, 2], "bad": 5}],
        "without steps": ["without_steps", {}],
        "once": ["stop", {"what": "activation", "times": 1}],
        "off": ["stop", {"what": "activation", "guard": {"nonfinite": "off"}}],
        "default": ["stop", {"what": "activation", "guard": {}}],
        **{f"wrong {what}": ["wrong", {"what": what}] for what in ("id", "label")},
        "wrong labels": ["wrong", {"what": "none", "pipeline": {"stages": 2}}],
    }
}
SKIPS = [name for name, (kind, _) in CASES[2].items() if kind == "skip"]


@pytest.fixture
def found(launch_cases):
    return partial(launch_cases, "guard.py", CASES)


@pytest.mark.parametrize("name", SKIPS)
def test_a_skipped_step_is_as_if_its_data_had_not_been(found, name):
    for ours in found(name):
        assert ours["applied"] == [True, True, False, True, True]
        assert ours["skipped"] == 1
        assert ours["steps"] == 5  # it counts, but not for the learning rate
        assert ours["rates"]
        assert ours["same"]


@pytest.mark.parametrize("name", SKIPS)
def test_a_skipped_step_is_told_with_rank_micro_batch_and_module(found, name):
    first, second = found(name)
    settings = CASES[2][name][1]
    what, rank = settings["what"], settings.get("rank", 1)
    module = "module 'GPT2LMHeadModel'" if what == "loss" else ACT
    assert first["said"] == [
        "guard: step skipped: in optimizer step 3 a number is not finite; first on rank "
        f"{rank}, micro-batch 2: the {what} of {module}"
    ]
    assert second["said"] == []


@pytest.mark.parametrize("what", ["activation", "gradient", "loss"])
def test_the_run_stops_on_all_ranks_before_the_step(found, what):
    first, second = found(f"stop {what}")
    assert first == second | {"same": first["same"]}
    module = "module 'GPT2LMHeadModel'" if what == "loss" else ACT
    assert "in optimizer step 3 a number is not finite" in first["error"]
    assert f"first on rank 1, micro-batch 1: the {what} of {module}" in first["error"]
    assert first["at"] == second["at"] == 2
    assert first["same"]
    assert second["same"]


@pytest.mark.parametrize(("name", "step", "micro_batch"), [("more", 3, 3), ("fewer", 1, 6)])
def test_the_place_is_found_though_the_number_of_micro_batches_changes(
    found, name, step, micro_batch
):
    for ours in found(name):
        assert f"in optimizer step {step} a number is not finite" in ours["error"]
        assert (
            f"first on rank 1, micro-batch {micro_batch}: the activation of {ACT}" in ours["error"]
        )


def test_of_passes_without_a_step_as_many_are_kept_as_a_step_has(found):
    for ours in found("without steps"):
        assert ours["kept"] == [False] * 14 + [True] * 2


def test_a_loss_of_the_callers_own_is_beyond_a_second_pass(found):
    for ours in found("stop own loss"):
        assert "not found again in a second pass" in ours["error"]
        assert ours["same"]


def test_a_fault_of_the_machine_is_not_blamed_on_a_module(found):
    for ours in found("once"):
        assert "not found again in a second pass" in ours["error"]


def test_to_stop_is_the_default_and_off_poisons_the_weights(found):
    assert all(ours["error"] and ours["same"] for ours in found("default"))
    assert all(ours["error"] is None and not ours["finite"] for ours in found("off"))


def test_steps_are_not_skipped_for_ever(found):
    for ours in found("too many"):
        assert ours["at"] == 2
        assert (
            "wavemare.guard.max_skips = 3: 3 optimizer steps one after the other" in ours["error"]
        )


def test_a_guard_changes_no_bit(found):
    assert all(ours["same"] for ours in found("exact"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("id", ["input id = 57", "transformer.wte has 50 rows, for ids from 0 to 49", "tokenizer"]),
        ("label", ["label = 57", "the model has no output of that number"]),
        (
            "labels",
            [
                "(all labels are -100, and a mean over none",
                "Give such micro-batches labels, and resume",
            ],
        ),
    ],
)
def test_data_that_cannot_be_learned_is_named(found, name, words):
    for ours in found(f"wrong {name}"):
        assert all(word in ours["error"] for word in words), ours
        assert "learning rate" not in ours["error"]
        assert ours["code"] == 2
