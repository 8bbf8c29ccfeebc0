# SPDX-License-Identifier: Apache-2.0
"""Checkpoints there and back, against shares that the tests cut number by number."""

import argparse
import json
import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from typer.testing import CliRunner

from support.refusals import refuses
from wavemare.cli import app
from wavemare.errors import ModelError
from wavemare.megatron.convert import Options, convert
from wavemare.megatron.files import read_checkpoint
from wavemare.megatron.weights import reorder_qkv

HIDDEN, HEADS, LAYERS, TOKENS = 16, 4, 4, 37


def gpt2(**changes):
    transformers.set_seed(3)
    config = transformers.GPT2Config(
        vocab_size=TOKENS,
        n_positions=20,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        bos_token_id=0,
        eos_token_id=0,
        **changes,
    )
    return scattered(transformers.GPT2LMHeadModel(config))


def scattered(model):
    """Give every weight, biases and norms as well, values of its own."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model.eval()


def saved(model, folder):
    model.save_pretrained(folder)
    return folder


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


MODELS = {
    "gpt2": gpt2,
    "untied": lambda: gpt2(tie_word_embeddings=False),
    "bfloat16": lambda: gpt2().to(torch.bfloat16),
}


@torch.no_grad()
def logits_of_files(checkpoint, ids):
    """What GPT's files compute, rank by rank and summed as the ranks would, without merging."""
    arguments, version = checkpoint.arguments, checkpoint.version
    stages = [
        [{name: weight.float() for name, weight in rank.items()} for rank in stage]
        for stage in checkpoint.stages
    ]
    first, last = stages[0], stages[-1]
    table = torch.cat([rank["embedding.word_embeddings.weight"] for rank in first])
    hidden = table[ids] + first[0]["embedding.position_embeddings.weight"][: ids.shape[1]]

    def norm(rank, name):
        weight, bias = rank[f"{name}.weight"], rank[f"{name}.bias"]
        return F.layer_norm(hidden, weight.shape, weight, bias, arguments["layernorm_epsilon"])

    for stage in stages:
        for layer in range(len([name for name in stage[0] if name.endswith("4h_to_h.bias")])):
            at = f"encoder.layers.{layer}."
            normed, heads = norm(stage[0], f"{at}input_layernorm"), HEADS // len(stage)
            parts = [attended(normed, rank, at, heads, min(version, 2)) for rank in stage]
            hidden = hidden + sum(parts) + stage[0][f"{at}self_attention.dense.bias"]
            normed, parts = norm(stage[0], f"{at}post_attention_layernorm"), []
            for rank in stage:
                inner = [rank[f"{at}mlp.dense_h_to_4h.{name}"] for name in ("weight", "bias")]
                inner = F.gelu(F.linear(normed, *inner), approximate="tanh")
                parts.append(F.linear(inner, rank[f"{at}mlp.dense_4h_to_h.weight"]))
            hidden = hidden + sum(parts) + stage[0][f"{at}mlp.dense_4h_to_h.bias"]
    hidden = norm(last[0], "encoder.final_layernorm")
    names = "output_layer", "word_embeddings_for_head", "embedding.word_embeddings"
    heads = [next(r[f"{n}.weight"] for n in names if f"{n}.weight" in r) for r in last]
    return torch.cat([F.linear(hidden, head) for head in heads], dim=-1)


def attended(hidden, rank, at, heads, version):
    """A rank's part of attention, its query, key and value in the order of a version."""
    at += "self_attention."
    names = [f"{at}query_key_value.{name}" for name in ("weight", "bias")]
    fused = F.linear(hidden, *(rank[name] for name in names))
    batch, length, rows = *hidden.shape[:2], HIDDEN // HEADS
    shape, parts = {
        0: ((3, heads, rows), 2),
        1: ((heads, rows, 3), 4),
        2: ((heads, 3, rows), 3),
    }[version]
    query, key, value = fused.view(batch, length, *shape).unbind(parts)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(rows)
    scores += torch.full((length, length), -math.inf).triu(1)
    context = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value).flatten(2)
    return F.linear(context, rank[f"{at}dense.weight"])


@pytest.mark.parametrize(
    ("name", "tensor", "stages", "version"),
    [
        ("gpt2", 1, 1, 3),
        ("gpt2", 2, 2, 0),
        ("gpt2", 4, 1, 1),
        ("gpt2", 2, 4, 2),
        ("untied", 2, 2, 3),
        ("bfloat16", 2, 1, 1),
    ],
)
def test_there_and_back_is_byte_equal(tmp_path, name, tensor, stages, version):
    model = MODELS[name]()
    source = saved(model, tmp_path / "hf")
    options = Options(
        tensor_parallel=tensor,
        pipeline_parallel=stages,
        version=version,
        divisible_by=8,
        iteration=100,
    )
    convert(source, tmp_path / "megatron", "megatron", options)
    ids = torch.arange(24).view(2, 12) % TOKENS
    found = logits_of_files(read_checkpoint(tmp_path / "megatron"), ids)[..., :TOKENS]
    torch.testing.assert_close(found, model.float()(ids).logits.detach(), rtol=1e-4, atol=1e-4)
    step = tmp_path / "megatron" / "iter_0000100"
    ends = [""] if stages == 1 else [f"_{stage:03}" for stage in range(stages)]
    ranks = {f"mp_rank_{rank:02}{end}" for rank in range(tensor) for end in ends}
    assert {path.name for path in step.iterdir()} == ranks
    assert (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").read_text() == "100"
    convert(tmp_path / "megatron", tmp_path / "again", "hf")
    assert weights(tmp_path / "again") == weights(source)
    found, given = (
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "again", source)
    )
    for key in ("model_type", "architectures", "vocab_size", "tie_word_embeddings", "dtype"):
        assert found[key] == given[key]

    convert(tmp_path / "again", tmp_path / "third", "megatron", options)
    first, third = (read_checkpoint(tmp_path / which) for which in ("megatron", "third"))
    assert first.arguments == third.arguments
    for one, other in zip(first.stages, third.stages, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a.keys() == b.keys()
            assert all(torch.equal(a[key], b[key]) for key in a)


def test_the_shares_of_a_layer(tmp_path):
    """Stage 1, rank 1 of 2: which numbers of the model stand where, one by one."""
    model = gpt2()
    options = Options(tensor_parallel=2, pipeline_parallel=2, version=1, divisible_by=8)
    convert(saved(model, tmp_path / "hf"), tmp_path / "m", "megatron", options)
    path = tmp_path / "m" / "release" / "mp_rank_01_001" / "model_optim_rng.pt"
    with torch.serialization.safe_globals([argparse.Namespace]):
        file = torch.load(path, weights_only=True)
    assert file["checkpoint_version"] == 1.0
    assert file["args"].padded_vocab_size == 48  # the multiple of 2 * 8 above 37
    assert (tmp_path / "m" / "latest_checkpointed_iteration.txt").read_text() == "release"
    stage = file["model"]["language_model"]["transformer"]  # the old name
    assert "embedding" not in file["model"]["language_model"]
    block = model.transformer.h[3]  # layer 1 of stage 1
    fused = stage["layers.1.attention.query_key_value.weight"]
    rows = HIDDEN // HEADS
    for head in range(2):
        for row in range(rows):
            for part in range(3):
                column = part * HIDDEN + (2 + head) * rows + row
                expected = block.attn.c_attn.weight[:, column]
                assert torch.equal(fused[(head * rows + row) * 3 + part], expected)
    assert torch.equal(stage["layers.1.attention.dense.weight"], block.attn.c_proj.weight[8:].T)
    assert torch.equal(stage["layers.1.mlp.dense_h_to_4h.bias"], block.mlp.c_fc.bias[32:])
    assert torch.equal(stage["layers.1.mlp.dense_4h_to_h.bias"], block.mlp.c_proj.bias)
    assert torch.equal(stage["final_layernorm.weight"], model.transformer.ln_f.weight)
    table = file["model"]["word_embeddings_for_head"]["weight"]
    embedding = model.transformer.wte.weight
    assert torch.equal(table[:13], embedding[24:])
    assert torch.equal(table[13:], embedding[-1:].expand(11, -1))


@pytest.mark.parametrize("version", [0, 1, 2])
def test_orders_of_query_key_and_value(version):
    """Rows are named (part, head, row) and put where each version's description says."""
    heads, rows = 3, 2
    named = [(p, h, r) for p in range(3) for h in range(heads) for r in range(rows)]
    place = {
        0: lambda p, h, r: (p, h, r),
        1: lambda p, h, r: (h, r, p),
        2: lambda p, h, r: (h, p, r),
    }
    orders = {v: sorted(named, key=lambda name, v=v: place[v](*name)) for v in place}
    for other in (0, 1, 2, 3):
        source = torch.tensor([100 * p + 10 * h + r for p, h, r in orders[version]])
        expected = [100 * p + 10 * h + r for p, h, r in orders[min(other, 2)]]
        assert reorder_qkv(source, heads, version, other).tolist() == expected
        matrix = torch.stack([source, source], dim=1)
        assert reorder_qkv(matrix, heads, version, other)[:, 1].tolist() == expected


def rewrite(folder, change):
    for path in folder.glob("*/mp_rank_*/model_optim_rng.pt"):
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, weights_only=True)
        change(content)
        torch.save(content, path)


def test_what_a_real_checkpoint_has_besides(tmp_path):
    """An optimizer, random states, names of other years, no vocabulary size, fused GELU."""
    import random

    import numpy as np

    source = saved(gpt2(activation_function="gelu_fast"), tmp_path / "hf")
    options = Options(divisible_by=37, version=2)
    convert(source, tmp_path / "m", "megatron", options)

    def change(content):
        del content["args"].vocab_size
        content["args"].bias_gelu_fusion, content["args"].openai_gelu = True, False
        content["args"].norm_epsilon = 1e-3
        content["args"].data_path = ["0.3", "a"]
        content["optimizer"] = {"state": {0: {"exp_avg": torch.ones(2)}}, "step": 3}
        content["rng_state"] = [
            {
                "random_rng_state": random.getstate(),
                "np_rng_state": np.random.get_state(),
                "torch_rng_state": torch.get_rng_state(),
            }
        ]
        encoder = content["model"]["language_model"]["transformer"]
        for name in list(encoder):
            encoder[name.replace("_layernorm.", "_norm.")] = encoder.pop(name)

    rewrite(tmp_path / "m", change)
    convert(tmp_path / "m", tmp_path / "again", "hf")
    assert weights(tmp_path / "again") == weights(source)
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["layer_norm_epsilon"] == 1e-3


def test_without_arguments_the_heads_have_to_be_named(tmp_path):
    source = saved(gpt2(), tmp_path / "hf")
    convert(source, tmp_path / "m", "megatron", Options(version=0))
    rewrite(tmp_path / "m", lambda content: content.pop("args"))
    with refuses(ModelError, "num_attention_heads", None):
        convert(tmp_path / "m", tmp_path / "no", "hf")
    options = Options(num_attention_heads=HEADS, vocab_size=TOKENS)
    convert(tmp_path / "m", tmp_path / "again", "hf", options)
    assert weights(tmp_path / "again") == weights(source)
    with refuses(ModelError, "--vocab-size", 129):
        convert(
            tmp_path / "m", tmp_path / "no", "hf", Options(num_attention_heads=4, vocab_size=129)
        )


def test_a_wrong_conversion_leaves_nothing(tmp_path, monkeypatch):
    """Weights in a wrong order are found when they are read back."""
    source = saved(gpt2(), tmp_path / "hf")
    turned = lambda fused, heads, source, target: fused.roll(target, 0)  # noqa: E731
    monkeypatch.setattr("wavemare.megatron.weights.reorder_qkv", turned)
    with refuses(ModelError, "weights", "transformer.h.0.attn.c_attn.weight"):
        convert(source, tmp_path / "m", "megatron")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_refusals(tmp_path):
    source = saved(gpt2(), tmp_path / "hf")
    for options, *refusal in (
        (Options(tensor_parallel=3), "--tensor-parallel", 3),
        (Options(pipeline_parallel=3), "--pipeline-parallel", 3),
        (Options(version=4), "--checkpoint-version", 4),
    ):
        with refuses(ModelError, *refusal):
            convert(source, tmp_path / "m", "megatron", options)
    relu = saved(gpt2(activation_function="relu"), tmp_path / "relu")
    with refuses(ModelError, "activation", "relu"):
        convert(relu, tmp_path / "m", "megatron")
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": 2, "intermediate_size": 32}
    bert = transformers.BertConfig(vocab_size=TOKENS, num_hidden_layers=1, **sizes)
    folder = saved(transformers.BertForMaskedLM(bert), tmp_path / "bert")
    with refuses(ModelError, "model", "bert"):
        convert(folder, tmp_path / "m", "megatron")
    assert not (tmp_path / "m").exists()


def test_the_command(tmp_path):
    source = saved(gpt2(), tmp_path / "hf")
    words = [str(source), str(tmp_path / "m"), "--to", "megatron", "--tensor-parallel", "2"]
    result = CliRunner().invoke(app, ["convert", *words], catch_exceptions=False)
    assert result.exit_code == 0
    assert "hf to megatron:" in result.output
    assert "read back without a difference" in result.output
    with refuses(ModelError, "--to", "megatro"):
        CliRunner().invoke(app, ["convert", *words[:2], "--to", "megatro"], catch_exceptions=False)
