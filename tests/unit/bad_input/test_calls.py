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
    (
        lambda: wavemare.initialize(model=MODEL),
        (ConfigError, "config", "there is no configuration", "--deepspeed_config"),
    ),
    (
        lambda: wavemare.initialize(SimpleNamespace(deepspeed_config="a"), MODEL, config={}),
        (ConfigError, "config", "in args and as a parameter", "Give it once"),
    ),
    (
        lambda: wavemare.initialize(model=MODEL, config={"wavemare": {"pipline": {}}}),
        (ConfigError, "wavemare.pipline", "Did you mean 'pipeline'?"),
    ),
    (
        lambda: wavemare.to_pipeline(MODEL, num_stages=2),
        (LaunchError, "torch.distributed", "Start with a launcher"),
    ),
    (lambda: SparseComm(block=0), (ConfigError, "block", "Give 256")),
    (lambda: SparseComm(mode="topk"), (ConfigError, "mode", "no such mode")),
    (
        lambda: SparseComm(mode="packed"),
        (ConfigError, "mode", "order of the ranks", "deterministic to false"),
    ),
    (lambda: BlockTopK(256), (ConfigError, "ratio", "one of ratio and k")),
    (lambda: BlockTopK(256, ratio=2), (ConfigError, "ratio", "at most 1")),
    (lambda: BlockTopK(256, k=0), (ConfigError, "k", "Give 1 or more")),
    (lambda: BlockTopK(256, ratio=math.nan), (ConfigError, "ratio", "no share")),
    (optimizer("SOAP", lr=-1.0), (ConfigError, "optimizer.params.lr", "-1.0")),
    (optimizer("SOAP", lr="x"), (ConfigError, "optimizer.params.lr", "'x'")),
    (
        optimizer("SOAP", refesh=3),
        (ConfigError, "optimizer.params.refesh", "Did you mean 'refresh'?"),
    ),
    (optimizer("SOAP", betas=[0.9]), (ConfigError, "optimizer.params.betas", "Give two")),
    (optimizer("NAdam", lr=-1.0), (ConfigError, "optimizer.params", "torch refuses it")),
    (lambda: ParallelPlan(global_batch=8, shares=[8]), (PlanError, "shares", "no tuple")),
]


@pytest.mark.parametrize(("act", "expected"), CALLS)
def test_a_call(refused, act, expected):
    refused(act, *expected)
