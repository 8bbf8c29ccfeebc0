# SPDX-License-Identifier: Apache-2.0
"""Tiny models of each family, their batches, and a group of one process."""

import os
import sys
from pathlib import Path
from unittest import mock

import deepspeed
import pytest
import torch
import transformers
from deepspeed.comm import comm as deepspeed_comm

sys.path.append(str(Path(__file__).parents[2] / "multiproc" / "programs"))
VOCABULARY = 96

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8}

MODELS = {
    "gpt2": lambda **k: transformers.GPT2LMHeadModel(transformers.GPT2Config(**_SIZES, **k)),
    "gpt2-untied": lambda **k: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**_SIZES, tie_word_embeddings=False, **k)
    ),
    "bert-mlm": lambda **k: transformers.BertForMaskedLM(transformers.BertConfig(**_SIZES, **k)),
    "bert-cls": lambda **k: transformers.BertForSequenceClassification(
        transformers.BertConfig(**_SIZES, **{"num_labels": 3, **k})
    ),
    "llama": lambda **k: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**_GROUPED, attention_dropout=0.1, **k)
    ),
    "qwen3": lambda **k: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            **_GROUPED,
            tie_word_embeddings=True,
            use_sliding_window=True,
            sliding_window=5,
            max_window_layers=1,
            **k,
        )
    ),
    "olmo3": lambda **k: transformers.Olmo3ForCausalLM(
        transformers.Olmo3Config(**_GROUPED, sliding_window=5, **k)
    ),
    "gpt_neox": lambda **k: transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(**_SIZES, hidden_dropout=0.1, attention_dropout=0.1, **k)
    ),
}


@pytest.fixture(params=list(MODELS))
def model_name(request):
    return str(request.param)


@pytest.fixture
def make_model():
    """Build a tiny model by name, with the same weights each time."""

    def make(name, **changes):
        transformers.set_seed(3)
        model = MODELS[name](**changes)
        # Weights of trained size: with the initial ones many mistakes would drown in rounding.
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.mul_(5.0)
        return model

    return make


@pytest.fixture
def make_batch():
    """Make a batch of two texts with labels for a model."""

    def make(model, *extra, padded=True, tokens=11):
        generator = torch.Generator().manual_seed(5)
        ids = torch.randint(3, VOCABULARY, (2, tokens), generator=generator)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if padded:
            batch["attention_mask"][1, -4:] = 0
        if model.config.model_type == "bert":
            batch["token_type_ids"] = (torch.arange(tokens) > tokens // 2).long().repeat(2, 1)
        if "position_ids" in extra:
            batch["position_ids"] = torch.arange(tokens).repeat(2, 1) + torch.tensor([[2], [5]])
        if "Classification" in type(model).__name__:
            batch["labels"] = torch.tensor([2, 0])
        else:
            batch["labels"] = ids.masked_fill(batch["attention_mask"] == 0, -100)
        return batch

    return make


@pytest.fixture(scope="module", autouse=True)
def group_of_one(tmp_path_factory):
    """Initialize torch.distributed for this process alone, and undo it."""
    store = tmp_path_factory.mktemp("group") / "store"
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    ops = deepspeed.ops.__compatible_ops__  # one of them would be compiled for minutes
    with mock.patch.dict(os.environ, variables), mock.patch.dict(ops, deepspeed_shm_comm=False):
        options = {"init_method": f"file://{store}", "rank": 0, "world_size": 1, "verbose": False}
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, **options)
        yield
        torch.distributed.destroy_process_group()
        deepspeed_comm.cdb = None
