# SPDX-License-Identifier: Apache-2.0
"""Calls from Python: ``initialize``, ``to_pipeline``, collectives, optimizers."""

import math
from types import SimpleNamespace

import pytest
import torch

import wavemare
from wavemare.comm import SparseComm
from wavemare.comm.compress import BlockTopK
from wavemare.engine.optimizers import take_optimizer
from wavemare.errors import ConfigError, LaunchError, PlanError
from wavemare.parallel.plan import ParallelPlan

MODEL = torch.nn.Linear(2, 2)


def optimizer(kind, **params):
    config = {"optimizer": {"type": kind, "params": params}}
    return lambda: take_optimizer(config, MODEL, None)


CALLS = [
    pytest.param(
        lambda: wavemare.initialize(model=MODEL),
        (ConfigError, "config", "there is no configuration", "--deepspeed_config"),
        id="no configuration",
    ),
    pytest.param(
        lambda: wavemare.initialize(SimpleNamespace(deepspeed_config="a"), MODEL, config={}),
        (ConfigError, "config", "in args and as a parameter", "Give it once"),
        id="two configurations",
    ),
    pytest.param(
        lambda: wavemare.initialize(model=MODEL, config="nosuch.json"),
        (ConfigError, "--deepspeed_config", "'nosuch.json'", "Name an existing"),
        id="a missing file",
    ),
    pytest.param(
        lambda: wavemare.initialize(model=MODEL, config=3),
        (ConfigError, "--deepspeed_config", "'3'", "neither the name of a file"),
        id="a number for a configuration",
    ),
    pytest.param(
        lambda: wavemare.initialize(model=MODEL, config={"wavemare": {"pipline": {}}}),
        (ConfigError, "wavemare.pipline", "Did you mean 'pipeline'?"),
        id="a misspelt section",
    ),
    pytest.param(
        lambda: wavemare.to_pipeline(MODEL, num_stages=2),
        (LaunchError, "torch.distributed", "Start with a launcher"),
        id="a pipeline in one process",
    ),
    pytest.param(
        lambda: SparseComm(block=0), (ConfigError, "block", "Give 256"), id="a block of nothing"
    ),
    pytest.param(
        lambda: SparseComm(mode="topk"), (ConfigError, "mode", "no such mode"), id="a mode"
    ),
    pytest.param(
        lambda: SparseComm(mode="packed"),
        (ConfigError, "mode", "order of the ranks", "deterministic to false"),
        id="a loose mode for exact sums",
    ),
    pytest.param(
        lambda: BlockTopK(256), (ConfigError, "ratio", "one of ratio and k"), id="neither share"
    ),
    pytest.param(
        lambda: BlockTopK(256, ratio=2), (ConfigError, "ratio", "at most 1"), id="a share of 2"
    ),
    pytest.param(
        lambda: BlockTopK(256, k=0), (ConfigError, "k", "Give 1 or more"), id="no block sent"
    ),
    pytest.param(
        lambda: BlockTopK(256, ratio=math.nan), (ConfigError, "ratio", "no share"), id="nan sent"
    ),
    pytest.param(
        optimizer("SOAP", lr=-1.0), (ConfigError, "optimizer.params.lr", "-1.0"), id="a rate"
    ),
    pytest.param(
        optimizer("SOAP", lr="x"),
        (ConfigError, "optimizer.params.lr", "'x'"),
        id="a rate in letters",
    ),
    pytest.param(
        optimizer("SOAP", refesh=3),
        (ConfigError, "optimizer.params.refesh", "Did you mean 'refresh'?"),
        id="a misspelt parameter",
    ),
    pytest.param(
        optimizer("SOAP", betas=[0.9]),
        (ConfigError, "optimizer.params.betas", "Give two"),
        id="one beta",
    ),
    pytest.param(
        optimizer("NAdam", lr=-1.0),
        (ConfigError, "optimizer.params", "torch refuses it"),
        id="torch's optimizer",
    ),
    pytest.param(
        lambda: ParallelPlan(global_batch=8, shares=[8]),
        (PlanError, "shares", "no tuple"),
        id="a list for a tuple",
    ),
]


@pytest.mark.parametrize(("act", "expected"), CALLS)
def test_a_call(refused, act, expected):
    refused(act, *expected)
