# SPDX-License-Identifier: Apache-2.0
"""Which optimizer the policy chooses, and what it says."""

import copy
import inspect
from types import SimpleNamespace

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine

from support.refusals import refuses
from wavemare.engine.config.resolve import WavemareConfig
from wavemare.engine.optim.policy import advise, check_replaceable
from wavemare.errors import ConfigError


def config(kind="AdamW", params=None, **pipemare):
    section = {"schedule": "pipemare", "pipemare": {"optimizer_policy": "auto", **pipemare}}
    return {
        "optimizer": {"type": kind, "params": params or {"lr": 0.002, "weight_decay": 0.1}},
        "wavemare": {"pipeline": section},
    }


def choose_optimizer(values, **sizes):
    """Return the configuration, and what is said besides the staleness."""
    chosen, told = advise(values, **sizes)
    return chosen, next((line for line in told if "none is older than 1" not in line), None)


def pipemare_of(values):
    return WavemareConfig.of(values).pipeline.pipemare


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "adamw"])
def test_stale_adam_becomes_soap_with_its_settings(kind):
    settings = {"lr": 0.002, "betas": [0.9, 0.95], "weight_decay": 0.1}
    given = config(kind, {**settings, "torch_adam": True, "set_grad_none": True})
    before = copy.deepcopy(given)
    chosen, said = choose_optimizer(given, stages=8, micro_batches=8)
    assert chosen["optimizer"] == {"type": "SOAP", "params": settings}
    assert pipemare_of(chosen).error_feedback
    assert pipemare_of(chosen).discrepancy_correction.mode == "predict"
    assert given == before
    for part in (f"SOAP replaces {kind}", "up to 1 steps old", "0.88", "8 stages"):
        assert part in said


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([0.9, 0.99], [0.95, 0.99]),
        ((0.9, 0.99), [0.95, 0.99]),
        (None, [0.95, 0.95]),
        ([0.98, 0.99], [0.98, 0.99]),
    ],
)
def test_gradients_older_than_a_step_are_averaged_longer(given, kept):
    params = {"lr": 0.002, "weight_decay": 0.0}
    params |= {} if given is None else {"betas": given}
    chosen, said = choose_optimizer(config("AdamW", params), stages=8, micro_batches=2)
    assert chosen["optimizer"]["params"] == {**params, "betas": kept}
    assert ("beta1 is 0.95" in said) == (given != kept)
    chosen, said = choose_optimizer(config("AdamW", params), stages=8, micro_batches=8)
    assert chosen["optimizer"]["params"] == params
    assert "beta1" not in said


def test_forward_passes_are_predicted_up_to_one_step():
    for micro_batches, mode in ((7, "predict"), (6, "auto")):
        chosen, said = choose_optimizer(config(), stages=8, micro_batches=micro_batches)
        assert pipemare_of(chosen).discrepancy_correction.mode == mode
        assert ("predicted weights" in said) == (mode == "predict")
    given = config(discrepancy_correction={"mode": "exact"})
    chosen, _ = choose_optimizer(given, stages=8, micro_batches=8)
    assert pipemare_of(chosen).discrepancy_correction.mode == "exact"


def test_what_the_user_has_set_stays():
    chosen, said = choose_optimizer(config(error_feedback=False), stages=8, micro_batches=1)
    assert chosen["optimizer"]["type"] == "SOAP"
    assert not pipemare_of(chosen).error_feedback
    assert "error_feedback is on" not in said


@pytest.mark.parametrize("kind", ["Muon", "SOAP", "SGD", "NAdam"])
def test_other_optimizers_stay(kind):
    given = config(kind)
    chosen, said = choose_optimizer(given, stages=4, micro_batches=1)
    assert chosen == given
    assert f"{kind} stays" in said


def test_without_staleness_nothing_changes():
    given = config()
    chosen, said = choose_optimizer(given, stages=1, micro_batches=4)
    assert chosen == given
    assert "no gradient is stale" in said


def test_it_is_silent_unless_it_was_asked():
    for values in (config(optimizer_policy="keep"), {"optimizer": {"type": "AdamW"}}):
        assert choose_optimizer(values, stages=8, micro_batches=1) == (values, None)


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
        ("AdamW", {}, "betas are 0.9 and 0.95, as none are given"),
        ("AdamW", {"amsgrad": True}, "amsgrad is left out"),
        ("Adam", {"adam_w_mode": False, "weight_decay": 0.1}, "weight decay is decoupled"),
    ],
)
def test_what_it_changes_of_the_settings_is_said(kind, params, words):
    changed = choose_optimizer(config(kind, {"lr": 1, **params}), stages=8, micro_batches=8)[1]
    same = {"lr": 1, "betas": [0.9, 0.95], "weight_decay": 0.1, "adam_w_mode": True}
    kept = choose_optimizer(config(kind, same), stages=8, micro_batches=8)[1]
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
