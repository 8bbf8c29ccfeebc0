# SPDX-License-Identifier: Apache-2.0
"""The contract with DeepSpeed: its public signatures, and the private code that engines rely on."""

import hashlib
import inspect
import os
import subprocess
import sys
from importlib import import_module
from types import SimpleNamespace

import deepspeed
import pytest
from deepspeed.utils import groups

import wavemare
from support.refusals import refuses
from wavemare.engine import Engine
from wavemare.engine.initialize import ENGINES
from wavemare.engine.pipe.engine import PipelineEngine
from wavemare.engine.seams import (
    ATTRIBUTES,
    DEEPSPEED,
    FUNCTIONS,
    forget_grid,
    hold_grid,
    warn_of_other_version,
)
from wavemare.errors import ConfigError


def test_initialize_has_the_thirteen_parameters_of_deepspeed_in_order_then_a_plan():
    stock = inspect.signature(deepspeed.initialize).parameters
    ours = dict(inspect.signature(wavemare.initialize).parameters)
    plan = ours.pop("plan")
    assert list(stock) == list(ours)
    assert len(ours) == 13
    assert [p.default for p in stock.values()] == [p.default for p in ours.values()]
    assert plan.default is None


@pytest.mark.parametrize("method", ["save_checkpoint", "load_checkpoint", "deepspeed_io"])
def test_methods_keep_deepspeeds_parameters(method):
    stock, ours = (
        inspect.signature(getattr(engine, method)).parameters.values()
        for engine in (deepspeed.DeepSpeedEngine, Engine)
    )
    assert [(p.name, p.default) for p in stock] == [(p.name, p.default) for p in ours]


def test_engines_refuse_what_only_others_do():
    for name, value in (("compute_loss", False), ("reduce_output", None), ("bcast", True)):
        with refuses(ConfigError, f"eval_batch({name})", value):
            Engine.eval_batch(object(), iter(()), **{name: value})
    with refuses(ConfigError, "wavemare.pipeline.stages", 2):
        PipelineEngine.forward(SimpleNamespace(num_stages=2), "batch")


MUON = """
import sys, torch
from wavemare.engine.seams import import_muon

import_muon()
from deepspeed.runtime.zero.muon import original_muon as muon

loaded = "torch._inductor" in sys.modules
grad = torch.randn(6, 4)
before = muon.muon_update.__wrapped__
found = muon.muon_update(grad.clone(), torch.zeros(6, 4))
same = torch.equal(found, before(grad.clone(), torch.zeros(6, 4)))
print(loaded, same, muon.zeropower_via_newtonschulz5 is not muon.muon_update)
"""


def test_deepspeeds_muon_imports_no_compiler_until_it_steps():
    variables = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", MUON], env=variables, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "True", "True"]


def overridden():
    """Return the methods of DeepSpeed's that our engines have their own of, as `FUNCTIONS` has."""
    for engine in ENGINES.values():
        stock = [kind for kind in engine.__mro__ if kind.__module__.startswith("deepspeed.")]
        for kind in engine.__mro__:
            for name in vars(kind) if kind.__module__.startswith("wavemare.") else ():
                for owner in stock if not name.startswith("__") else ():
                    if inspect.isfunction(vars(owner).get(name)):
                        place = f"{owner.__module__}.{owner.__qualname__}"
                        yield place.removeprefix("deepspeed."), name


def found(owner):
    """Return a class or module of DeepSpeed."""
    module, _, name = f"deepspeed.{owner}".rpartition(".")
    return getattr(import_module(module), name)


def digest(owner, name):
    """Return the digest of a function's source, by its owner as in `FUNCTIONS`."""
    function = getattr(found(owner), name)
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    function = next(filter(inspect.isfunction, cells), function)  # behind DeepSpeed's decorators
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:6]


def test_deepspeeds_inside_is_what_the_engines_were_written_against():
    read = {(owner, *one.split("=")) for owner, names in FUNCTIONS.items() for one in names.split()}
    assert read == {(owner, name, digest(owner, name)) for owner, name, _ in read}
    assert {*overridden()} <= {(owner, name) for owner, name, _ in read}
    for owner, names in ATTRIBUTES.items():
        source = inspect.getsource(found(owner))
        assert not [name for name in names.split() if f"self.{name}" not in source], owner


def test_another_deepspeed_is_told_once(caplog):
    for version in (DEEPSPEED, f"{DEEPSPEED}+local", "0.19.999", "0.19.999"):
        warn_of_other_version(version)
    (told,) = caplog.messages
    assert "0.19.999" in told
    assert f"deepspeed=={DEEPSPEED}" in told


class Holder:
    """Stands for an engine."""


def test_a_destroyed_engine_leaves_the_grid_to_the_next_one():
    """The garbage collector may destroy it while the next one is built."""
    mpu, first, second = SimpleNamespace(), Holder(), Holder()
    hold_grid(mpu, first)
    hold_grid(mpu, second)
    groups.mpu = mpu
    forget_grid(mpu, first)
    assert groups.mpu is mpu
    forget_grid(mpu, second)
    assert groups.mpu is None
