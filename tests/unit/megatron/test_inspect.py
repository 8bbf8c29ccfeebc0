# SPDX-License-Identifier: Apache-2.0
"""What ``wavemare inspect`` says of a folder."""

import json
import shutil

import pytest
import torch
import transformers
import typer.testing
from safetensors.torch import save_file

import megatron_folders as made
from wavemare.cli import app
from wavemare.errors import CheckpointError, ModelError
from wavemare.megatron.inspect import inspect


def facts(folder):
    answer = typer.testing.CliRunner().invoke(app, ["inspect", str(folder), "--json"])
    assert answer.exit_code == 0, answer.output
    return json.loads(answer.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["torch_dist", "torch", "fsdp_dtensor"])
def test_a_checkpoint_of_megatron(tmp_path, kind):
    state = made.model("qwen2-moe", dtype=torch.bfloat16)
    args = made.arguments("qwen2-moe", moe_router_topk=2, vocab_size=13)
    args |= {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}
    if kind == "torch_dist":
        content = made.keys(state, ranks=2)
        content["optimizer.state.exp_avg.output_layer.weight"] = [((0,), torch.ones(2))]
        made.torch_dist(tmp_path, content, args)
    elif kind == "torch":
        made.rank_files(tmp_path, state, args, tp=2, ep=2)
    else:
        made.fsdp_dtensor(tmp_path, state, args)
    found = facts(tmp_path)
    count = sum(weight.numel() for weight in state.values())
    assert found["format"] == f"Megatron {kind}"
    assert (found["iteration"], found["samples trained on"]) == (5, 40)
    assert (found["tensors"], found["parameters"]) == (len(state), count)
    assert (found["bytes"], found["data types"]) == (2 * count, ["bfloat16"])
    assert (found["layers"], found["hidden size"], found["padded vocabulary"]) == (4, 8, 16)
    assert (found["saved with"]["tensor"], found["saved with"]["expert"]) == (2, 2)
    assert found["experts per token"] == 2
    assert found["keys"]["decoder.layers.N.mlp.router.weight"] == [4, 8]
    assert ("fully_reshardable" in found["optimizer"]) == (kind == "torch_dist")
    assert any("tokenizer" in line for line in found["missing"])
    assert any("optimizer" in line for line in found["missing"]) == (kind != "torch_dist")


def test_a_folder_of_hugging_face(tmp_path):
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(vocab_size=16, num_attention_heads=4, **sizes)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size="2KB")
    found = facts(tmp_path)
    assert (found["format"], found["model"]) == ("Hugging Face", "llama")
    assert found["parameters"] == model.num_parameters()
    assert (found["layers"], found["vocabulary"]) == (2, 16)
    assert found["missing"] == ["tokenizer"]
    sorted(tmp_path.glob("*.safetensors"))[0].unlink()
    assert any("weight" in line for line in facts(tmp_path)["missing"])


def test_only_the_files_that_are_read_are_counted(tmp_path):
    """A folder may hold the same weights twice: in one file and in parts, or by other names."""
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    whole, part = tmp_path / "model.safetensors", sorted(tmp_path.glob("model-*"))[0]
    save_file({"of another format": torch.ones(3)}, tmp_path / "consolidated.safetensors")
    assert facts(tmp_path)["parameters"] == model.num_parameters()
    model.save_pretrained(tmp_path / "whole")
    shutil.copy(tmp_path / "whole" / "model.safetensors", whole)
    part.unlink()
    found = facts(tmp_path)
    assert found["parameters"] == model.num_parameters()
    assert found["missing"] == ["tokenizer"]


def test_a_configuration_beside_a_checkpoint_of_megatron(tmp_path):
    made.torch_dist(tmp_path, made.keys(made.model("llama")), made.arguments("llama"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert facts(tmp_path)["format"] == "Megatron torch_dist"


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (["latest", "5/mp_rank_00_model_states.pt"], "DeepSpeed"),
        (["latest", "5/wavemare.json", "5/layer_00-model_states.pt"], "wavemare"),
        (["latest", "5/zero/weight/fp32.pt"], "universal"),
        (["mp_rank_00_model_states.pt"], "DeepSpeed"),
    ],
)
def test_a_checkpoint_of_an_engine(tmp_path, files, kind):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        text = "5" if name == "latest" else '{"topology": {"pipe": 2}}'
        (tmp_path / name).write_text(text)
    assert kind in facts(tmp_path)["format"]


def test_something_else(tmp_path):
    (tmp_path / "any.txt").write_text("any")
    with pytest.raises(CheckpointError):
        inspect(tmp_path)
    (tmp_path / "latest").write_text("5")
    with pytest.raises(CheckpointError):
        inspect(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        inspect(tmp_path / "any.txt")
    assert str(tmp_path) in caught.value.remedy
    (tmp_path / "run" / "model").mkdir(parents=True)
    for folder in (tmp_path / "run", tmp_path / "run" / "model"):
        (folder / "config.json").write_text("{}")
    with pytest.raises(ModelError) as refused:
        inspect(tmp_path / "run")
    assert str(tmp_path / "run" / "model") in refused.value.remedy


def test_in_words(tmp_path):
    made.torch_dist(tmp_path, made.keys(made.model("llama")), made.arguments("llama"))
    answer = typer.testing.CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert answer.exit_code == 0
    assert "torch_dist" in answer.stdout
    assert "decoder.layers.N.mlp.linear_fc1.weight [24, 8]" in answer.stdout
