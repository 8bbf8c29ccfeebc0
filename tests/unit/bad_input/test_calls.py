# SPDX-License-Identifier: Apache-2.0
"""Calls from Python: ``initialize``, ``to_pipeline``, collectives, optimizers, loaders."""

from types import SimpleNamespace

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from wavemare import initialize, to_pipeline
from wavemare.comm import SparseComm
from wavemare.data.loader import ResumableLoader
from wavemare.data.tokenizer import train_tokenizer
from wavemare.engine.optim.optimizers import take_optimizer
from wavemare.errors import ConfigError, DataError, LaunchError, ModelError, PlanError
from wavemare.models.families import family_of
from wavemare.parallel.layout.layout import Layout

MODEL = torch.nn.Linear(2, 2)
OPT = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "ffn_dim": 8}
OPT |= {"vocab_size": 9, "word_embed_proj_dim": 8}


def loader(**changes):
    settings = {"micro_batch_size": 1, "data_rank": 0, "data_world_size": 1, "seed": 0, **changes}
    return lambda: ResumableLoader(settings.pop("dataset", [1, 2]), **settings)


def optimizer(kind, **params):
    config = {"optimizer": {"type": kind, "params": params}}
    return lambda: take_optimizer(config, MODEL, None)


ARGS = SimpleNamespace(deepspeed_config="a")
CALLS = [
    (lambda: initialize(model=MODEL), "config"),
    (lambda: initialize(ARGS, MODEL, config={}), "config"),
    (lambda: initialize(model=MODEL, config={"wavemare": {"pipline": {}}}), "wavemare.pipline"),
    (lambda: SparseComm(block=0), "block"),
    (lambda: SparseComm(mode="topk"), "mode"),
    (lambda: SparseComm(mode="packed"), "mode"),
    (optimizer("SOAP", lr=-1.0), "optimizer.params.lr"),
    (optimizer("SOAP", lr="x"), "optimizer.params.lr"),
    (optimizer("SOAP", refesh=3), "optimizer.params.refesh"),
    (optimizer("SOAP", betas=[0.9]), "optimizer.params.betas"),
    (optimizer("NAdam", lr=-1.0), "optimizer.params"),
    (optimizer("AdmaW"), "optimizer.type"),
]


OTHERS = [
    (lambda: family_of(OPTForCausalLM(OPTConfig(**OPT))), ModelError, "model"),
    (lambda: to_pipeline(MODEL, num_stages=2), LaunchError, "torch.distributed"),
    (lambda: Layout(global_batch=8, shares=[8]), PlanError, "shares"),
    (lambda: train_tokenizer(["a"], 300, kind="t5"), ConfigError, "kind"),
    (loader(micro_batch_size=0), ConfigError, "micro_batch_size"),
    (loader(data_rank=1), ConfigError, "data_rank"),
    (loader(dataset=[]), DataError, "--data"),
]


@pytest.mark.parametrize(
    ("act", "kind", "key"), [*((act, ConfigError, key) for act, key in CALLS), *OTHERS]
)
def test_a_call(refused, act, kind, key):
    refused(act, kind, key)
