# SPDX-License-Identifier: Apache-2.0
"""Which optimizer the policy chooses, and what it says."""

import copy
import inspect
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from support.refusals import refuses
from wavemare.engine.config.resolve import WavemareConfig
from wavemare.engine.optim.policy import (
    Advice,
    Written,
    advise,
    as_written,
    check_replaceable,
)
from wavemare.errors import ConfigError
from wavemare.optim import Muon

KEY = "wavemare.pipeline.pipemare.optimizer_policy"


def config(kind="AdamW", params=None, **pipemare):
    section = {"schedule": "pipemare", "pipemare": {"optimizer_policy": "auto", **pipemare}}
    return {
        "optimizer": {"type": kind, "params": params or {"lr": 0.002, "weight_decay": 0.1}},
        "wavemare": {"pipeline": section},
    }


def choose_optimizer(values, **sizes):
    """Return the configuration, and the line that says what was chosen."""
    chosen, advice = advise(values, **sizes)
    return chosen, advice.lines[-1] if advice.choices else None


def pipemare_of(values):
    return WavemareConfig.of(values).pipeline.pipemare


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "adamw"])
@pytest.mark.parametrize("micro_batches", [4, 8])  # up to two steps, and one
def test_stale_adam_becomes_muon_at_its_rate_and_decay(kind, micro_batches):
    settings = {"lr": 0.002, "betas": [0.9, 0.95], "weight_decay": 0.1, "eps": 1e-6}
    given = config(kind, {**settings, "torch_adam": True, "set_grad_none": True})
    before = copy.deepcopy(given)
    chosen, said = choose_optimizer(given, stages=8, micro_batches=micro_batches)
    params = {**settings, "adjust_lr_fn": "match_rms_adamw"}
    assert chosen["optimizer"] == {"type": "Muon", "params": params}
    assert pipemare_of(chosen).error_feedback
    assert pipemare_of(chosen).discrepancy_correction.mode == "predict"
    assert given == before
    old = f"up to {8 // micro_batches} steps old"
    assert said.startswith(f"{KEY} auto: Muon in place of {kind}: ")
    for part in (old, "8 stages", "error_feedback is on", "discrepancy_correction is predict"):
        assert part in said


def test_what_muon_leaves_to_adamw_is_stepped_as_before():
    """Without betas of the user's they are those of DeepSpeed's Adam, not Muon's."""
    chosen, _ = choose_optimizer(config("AdamW", {"lr": 1}), stages=8, micro_batches=8)
    muon = Muon([torch.zeros(2, 2)], **chosen["optimizer"]["params"])
    adam = torch.optim.AdamW([torch.zeros(2, 2)])
    for key in ("betas", "eps"):
        assert muon.defaults[key] == adam.defaults[key]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_muon_at_adamws_rate_moves_weights_as_far(weight_decay):
    """What `match_rms_adamw` is for: the root mean square of an update is about AdamW's."""
    given = {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": weight_decay}
    chosen, _ = choose_optimizer(config("AdamW", given), stages=8, micro_batches=8)
    for shape in ((16, 16), (16, 64), (64, 16)):
        moved = []
        for make in (
            lambda p: Muon(p, **chosen["optimizer"]["params"]),
            lambda p: torch.optim.AdamW(p, **given),
        ):
            generator = torch.Generator().manual_seed(3)
            weight = torch.nn.Parameter(torch.zeros(shape))
            optimizer = make([weight])
            for _ in range(20):
                before = weight.detach().clone()
                weight.grad = torch.randn(shape, generator=generator)
                optimizer.step()
            moved.append(float((weight.detach() - before).square().mean().sqrt()))
        assert moved[0] == pytest.approx(moved[1], rel=0.4)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([0.9, 0.99], [0.95, 0.99]),
        ((0.9, 0.99), [0.95, 0.99]),
        (None, [0.95, 0.95]),
        ([0.98, 0.99], [0.98, 0.99]),
    ],
)
def test_gradients_older_than_two_steps_are_soaps_and_averaged_longer(given, kept):
    params = {"lr": 0.002, "weight_decay": 0.0}
    params |= {} if given is None else {"betas": given}
    chosen, said = choose_optimizer(config("AdamW", params), stages=8, micro_batches=2)
    assert chosen["optimizer"] == {"type": "SOAP", "params": {**params, "betas": kept}}
    assert ("beta1 is 0.95" in said) == (given != kept)
    assert pipemare_of(chosen).discrepancy_correction.mode == "auto"
    assert pipemare_of(chosen).error_feedback


def test_what_the_user_has_set_stays():
    for micro_batches, kind in ((1, "SOAP"), (8, "Muon")):
        own = {"error_feedback": False, "discrepancy_correction": {"mode": "exact"}}
        chosen, said = choose_optimizer(config(**own), stages=8, micro_batches=micro_batches)
        assert chosen["optimizer"]["type"] == kind
        assert not pipemare_of(chosen).error_feedback
        assert pipemare_of(chosen).discrepancy_correction.mode == "exact"
        assert "error_feedback" not in said
        assert "discrepancy_correction" not in said


@pytest.mark.parametrize("kind", ["Muon", "SOAP", "SGD", "NAdam"])
def test_other_optimizers_stay(kind):
    given = config(kind)
    chosen, said = choose_optimizer(given, stages=4, micro_batches=1)
    assert chosen == given
    assert f"auto: {kind}: it is the configuration's own choice" in said


@pytest.mark.parametrize(
    ("kind", "micro_batches", "mode"),
    [
        ("Muon", 8, "predict"),
        ("Muon", 4, "predict"),
        ("SOAP", 8, "predict"),
        ("SOAP", 4, "auto"),
        ("SGD", 8, "auto"),
        ("Muon", 1, "auto"),
    ],
)
def test_the_correction_is_that_of_the_optimizer_and_its_staleness(kind, micro_batches, mode):
    sizes = {"stages": 8, "micro_batches": micro_batches}
    silent, advice = advise(config(kind, optimizer_policy="keep"), **sizes)
    assert pipemare_of(silent).discrepancy_correction.mode == mode
    assert advice.choices == ()
    asked = {"optimizer_policy": "keep", "discrepancy_correction": {"mode": "auto", "decay": 0.5}}
    told, advice = advise(config(kind, **asked), **sizes)
    chosen = pipemare_of(told).discrepancy_correction
    assert (chosen.mode, chosen.decay) == (mode, 0.5)
    (choice,) = advice.choices
    assert choice.key == "wavemare.pipeline.pipemare.discrepancy_correction.mode"
    first = choice.chosen.split(", ")[0]
    assert first == {"auto": "ema" if micro_batches == 1 else "exact"}.get(mode, mode)
    # An optimizer of the caller's own is known by its class.
    own = advise(config("AdamW", optimizer_policy="keep"), **sizes, optimizer=Muon([torch.ones(1)]))
    if kind == "Muon":
        assert pipemare_of(own[0]).discrepancy_correction.mode == mode
        assert not own[1].choices


SIZES = {"stages": 8, "micro_batches": 8}
CORRECTIONS = ["off", "exact", "ema", "predict", "auto"]


@pytest.mark.parametrize("kind", ["Adam", "SOAP", "Muon"])
@pytest.mark.parametrize("correction", [*CORRECTIONS, None])
@pytest.mark.parametrize("feeds_back", [False, True, None])
@pytest.mark.parametrize("asked", [{}, {"discrepancy_correction": {"mode": "auto"}}])
def test_a_resume_goes_on_as_it_was_written(kind, correction, feeds_back, asked):
    """None is that of a synchronous run, with which the policy does as with a new one."""
    given = config("AdamW", **asked)
    found = as_written(given, Written(kind, feeds_back, correction), **SIZES)
    assert found["optimizer"]["type"] == ("AdamW" if kind == "Adam" else kind)
    asynchronous = config(found["optimizer"]["type"], optimizer_policy="keep", **asked)
    fresh = pipemare_of(advise(asynchronous, **SIZES)[0]).discrepancy_correction.mode
    mode = fresh if correction is None else correction
    assert pipemare_of(found).discrepancy_correction.mode == mode
    feedback = kind != "Adam" if feeds_back is None else feeds_back
    assert pipemare_of(found).error_feedback == feedback


@pytest.mark.parametrize("written", [Written("SOAP", True, "predict"), Written("Muon")])
def test_a_resume_keeps_what_the_user_sets(written):
    own = {"error_feedback": False, "discrepancy_correction": {"mode": "off"}}
    found = pipemare_of(as_written(config("AdamW", **own), written, **SIZES))
    assert not found.error_feedback
    assert found.discrepancy_correction.mode == "off"


def test_a_synchronous_run_gets_no_feedback_where_no_gradient_is_stale():
    found = as_written(config("AdamW"), Written("Muon"), stages=1, micro_batches=8)
    assert not pipemare_of(found).error_feedback


def test_without_staleness_nothing_changes():
    given = config()
    chosen, said = choose_optimizer(given, stages=1, micro_batches=4)
    assert chosen == given
    assert "no gradient is stale" in said


def test_keeping_stale_adam_says_what_the_policy_would_give():
    for kind in ("AdamW", "Adam"):
        values = config(kind, optimizer_policy="keep")
        kept, advice = advise(values, stages=8, micro_batches=8)
        assert (kept, advice.choices) == (values, ())
        (line,) = advice.lines
        assert f"{kind} stays" in line
        assert "Muon" in line
        assert "SOAP" in advise(values, stages=8, micro_batches=1)[1].lines[-1]
        assert advise(values, stages=1, micro_batches=8) == (values, Advice())
    for values in (config("SGD", optimizer_policy="keep"), {"optimizer": {"type": "AdamW"}}):
        assert advise(values, stages=8, micro_batches=8) == (values, Advice())


def test_the_policys_optimizers_are_not_offloaded():
    values = config()
    values["zero_optimization"] = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    with pytest.raises(ConfigError, match="offload_optimizer") as caught:
        advise(values, stages=4, micro_batches=4)
    assert caught.value.key == KEY
    values["wavemare"]["pipeline"]["pipemare"]["optimizer_policy"] = "keep"  # as it advises
    assert advise(values, stages=4, micro_batches=4)[0] == values


def test_there_must_be_an_optimizer_to_choose_for():
    values = config()
    del values["optimizer"]
    with refuses(ConfigError, "wavemare.pipeline.pipemare.optimizer_policy", "auto"):
        choose_optimizer(values, stages=4, micro_batches=4)
    ours = WavemareConfig.of(config())
    check_replaceable(ours, None)
    with refuses(ConfigError, "wavemare.pipeline.pipemare.optimizer_policy", "auto"):
        check_replaceable(ours, lambda parameters: None)


@pytest.mark.parametrize(
    ("kind", "params", "words"),
    [
        ("AdamW", {"amsgrad": True}, "amsgrad is left out"),
        ("AdamW", {"bias_correction": False}, "in spite of bias_correction"),
        ("Adam", {"adam_w_mode": False, "weight_decay": 0.1}, "weight decay is decoupled"),
        ("AdamW", {"torch_adam": True}, "weight_decay is 0.01"),
    ],
)
@pytest.mark.parametrize("micro_batches", [1, 8])
def test_what_it_changes_of_the_settings_is_said(kind, params, words, micro_batches):
    sizes = {"stages": 8, "micro_batches": micro_batches}
    changed = choose_optimizer(config(kind, {"lr": 1, **params}), **sizes)[1]
    same = {"lr": 1, "betas": [0.9, 0.95], "weight_decay": 0.1, "adam_w_mode": True}
    kept = choose_optimizer(config(kind, same), **sizes)[1]
    assert words in changed
    assert words not in kept


@pytest.mark.parametrize("betas", [0.9, [], ["0.9", "0.95"], [0.9, 2]])
def test_betas_that_are_no_pair_are_named(betas):
    with pytest.raises(ConfigError) as caught:
        choose_optimizer(config("AdamW", {"betas": betas}), stages=8, micro_batches=2)
    assert caught.value.key == "optimizer.params.betas"


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("of_torch", [True, False])
def test_a_weight_decay_that_is_not_given_is_that_of_the_replaced_optimizer(kind, mode, of_torch):
    """DeepSpeed itself makes the optimizer that would have run; its classes have the default."""
    params = {"torch_adam": of_torch, "adam_w_mode": mode}
    asked = SimpleNamespace(zero_use_cpu_optimizer=lambda: False)
    decoupled = kind == "AdamW" or mode
    made, _ = DeepSpeedEngine.get_optimizer_configuration(asked, dict(params), decoupled)
    default = inspect.signature(made).parameters["weight_decay"].default
    chosen, _ = choose_optimizer(config(kind, {"lr": 1, **params}), stages=8, micro_batches=8)
    assert chosen["optimizer"]["params"]["weight_decay"] == default
