# SPDX-License-Identifier: Apache-2.0
"""Which optimizers are taken out of the JSON, which tensors Muon steps, and what is refused."""

from collections import Counter, deque
from types import SimpleNamespace

import pytest
import torch
import transformers
from deepspeed.runtime import lr_schedules

from support.refusals import refuses
from wavemare.engine.optim.optimizers import (
    check_matrix_optimizer,
    is_added,
    muon_groups,
    ratio_keeping_scheduler,
    take_optimizer,
)
from wavemare.engine.optim.parts import refusal_of_parts
from wavemare.errors import ConfigError
from wavemare.optim import SOAP, Muon


def engine(**changes):
    answers = {
        "zero_optimization_stage": 0,
        "zero_use_cpu_optimizer": False,
        "zero_offload_optimizer": SimpleNamespace(device="cpu"),
        "fp16_enabled": False,
        **changes,
    }
    return SimpleNamespace(**{name: lambda value=value: value for name, value in answers.items()})


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"zero_optimization_stage": 3}, "zero_optimization.stage"),
        ({"zero_use_cpu_optimizer": True}, "zero_optimization.offload_optimizer.device"),
        ({"fp16_enabled": True}, "fp16.enabled"),
    ],
)
def test_what_optimizers_of_matrices_cannot_go_with_is_refused_by_name(changes, key):
    for kind in (SOAP, Muon):
        with refuses(ConfigError, key):
            check_matrix_optimizer(engine(**changes), kind([torch.zeros(2, 2)]))
    check_matrix_optimizer(engine(**changes), torch.optim.AdamW([torch.zeros(2, 2)]))
    check_matrix_optimizer(engine(), SOAP([torch.zeros(2, 2)]))


@pytest.mark.parametrize("kind", ["AdamW", "Muon", "Lamb", "SGD"])
def test_other_optimizers_are_left_to_deepspeed(kind):
    config = {"optimizer": {"type": kind, "params": {"lr": 1.0}}}
    assert take_optimizer(config, torch.nn.Linear(2, 2), None) == (config, None)


def muon_with(kind, **params):
    return {
        "optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 0.005}},
        "scheduler": {"type": kind, "params": params},
    }


@pytest.mark.parametrize(
    ("kind", "settings"), [("WarmupLR", {}), ("WarmupDecayLR", {"total_num_steps": 9})]
)
@pytest.mark.parametrize("rates", [(0.02, 0.005), (0.005,)])  # a stage may have no matrix
def test_rates_keep_their_ratio_while_they_warm_up(kind, settings, rates):
    settings |= {"warmup_min_lr": 0.004, "warmup_max_lr": 0.4, "warmup_num_steps": 3}
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates]
    scheduler = ratio_keeping_scheduler(muon_with(kind, **settings))(torch.optim.SGD(groups))
    one = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=9.0)
    stock = getattr(lr_schedules, kind)(one, **settings)
    for _ in range(8):
        for each in (scheduler, stock):
            each.step()
        (rate,) = stock.get_lr()
        expected = [rate * own / 0.02 for own in rates]
        assert scheduler.get_lr() == pytest.approx(expected, rel=1e-12)


def test_other_schedulers_are_left_to_deepspeed(caplog):
    for config in (
        muon_with("WarmupCosineLR", total_num_steps=9),
        muon_with("WarmupLR", warmup_max_lr=[0.1, 0.2]),
        {**muon_with("WarmupLR"), "optimizer": {"type": "Muon", "params": {"lr": 0.1}}},
        {**muon_with("WarmupLR"), "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}},
        {},
    ):
        assert ratio_keeping_scheduler(config) is None
    assert not caplog.records
    assert ratio_keeping_scheduler(muon_with("OneCycle", cycle_min_lr=0.1)) is None
    assert "same rate" in caplog.text


def test_an_optimizer_that_is_given_goes_before_the_section():
    config = {"optimizer": {"type": "SOAP", "params": {"nonsense": 1}}}
    given = object()
    assert take_optimizer(config, None, given) == (config, given)
    assert take_optimizer({}, None, None) == ({}, None)


@pytest.mark.parametrize("name", ["SOAP", "soap", "Soap"])
def test_the_section_makes_an_optimizer_and_is_taken_out(name):
    config = {"optimizer": {"type": name, "params": {"lr": 0.5, "betas": [0.5, 0.6]}}, "x": 1}
    rest, make = take_optimizer(config, None, None)
    assert rest == {"x": 1}
    assert "optimizer" in config
    soap = make([torch.zeros(2, 2)])
    assert isinstance(soap, SOAP)
    assert (soap.defaults["lr"], soap.defaults["betas"]) == (0.5, (0.5, 0.6))
    assert is_added(soap)
    _, make = take_optimizer({"optimizer": {"type": name}}, None, None)
    assert make([torch.zeros(3, 3)]).defaults["lr"] == SOAP([torch.zeros(3, 3)]).defaults["lr"]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(7, 4)
        self.position_embeddings = torch.nn.Parameter(torch.zeros(5, 4))
        self.hidden = torch.nn.Linear(4, 4)
        self.stack = torch.nn.Parameter(torch.zeros(2, 3, 4))
        self.marked = torch.nn.Linear(4, 4, bias=False)
        self.lm_head = torch.nn.Linear(4, 7, bias=False)


def test_muon_steps_hidden_matrices_alone():
    model = Model()
    model.marked.weight.use_muon = False
    matrices, rest = muon_groups(model, model.parameters(), {})
    assert matrices["use_muon"]
    assert not rest["use_muon"]
    assert [id(p) for p in matrices["params"]] == [id(model.hidden.weight)]
    assert len(rest["params"]) == 6


def test_parameter_groups_keep_their_settings():
    model = Model()
    groups = [
        {"params": [model.hidden.weight, model.words.weight], "weight_decay": 0.1},
        {"params": model.hidden.bias, "weight_decay": 0.0, "lr": 5.0},
    ]
    found = list(muon_groups(model, groups, {"muon_lr": 1.0, "adam_lr": 2.0}))
    assert [(g["use_muon"], g["weight_decay"], g["lr"]) for g in found] == [
        (True, 0.1, 1.0),
        (False, 0.1, 2.0),
        (False, 0.0, 5.0),
    ]


def of_muon(parameters, *, use_muon, **settings):
    return Muon([{"params": parameters, "use_muon": use_muon}], **settings)


ELEMENTS = [
    *(
        "Adam",
        "AdamW",
        "SGD",
        "RMSprop",
        "NAdam",
        "RAdam",
        "Adagrad",
        "Adamax",
        "Adadelta",
        "Rprop",
    ),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "lr": 0.1}),
    (of_muon, {"use_muon": False}),
]
WHOLE = [
    "Adafactor",
    "Muon",
    (SOAP, {}),
    (of_muon, {"use_muon": True}),
    (transformers.Adafactor, {}),
]


class Averaged(torch.optim.Optimizer):
    """Steps by another optimizer, which has groups of its own."""

    def __init__(self, parameters):
        self.inner = torch.optim.SGD(parameters, lr=0.1)
        super().__init__(self.inner.param_groups, {})

    def step(self, closure=None):
        self.inner.step()


class Counting(torch.optim.SGD):
    """Makes the state of its weights when it is made, and cannot be made anew."""

    def __init__(self, parameters, steps):
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["left"] = steps

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["left"] -= 1
        super().step()


UNTRIED = ["LBFGS", (Averaged, {}), (Counting, {"steps": 3})]
"""Nobody can say without knowing them; LBFGS does read whole tensors."""


def named(kind):
    return kind if isinstance(kind, str) else f"{kind[0].__name__} {kind[1]}"


@pytest.mark.parametrize("kind", [*ELEMENTS, *WHOLE, *UNTRIED], ids=named)
def test_whether_an_optimizer_steps_parts_of_a_matrix_is_tried(kind):
    make, settings = kind if isinstance(kind, tuple) else (getattr(torch.optim, kind), {"lr": 0.0})
    weight = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = make([weight], **settings)  # the rate of a warm-up's first step is 0
    options = [{**group, "params": []} for group in optimizer.param_groups]
    state = torch.get_rng_state()
    refusals = [refusal_of_parts(optimizer, (4, 4), side) for side in (0, 1, None)]
    assert [not refusal for refusal in refusals] == [kind in ELEMENTS] * 3
    assert torch.equal(weight, torch.ones(4, 4))
    assert [{**group, "params": []} for group in optimizer.param_groups] == options
    assert torch.equal(torch.get_rng_state(), state)


class Noting(torch.optim.SGD):
    """Notes its steps in a container of its own."""

    def __init__(self, parameters, held, note):
        super().__init__(parameters, lr=0.1)
        self.held, self.note = held, note

    def step(self, closure=None):
        self.note(self.held)
        super().step()


CONTAINERS = {
    "list": (list, lambda held: held.append(1)),
    "list of lists": (lambda: [[0]], lambda held: held[0].append(1)),
    "tuple of lists": (lambda: ([0],), lambda held: held[0].append(1)),
    "deque": (deque, lambda held: held.append(1)),
    "dict": (dict, lambda held: held.update({len(held): 1})),
    "counter": (Counter, lambda held: held.update(["step"])),
    "set": (set, lambda held: held.add(len(held))),
    "bytes": (lambda: bytearray(1), lambda held: held.append(1)),
    "tensor": (lambda: torch.zeros(1), lambda held: held.add_(1)),
    "dict of tensors": (lambda: {"steps": torch.zeros(1)}, lambda held: held["steps"].add_(1)),
}


@pytest.mark.parametrize(("make", "note"), CONTAINERS.values(), ids=CONTAINERS.keys())
def test_a_trial_leaves_the_containers_of_an_optimizer_as_they_are(make, note):
    optimizer = Noting([torch.nn.Parameter(torch.ones(4, 4))], make(), note)
    assert not refusal_of_parts(optimizer, (4, 4), 0)
    assert optimizer.held == make()
    optimizer.step()
    assert optimizer.held != make()


def test_a_trial_copies_no_weight_that_a_container_holds():
    weight, seen = torch.nn.Parameter(torch.ones(4, 4)), []
    optimizer = Noting([weight], [weight], lambda held: seen.append(held[0]))
    assert not refusal_of_parts(optimizer, (4, 4), 0)
    assert seen
    assert all(each is weight for each in seen)
