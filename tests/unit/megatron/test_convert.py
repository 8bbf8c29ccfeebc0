# SPDX-License-Identifier: Apache-2.0
"""Checkpoints there and back: bytes, logits, and conversions that are stopped or refused."""

import errno
import fcntl
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

import megatron_folders as made
from megatron_models import CONFIGS, TOKENS, build, files, logits
from support.refusals import refuses
from wavemare.cli import app
from wavemare.errors import CheckpointError, ConfigError, ModelError
from wavemare.megatron import load_hf, open_checkpoint, save_megatron
from wavemare.megatron.convert import Options, convert
from wavemare.megatron.keys import MegatronWeights
from wavemare.models.deferred import from_folder, read_weights

OF_CORE = Path(__file__).parents[2] / "data" / "megatron"


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    """A Llama's folder."""
    folder = tmp_path_factory.mktemp("llama") / "hf"
    build("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def megatron(hf, tmp_path_factory):
    """The same as Megatron's."""
    folder = tmp_path_factory.mktemp("llama") / "megatron"
    convert(hf, folder, "megatron", Options(iteration=5))
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back_every_byte_is_equal(tmp_path, name):
    model = build(name)
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", "megatron")
    convert(tmp_path / "megatron", tmp_path / "again", "hf")
    assert files(tmp_path / "again") == files(tmp_path / "hf")
    # Without the configuration beside it, its arguments say what it computes.
    shutil.rmtree(tmp_path / "megatron" / "tokenizer")
    assert torch.equal(logits(load_hf(tmp_path / "megatron")), logits(model))


@pytest.mark.parametrize("name", ["gpt2", "llama, scaled positions, tied", "qwen2_moe"])
def test_large_weights_are_copied_from_file_to_file(tmp_path, monkeypatch, name):
    """As if all were large: the files are those of weights that are read."""
    build(name).save_pretrained(tmp_path / "hf")
    for way in ("read", "copied"):
        if way == "copied":
            monkeypatch.setattr("wavemare.models.source.COPIED_BYTES", 0)
        convert(tmp_path / "hf", tmp_path / way / "megatron", "megatron", Options(iteration=1))
        convert(tmp_path / way / "megatron", tmp_path / way / "hf", "hf")
    for folder in ("megatron/iter_0000001", "hf"):
        assert files(tmp_path / "copied" / folder) == files(tmp_path / "read" / folder)


@pytest.mark.parametrize("to", ["hf", "megatron"])
def test_each_side_is_read_once(hf, megatron, tmp_path, monkeypatch, to):
    """The source while it is copied, and the target when it is compared."""
    monkeypatch.setattr("wavemare.models.source.COPIED_BYTES", 0)
    source, target = (megatron if to == "hf" else hf), tmp_path / "target"
    size = sum(weight.nbytes for weight in build("llama").state_dict().values())
    padding = (128 - TOKENS) * 16 * 4 * 2 if to == "megatron" else 0  # of embedding and head
    really, counts = os.preadv, {"source": 0, "target": 0}

    def counting(file, buffers, place):
        count = really(file, buffers, place)
        is_source = Path(os.readlink(f"/proc/self/fd/{file}")).is_relative_to(source)
        counts["source" if is_source else "target"] += count
        return count

    monkeypatch.setattr(os, "preadv", counting)
    convert(source, target, to)
    assert counts == {"source": size + padding, "target": size}


@pytest.mark.parametrize(
    "folder", sorted(path.parent.name for path in OF_CORE.glob("*/reference.pt"))
)
def test_what_megatron_core_has_written(tmp_path, folder):
    convert(OF_CORE / folder, tmp_path / "hf", "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto").eval()
    reference = torch.load(OF_CORE / folder / "reference.pt", weights_only=True)
    with torch.no_grad():
        found = model(reference["ids"]).logits
    expected = reference["logits"][..., : found.shape[-1]].to(found.dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_files_in_parts_and_names_without_a_prefix(tmp_path):
    """As the first GPT-2 stands on the hub: the base model's names, and masks."""
    model = build("gpt2")
    bare = {name: w.clone() for name, w in model.transformer.state_dict().items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 20, 20)
    model.transformer.save_pretrained(tmp_path / "hf", state_dict=bare, max_shard_size="4KB")
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    assert "model.safetensors.index.json" in names
    convert(tmp_path / "hf", tmp_path / "megatron", "megatron")
    assert torch.equal(logits(load_hf(tmp_path / "megatron")), logits(model))
    convert(tmp_path / "megatron", tmp_path / "again", "hf")
    model.save_pretrained(tmp_path / "whole")
    weights = "model.safetensors"
    assert files(tmp_path / "again")[weights] == files(tmp_path / "whole")[weights]


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_another_type(tmp_path, name):
    model = build(name)
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", "megatron", Options(dtype=torch.bfloat16))
    opened = open_checkpoint(tmp_path / "megatron")
    assert opened.arguments["bf16"] is True
    half = model.bfloat16()
    half.save_pretrained(tmp_path / "half")
    convert(tmp_path / "megatron", tmp_path / "again", "hf")
    convert(tmp_path / "hf", tmp_path / "cast", "hf", Options(dtype=torch.bfloat16))
    assert files(tmp_path / "again") == files(tmp_path / "half") == files(tmp_path / "cast")


def test_what_stands_beside_the_weights(tmp_path):
    tokenizer = {"tokenizer.json": "{}", "tokenizer_config.json": "{}", "merges.txt": "a b"}
    build("qwen2").save_pretrained(tmp_path / "hf")
    for name, text in tokenizer.items():
        (tmp_path / "hf" / name).write_text(text)
    (tmp_path / "hf" / "optimizer.pt").write_text("no")
    convert(tmp_path / "hf", tmp_path / "megatron", "megatron", Options(iteration=300))
    opened = open_checkpoint(tmp_path / "megatron")
    assert opened.iteration == 300
    assert opened.arguments["tokenizer_model"] == str(tmp_path / "megatron" / "tokenizer")
    convert(tmp_path / "megatron", tmp_path / "again", "hf")
    (tmp_path / "hf" / "optimizer.pt").unlink()
    assert files(tmp_path / "again") == files(tmp_path / "hf")


def test_a_configuration_beside_that_is_another_models(megatron, tmp_path):
    shutil.copytree(megatron, tmp_path / "m")
    config = tmp_path / "m" / "tokenizer" / "config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps(content | {"rms_norm_eps": 0.5}))
    assert open_checkpoint(tmp_path / "m").config.rms_norm_eps == content["rms_norm_eps"]
    with refuses(ModelError, "--config: norm_epsilon", 0.5):
        open_checkpoint(tmp_path / "m", config.parent)


def test_an_older_iteration_has_its_own_vocabulary(tmp_path):
    """The folder beside the iterations is the newest's."""
    older, newer = build("llama"), build("llama", vocab_size=TOKENS + 1)
    save_megatron(older, tmp_path, iteration=1)
    save_megatron(newer, tmp_path, iteration=2)
    for iteration, model in ((1, older), (2, newer)):
        found = load_hf(tmp_path / f"iter_{iteration:07}")
        assert torch.equal(logits(found), logits(model))


def rewritten(step, change):
    """Change the common state of an iteration."""
    common = torch.load(step / "common.pt", weights_only=False)
    change(common)
    torch.save(common, step / "common.pt")


def test_what_nothing_describes_is_asked_for(hf, tmp_path):
    """With the heads alone, the base of positions and the epsilon would be guessed."""
    save_megatron(build("llama"), tmp_path / "m", iteration=5)
    shutil.rmtree(tmp_path / "m" / "tokenizer")
    rewritten(tmp_path / "m" / "iter_0000005", lambda common: common.pop("args"))
    with refuses(ModelError, "args", None):
        open_checkpoint(tmp_path / "m", num_attention_heads=4)
    opened = open_checkpoint(tmp_path / "m", hf)
    assert (
        opened.config.rope_parameters == transformers.AutoConfig.from_pretrained(hf).rope_parameters
    )
    wrong = build("llama", intermediate_size=25).config
    with refuses(ModelError, "weight", "model.layers.0.mlp.gate_proj.weight"):
        open_checkpoint(tmp_path / "m", wrong)


def test_samples_that_are_no_number(tmp_path):
    save_megatron(build("llama"), tmp_path, iteration=5)
    step = tmp_path / "iter_0000005"
    rewritten(step, lambda common: setattr(common["args"], "consumed_train_samples", "x"))
    with refuses(ModelError, "args.consumed_train_samples", "x"):
        open_checkpoint(tmp_path)


def test_padding(tmp_path):
    """It is cut by what is known; what nothing says stays, and is told."""
    state = made.model("llama")
    arguments = made.arguments("llama", group_query_attention=True, num_query_groups=2)
    arguments |= {"position_embedding_type": "rope", "normalization": "RMSNorm"}
    made.torch_dist(tmp_path / "m", made.keys(state, gated=True), arguments)
    said = convert(tmp_path / "m", tmp_path / "padded", "hf")
    assert "--vocab-size" in said
    assert transformers.AutoConfig.from_pretrained(tmp_path / "padded").vocab_size == made.TOKENS
    said = convert(tmp_path / "m", tmp_path / "cut", "hf", Options(vocab_size=11))
    assert "--vocab-size" not in said
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "cut")
    assert torch.equal(model.lm_head.weight, state["output_layer.weight"][:11])


def test_old_files_become_todays(tmp_path):
    """Megatron's legacy GPT on two ranks; its arguments do not even say the heads."""
    state = made.model("gpt2")
    made.legacy(tmp_path / "old", state, {}, version=0)
    heads = Options(num_attention_heads=made.HEADS)
    convert(tmp_path / "old", tmp_path / "new", "megatron", heads)
    convert(tmp_path / "old", tmp_path / "one", "hf", heads)
    convert(tmp_path / "new", tmp_path / "other", "hf")
    assert files(tmp_path / "one") == files(tmp_path / "other")
    assert open_checkpoint(tmp_path / "new").format == "torch_dist"


def test_a_model_is_saved(tmp_path):
    model = build("qwen2_moe")
    save_megatron(model, tmp_path / "m", iteration=3, consumed_samples=12)
    opened = open_checkpoint(tmp_path / "m")
    assert (opened.iteration, opened.consumed_samples) == (3, 12)
    assert opened.config.model_type == "qwen2_moe"
    assert torch.equal(logits(load_hf(tmp_path / "m")), logits(model))
    half = load_hf(tmp_path / "m", dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(half[n], w.bfloat16()) for n, w in model.state_dict().items())


def test_norms_with_their_one_in_full_precision(tmp_path):
    """Half-precision weights of norms without their one; float32 keeps all of the sum."""
    state = made.model("llama", dtype=torch.bfloat16)
    norm = "decoder.final_layernorm.weight"
    state[norm] = torch.linspace(-0.01, 0.01, len(state[norm])).bfloat16()
    arguments = made.arguments("llama", group_query_attention=True, num_query_groups=2)
    arguments |= {"position_embedding_type": "rope", "normalization": "RMSNorm"}
    arguments |= {"vocab_size": 13, "apply_layernorm_1p": True}
    made.torch_dist(tmp_path / "m", made.keys(state, gated=True), arguments)
    full = Options(dtype=torch.float32)
    assert "rounded" not in convert(tmp_path / "m", tmp_path / "full", "hf", full)
    assert "rounded" in convert(tmp_path / "m", tmp_path / "half", "hf")
    exact = state[norm].float() + 1
    for name, wanted in (("full", exact), ("half", exact.bfloat16())):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto")
        assert torch.equal(model.model.norm.weight, wanted)
    assert torch.equal(load_hf(tmp_path / "m", dtype=torch.float32).model.norm.weight, exact)


@pytest.mark.parametrize("mark", ["weights", "model_weights"])
def test_a_folder_of_nemo(megatron, hf, tmp_path, mark):
    shutil.copytree(megatron / "iter_0000005", tmp_path / "nemo" / mark)
    convert(tmp_path / "nemo", tmp_path / "hf", "hf")
    assert files(tmp_path / "hf")["model.safetensors"] == files(hf)["model.safetensors"]


def test_a_configuration_beside_a_checkpoint(megatron, hf, tmp_path):
    shutil.copytree(megatron, tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text("{}")
    convert(tmp_path / "m", tmp_path / "hf", "hf")
    assert files(tmp_path / "hf") == files(hf)


# --- conversions that are stopped ----------------------------------------------------------------


def stopped(source, target, to, least):
    """Convert in a process that is killed when so many weights stand; return how many did."""
    exists = target.exists()
    partial = (target if exists else target.parent) / f".{target.name}.partial"

    def standing():
        found = [partial / "finished", *partial.glob("*/written.jsonl")]
        return max((p.read_bytes().count(b"\n") for p in found if p.is_file()), default=0)

    child = os.fork()
    if not child:

        def watch():
            while standing() < least:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, daemon=True).start()
        convert(source, target, to)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert target.exists() == exists
    return standing()


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A model of many layers, as Hugging Face's and as Megatron's."""
    folder = tmp_path_factory.mktemp("deep")
    config = CONFIGS["qwen3"]()
    config.num_hidden_layers, config.layer_types = 40, ["full_attention"] * 40
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "hf")
    convert(folder / "hf", folder / "megatron", "megatron")
    return folder


@pytest.mark.long
@pytest.mark.parametrize(("to", "copied"), [("hf", False), ("megatron", False), ("megatron", True)])
def test_a_killed_conversion_goes_on(deep, tmp_path, monkeypatch, to, copied):
    if copied:
        monkeypatch.setattr("wavemare.models.source.COPIED_BYTES", 0)
    source, whole = (deep / ("megatron" if to == "hf" else "hf")), deep / to
    target = tmp_path / "target"
    standing = stopped(source, target, to, 60)
    assert 60 <= standing < 40 * 9
    # What stands is kept: a change of it is found, and nothing but the comparison finds it.
    saved = tmp_path / "saved"
    partial = tmp_path / ".target.partial"
    shutil.copytree(partial, saved)
    (data,) = [p for p in partial.rglob("*") if p.suffix in (".safetensors", ".distcp")]
    content = bytearray(data.read_bytes())
    if to == "hf":
        header = 8 + int.from_bytes(content[:8], "little")
        name = (partial / "finished").read_text().split("\n")[5]
        entry = json.loads(content[8:header])[name]
        content[header + entry["data_offsets"][0]] ^= 1
    else:
        line = json.loads((data.parent / "written.jsonl").read_text().split("\n")[5])[1]
        content[line["start"] + line["length"] // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises((ModelError, CheckpointError)):
        convert(source, target, to)
    assert not target.exists()
    assert not partial.exists()
    saved.rename(partial)
    convert(source, target, to)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    if to == "hf":
        assert files(target) == files(whole)
    else:
        assert torch.equal(logits(load_hf(target)), logits(load_hf(whole)))


def test_another_source_begins_anew(deep, hf, tmp_path):
    target = tmp_path / "target"
    stopped(deep / "megatron", target, "hf", 60)
    convert(hf, target, "hf", Options(dtype=torch.float32))
    assert files(target) == files(hf)


def test_two_at_once_are_refused(hf, tmp_path):
    partial = tmp_path / ".target.partial"
    partial.mkdir()
    (partial / "of the other").write_text("")
    held = os.open(partial, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with refuses(ModelError, "TARGET"):
        convert(hf, tmp_path / "target", "megatron")
    assert [path.name for path in partial.iterdir()] == ["of the other"]
    os.close(held)


# --- refusals ------------------------------------------------------------------------------------


def test_a_wrong_conversion_leaves_nothing(hf, tmp_path, monkeypatch):
    read = MegatronWeights.read
    monkeypatch.setattr(MegatronWeights, "read", lambda *args: read(*args).roll(1, 0))
    with refuses(ModelError, "weights", "model.embed_tokens.weight"):
        convert(hf, tmp_path / "target", "megatron")
    assert not list(tmp_path.iterdir())


def test_what_is_copied_wrongly_leaves_nothing(hf, megatron, tmp_path, monkeypatch):
    monkeypatch.setattr("wavemare.models.source.COPIED_BYTES", 0)
    spans, pwrite = MegatronWeights.spans, os.pwrite

    def mixed(weights, name):
        found = spans(weights, name)
        return found[::-1] if name.endswith("linear_qkv.weight") else found

    with monkeypatch.context() as wrong:
        wrong.setattr(MegatronWeights, "spans", mixed)
        with refuses(ModelError, "weights", "model.layers.0.self_attn.q_proj.weight"):
            convert(hf, tmp_path / "target", "megatron")

    def damaging(file, data, place):
        damaged = bytearray(data)
        damaged[-1] ^= place > 8  # not in the header
        return pwrite(file, damaged, place)

    monkeypatch.setattr(os, "pwrite", damaging)
    with refuses(ModelError, "weights", "model.embed_tokens.weight"):
        convert(megatron, tmp_path / "target", "hf")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("to", ["hf", "megatron"])
def test_a_disk_that_is_too_small(hf, megatron, tmp_path, monkeypatch, to):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with refuses(ModelError, "TARGET"):
        convert(megatron if to == "hf" else hf, tmp_path / "target", to)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fails_in_the_end(megatron, tmp_path, monkeypatch):
    """The target has no name before its bytes are on the disk."""
    really = os.fsync

    def failing(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("model.safetensors"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        really(descriptor)

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", failing)
        with refuses(ModelError, "TARGET", str(tmp_path / "target")):
            convert(megatron, tmp_path / "target", "hf")
    assert not (tmp_path / "target").exists()
    convert(megatron, tmp_path / "target", "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.mark.parametrize(
    ("source", "to", "options", "key"),
    [
        ("hf", "megatron", Options(vocab_size=30), "--vocab-size"),
        ("hf", "megatron", Options(config=Path("x")), "--config"),
        ("megatron", "hf", Options(iteration=3), "--iteration"),
        ("megatron", "hf", Options(vocab_size=900), "--vocab-size"),
        ("megatron", "hf", Options(vocab_size=11), "--vocab-size"),  # it says that it has more
        ("megatron", "hf", Options(config=Path("absent")), "folder"),
        ("hf", "megatro", Options(), "--to"),
    ],
)
def test_options(hf, megatron, tmp_path, source, to, options, key):
    folder = hf if source == "hf" else megatron
    with pytest.raises(ModelError) as caught:
        convert(folder, tmp_path / "target", to, options)
    assert caught.value.key == key
    assert not list(tmp_path.iterdir())


def spoiled(folder, change):
    config = folder / "config.json"
    content = json.loads(config.read_text())
    change(content)
    config.write_text(json.dumps(content))


SPOILED = [
    (lambda content: content.update(model_type="olmo2"), "model"),
    (lambda content: content.update(hidden_act="gelu"), "hidden_act"),
    (lambda content: content.update(num_hidden_layers=3), "weight"),
    (lambda content: content.update(num_hidden_layers=1), "weight"),
    (lambda content: content.update(intermediate_size=25), "weight"),
    (lambda content: content.update(tie_word_embeddings=True), "weight"),
    (lambda content: content.update(architectures=["LlamaForSequenceClassification"]), None),
]


@pytest.mark.parametrize(("change", "key"), SPOILED)
def test_a_folder_that_is_no_such_model(hf, tmp_path, change, key):
    shutil.copytree(hf, tmp_path / "hf")
    spoiled(tmp_path / "hf", change)
    if key is None:  # its weights are those of a language model, whatever it is called
        convert(tmp_path / "hf", tmp_path / "target", "megatron")
        return
    with pytest.raises(ModelError) as caught:
        convert(tmp_path / "hf", tmp_path / "target", "megatron")
    assert caught.value.key == key
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("name", "said"),
    [("absent", "no such folder"), ("x.nemo", "it is no folder"), ("any", "neither config.json")],
)
def test_what_is_no_checkpoint(tmp_path, name, said):
    (tmp_path / "x.nemo").write_text("")
    (tmp_path / "any").mkdir()
    with pytest.raises(CheckpointError, match=said):
        convert(tmp_path / name, tmp_path / "target", "hf")


def test_a_checkpoint_of_an_engine(tmp_path):
    (tmp_path / "mp_rank_00_model_states.pt").write_text("")
    with refuses(ModelError, "SOURCE"):
        convert(tmp_path, tmp_path / "target", "hf")


@pytest.mark.parametrize("to", ["hf", "megatron"])
def test_numbers_that_become_infinite(tmp_path, to):
    """Infinities that the source has stay; what is out of the range of a type is refused."""
    model = build("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 2] = -torch.inf
    model.save_pretrained(tmp_path / "hf")
    half = Options(dtype=torch.float16)
    convert(tmp_path / "hf", tmp_path / "infinite", to, half)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 2] = -1e5
    model.save_pretrained(tmp_path / "hf")
    with refuses(ModelError, "weight", "model.layers.1.mlp.up_proj.weight") as caught:
        convert(tmp_path / "hf", tmp_path / "target", to, half)
    assert caught.value.value == "model.layers.1.mlp.up_proj.weight"
    with refuses(ModelError, "weight", "model.layers.1.mlp.up_proj.weight"):
        if to == "megatron":
            save_megatron(model, tmp_path / "infinite" / "wide")
            load_hf(tmp_path / "infinite" / "wide", dtype=torch.float16)
        else:
            read_weights(from_folder(tmp_path / "hf", dtype=torch.float16))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "infinite"]


def test_one_expert_per_token(tmp_path):
    """Its probability is 1 if it is normalised, for which Megatron has no router."""
    model = build("mixtral", num_experts_per_tok=1)
    model.save_pretrained(tmp_path / "hf")
    with refuses(ModelError, "num_experts_per_tok", 1):
        convert(tmp_path / "hf", tmp_path / "target", "megatron")
    with refuses(ModelError, "num_experts_per_tok", 1):
        save_megatron(build("qwen3_moe", num_experts_per_tok=1), tmp_path / "target")
    whole = build("qwen2_moe", num_experts_per_tok=1, norm_topk_prob=False)
    save_megatron(whole, tmp_path / "target")
    assert torch.equal(logits(load_hf(tmp_path / "target")), logits(whole))


@pytest.mark.parametrize("wrong", [{"iteration": -3}, {"consumed_samples": -1}, {"iteration": 0.5}])
def test_numbers_that_a_checkpoint_cannot_have(tmp_path, wrong):
    with pytest.raises(ModelError) as caught:
        save_megatron(build("llama"), tmp_path / "m", **wrong)
    assert [caught.value.key] == list(wrong)
    assert not list(tmp_path.iterdir())


def test_a_model_and_a_disk_that_is_too_small(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ModelError, match="the disk has 1,000") as caught:
        save_megatron(build("llama"), tmp_path / "m")
    assert str(caught.value).count("ree space") == 1  # one thing to do
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("to", ["hf", "megatron"])
def test_the_folder_where_one_stands(hf, megatron, tmp_path, monkeypatch, to):
    """An empty folder that exists stays the same one: it may be a mount, or a shell's."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = os.stat(".").st_ino
    convert(megatron if to == "hf" else hf, ".", to)
    assert os.stat(tmp_path / "here").st_ino == before
    if to == "hf":
        assert files(Path(".")) == files(hf)
    else:
        assert torch.equal(logits(load_hf(".")), logits(load_hf(megatron)))
    assert not list(Path(".").glob(".*.partial"))
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_a_killed_conversion_into_a_folder_goes_on(deep, tmp_path):
    (tmp_path / "target").mkdir()
    source, target = deep / "megatron", tmp_path / "target"
    stopped(source, target, "hf", 60)
    convert(source, target, "hf")
    assert files(target) == files(deep / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert not any(path.is_dir() for path in target.iterdir())


def test_a_target_that_exists(hf, tmp_path):
    (tmp_path / "file").write_text("mine")
    for target in (tmp_path, tmp_path / "file"):
        with refuses(ModelError, "TARGET"):
            convert(hf, target, "megatron")
    (tmp_path / "empty").mkdir()
    convert(hf, tmp_path / "empty", "megatron")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


def test_the_command(hf, tmp_path):
    words = ["convert", str(hf), str(tmp_path / "m"), "--to", "megatron", "--iteration", "7"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0
    assert "hf to megatron:" in result.output
    assert (tmp_path / "m" / "latest_checkpointed_iteration.txt").read_text() == "7"
    with refuses(ConfigError, "--dtype", "float"):
        CliRunner().invoke(app, [*words, "--dtype", "float"], catch_exceptions=False)
    assert TOKENS == open_checkpoint(tmp_path / "m").config.vocab_size
