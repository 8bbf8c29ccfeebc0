# SPDX-License-Identifier: Apache-2.0
"""Checkpoints there and back, against shares that the tests cut number by number."""

import argparse
import json

import pytest
import torch
import transformers
from typer.testing import CliRunner

from wavemare.cli import app
from wavemare.errors import CheckpointError, ModelError
from wavemare.megatron.convert import Options, convert
from wavemare.megatron.files import read_checkpoint
from wavemare.megatron.models import shape_of
from wavemare.megatron.weights import from_transformers, pad_vocabulary, reorder_qkv, split

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


def megatron_bert(kind="MegatronBertForPreTraining"):
    transformers.set_seed(4)
    config = transformers.MegatronBertConfig(
        vocab_size=TOKENS,
        max_position_embeddings=20,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=40,
    )
    return scattered(getattr(transformers, kind)(config))


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
    "bert": megatron_bert,
    "masked": lambda: megatron_bert("MegatronBertForMaskedLM"),
}


@pytest.mark.parametrize(
    ("name", "tensor", "stages", "version"),
    [
        ("gpt2", 1, 1, 3),
        ("gpt2", 2, 2, 0),
        ("gpt2", 4, 1, 1),
        ("gpt2", 2, 4, 2),
        ("untied", 2, 2, 3),
        ("bfloat16", 2, 1, 1),
        ("bert", 1, 1, 0),
        ("bert", 2, 2, 3),
        ("bert", 4, 2, 1),
        ("masked", 2, 1, 2),
    ],
)
def test_there_and_back_is_byte_equal(tmp_path, name, tensor, stages, version):
    source = saved(MODELS[name](), tmp_path / "hf")
    options = Options(
        tensor_parallel=tensor,
        pipeline_parallel=stages,
        version=version,
        divisible_by=8,
        iteration=100,
    )
    done = convert(source, tmp_path / "megatron", "megatron", options)
    assert done.difference < 1e-4 * max(done.largest, 1)
    step = tmp_path / "megatron" / "iter_0000100"
    ends = [""] if stages == 1 else [f"_{stage:03}" for stage in range(stages)]
    ranks = {f"mp_rank_{rank:02}{end}" for rank in range(tensor) for end in ends}
    assert {path.name for path in step.iterdir()} == ranks
    assert (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").read_text() == "100"
    back = convert(tmp_path / "megatron", tmp_path / "again", "hf")
    assert back.difference < 1e-4 * max(back.largest, 1)
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


@pytest.mark.parametrize("version", [0, 2, 3])
def test_a_share_is_no_view_that_would_be_saved_whole(version):
    model = gpt2()
    shape = shape_of(model.config)
    whole = from_transformers(model.state_dict(), shape, tied=True)
    for share in split(pad_vocabulary(whole, 40), shape, 2, version):
        for name, weight in share.items():
            assert weight.untyped_storage().nbytes() == weight.nbytes, name


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


@pytest.mark.parametrize(
    ("model", "kind"),
    [(gpt2, "gpt2"), (lambda: gpt2(tie_word_embeddings=False), "untied")],
    ids=["tied", "untied"],
)
def test_the_layout_of_a_pipeline(tmp_path, model, kind):
    source = saved(model(), tmp_path / "hf")
    convert(source, tmp_path / "pipe", "deepspeed", Options(pipeline_parallel=2))
    names = {path.name for path in (tmp_path / "pipe" / "converted").iterdir()}
    assert {"layer_00-model_states.pt", "mp_rank_01_model_states.pt"} <= names
    convert(tmp_path / "pipe", tmp_path / "again", "hf")
    assert weights(tmp_path / "again") == weights(source)
    convert(tmp_path / "pipe", tmp_path / "m", "megatron", Options(tensor_parallel=2))
    convert(tmp_path / "m", tmp_path / "pipe2", "deepspeed")
    convert(tmp_path / "pipe2", tmp_path / "third", "hf")
    assert weights(tmp_path / "third") == weights(source)
    (tmp_path / "pipe" / "config.json").unlink()
    with pytest.raises(ModelError, match=r"do not say what model it is.*--config"):
        convert(tmp_path / "pipe", tmp_path / "no", "hf")
    convert(tmp_path / "pipe", tmp_path / "fourth", "hf", Options(config=str(source)))
    assert weights(tmp_path / "fourth") == weights(source)
    (tmp_path / "pipe" / "converted" / "layer_02-model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="layer 2 is missing"):
        convert(tmp_path / "pipe", tmp_path / "no", "hf", Options(config=str(source)))


def test_bert_between_transformers_and_a_pipeline(tmp_path):
    config = transformers.BertConfig(
        vocab_size=TOKENS,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=20,
    )
    source = saved(scattered(transformers.BertForMaskedLM(config)), tmp_path / "hf")
    convert(source, tmp_path / "pipe", "deepspeed")
    convert(tmp_path / "pipe", tmp_path / "again", "hf")
    assert weights(tmp_path / "again") == weights(source)
    with pytest.raises(ModelError, match=r"normalises before each layer.*megatron_bert"):
        convert(source, tmp_path / "m", "megatron")
    assert not (tmp_path / "m").exists()


def test_megatrons_bert_is_not_transformers_bert(tmp_path):
    convert(saved(megatron_bert(), tmp_path / "hf"), tmp_path / "m", "megatron")
    with pytest.raises(ModelError, match=r"--model-type = 'bert'.*before each.*megatron_bert"):
        convert(tmp_path / "m", tmp_path / "no", "hf", Options(model_type="bert"))
    convert(tmp_path / "m", tmp_path / "yes", "hf", Options(model_type="megatron_bert"))
    model = transformers.AutoModelForPreTraining.from_pretrained(tmp_path / "yes")
    assert type(model).__name__ == "MegatronBertForPreTraining"
    with pytest.raises(ModelError, match="the checkpoint is megatron-bert"):
        convert(tmp_path / "m", tmp_path / "no", "hf", Options(model_type="gpt2"))
    with pytest.raises(ModelError, match="cannot be cut into parts"):
        convert(tmp_path / "m", tmp_path / "no", "deepspeed")


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
    done = convert(tmp_path / "m", tmp_path / "again", "hf")
    assert done.difference < 1e-4 * done.largest
    assert weights(tmp_path / "again") == weights(source)


def test_without_arguments_the_heads_have_to_be_named(tmp_path):
    source = saved(gpt2(), tmp_path / "hf")
    convert(source, tmp_path / "m", "megatron", Options(version=0))
    rewrite(tmp_path / "m", lambda content: content.pop("args"))
    with pytest.raises(ModelError, match="--num-attention-heads"):
        convert(tmp_path / "m", tmp_path / "no", "hf")
    options = Options(num_attention_heads=HEADS, vocab_size=TOKENS)
    convert(tmp_path / "m", tmp_path / "again", "hf", options)
    assert weights(tmp_path / "again") == weights(source)
    with pytest.raises(ModelError, match="has 128 rows"):
        convert(
            tmp_path / "m", tmp_path / "no", "hf", Options(num_attention_heads=4, vocab_size=129)
        )


def test_a_wrong_conversion_leaves_nothing(tmp_path, monkeypatch):
    """Weights in a wrong order are found by the logits."""
    source = saved(gpt2(), tmp_path / "hf")
    monkeypatch.setattr(
        "wavemare.megatron.weights.reorder_qkv", lambda fused, heads, source, target: fused
    )
    with pytest.raises(ModelError, match="logits of both sides differ"):
        convert(source, tmp_path / "m", "megatron")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_refusals(tmp_path):
    source = saved(gpt2(), tmp_path / "hf")
    for options, match in (
        (Options(tensor_parallel=3), "4 heads cannot be shared by 3"),
        (Options(pipeline_parallel=3), "4 layers cannot be shared by 3"),
        (Options(version=4), "versions 0 to 3"),
    ):
        with pytest.raises(ModelError, match=match):
            convert(source, tmp_path / "m", "megatron", options)
    relu = saved(gpt2(activation_function="relu"), tmp_path / "relu")
    with pytest.raises(ModelError, match="activation = 'relu'"):
        convert(relu, tmp_path / "m", "megatron")


def test_the_command(tmp_path):
    source = saved(gpt2(), tmp_path / "hf")
    words = [str(source), str(tmp_path / "m"), "--to", "megatron", "--tensor-parallel", "2"]
    result = CliRunner().invoke(app, ["convert", *words], catch_exceptions=False)
    assert result.exit_code == 0
    assert "hf to megatron:" in result.output
    assert "logits differ by at most" in result.output
    with pytest.raises(ModelError, match="Did you mean 'megatron'"):
        CliRunner().invoke(app, ["convert", *words[:2], "--to", "megatro"], catch_exceptions=False)
