# SPDX-License-Identifier: Apache-2.0
"""Calls from Python: ``initialize``, ``to_pipeline``, collectives, optimizers."""

from types import SimpleNamespace

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from wavemare import initialize, to_pipeline
from wavemare.comm import SparseComm
from wavemare.engine.optim.optimizers import take_optimizer
from wavemare.errors import ConfigError, LaunchError, ModelError, PlanError
from wavemare.models.families import family_of
from wavemare.parallel.layout.layout import Layout

MODEL = torch.nn.Linear(2, 2)


def optimizer(kind, **params):
    config = {"optimizer": {"type": kind, "params": params}}
    return lambda: take_optimizer(config, MODEL, None)


ARGS = SimpleNamespace(deepspeed_config="a")
CALLS = [
    (lambda: initialize(model=MODEL), "config", ["no configuration", "--deepspeed_config"]),
    (lambda: initialize(ARGS, MODEL, config={}), "config", ["as a parameter", "Give it once"]),
    (
        lambda: initialize(model=MODEL, config={"wavemare": {"pipline": {}}}),
        "wavemare.pipline",
        ["Did you mean 'pipeline'?"],
    ),
    (lambda: SparseComm(block=0), "block", ["of at least 1"]),
    (lambda: SparseComm(mode="topk"), "mode", ["no such mode"]),
    (lambda: SparseComm(mode="packed"), "mode", ["order of the ranks", "deterministic to false"]),
    (optimizer("SOAP", lr=-1.0), "optimizer.params.lr", ["-1.0"]),
    (optimizer("SOAP", lr="x"), "optimizer.params.lr", ["'x'"]),
    (optimizer("SOAP", refesh=3), "optimizer.params.refesh", ["Did you mean 'refresh'?"]),
    (optimizer("SOAP", betas=[0.9]), "optimizer.params.betas", ["Give two"]),
    (optimizer("NAdam", lr=-1.0), "optimizer.params", ["torch refuses it"]),
    (optimizer("AdmaW"), "optimizer.type", ["'AdmaW'", "Did you mean 'AdamW'?"]),
]


@pytest.mark.parametrize(("act", "key", "said"), CALLS)
def test_a_call(refused, act, key, said):
    refused(act, ConfigError, key, *said)


def test_a_model_that_pipelines_do_not_take(refused):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "ffn_dim": 8}
    model = OPTForCausalLM(OPTConfig(**sizes, vocab_size=9, word_embed_proj_dim=8))
    said = "'OPTForCausalLM'", "cannot be cut into pipeline stages"
    refused(lambda: family_of(model), ModelError, "model", *said)


def test_a_pipeline_without_a_launcher(refused):
    act = lambda: to_pipeline(MODEL, num_stages=2)  # noqa: E731
    refused(act, LaunchError, "torch.distributed", "Start with a launcher")


def test_shares_that_are_no_tuple(refused):
    act = lambda: Layout(global_batch=8, shares=[8])  # noqa: E731
    refused(act, PlanError, "shares", "no tuple")
