# SPDX-License-Identifier: Apache-2.0
"""Each recipe, under both engines by configuration alone, from text to a model that is used."""

import json
import math
import re
import shutil
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    set_seed,
)

from wavemare.data.indexed import IndexedWriter
from wavemare.data.tokenizer import train_tokenizer
from wavemare.report import read_run
from wavemare.report.runs import category

RECIPES = Path(str(files("wavemare.recipes")))
SLOW = pytest.mark.nightly
TINY_LLAMA_OF_MEGATRON = (
    "--num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --swiglu "
    "--group-query-attention --num-query-groups 2 --max-position-embeddings 128 "
    "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--use-mcore-models"
)
GPT_ENGINES = ["pipeline", pytest.param("zero", marks=SLOW), pytest.param("wave", marks=SLOW)]
BERT_ENGINES = ["zero", pytest.param("pipeline", marks=SLOW), pytest.param("wave", marks=SLOW)]
SMALL_BERT = {
    "model_type": "bert",
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def check_run_folder(folder, *, steps=20, batch=32):
    """Check what every run leaves, and return its metrics and results."""
    lines = read_run(folder).metrics
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == steps
    assert losses[-1] < losses[0]
    assert len([line for line in lines if "eval_loss" in line]) == 2
    # DeepSpeed's schedule begins with two steps at rate 0.
    rates = [line["learning_rate"] for line in lines if "loss" in line]
    assert rates[0] == 0
    assert all(rate > 0 for rate in rates[2:])
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    config = json.loads((folder / "config.json").read_text())
    assert config["configuration"]["batch"]["train_batch_size"] == batch
    assert config["environment"]["world_size"] == 2
    assert (folder / "checkpoints" / "latest").read_text() == f"step-{steps:06d}"
    check_recorded(folder, steps)
    return losses, json.loads((folder / "summary.json").read_text())["results"]


def check_recorded(folder, steps):
    """Check what both ranks noted, by what a report reads."""
    facts = read_run(folder)
    assert [rank.rank for rank in facts.trace.ranks] == [0, 1]
    for rank in facts.trace.ranks:
        assert rank.first_step == 11
        assert len(rank.steps) == 4
        kinds = {category(span.text) for span in rank.spans}
        assert kinds >= {"forward", "backward", "step"} or "waves" in str(rank.spans)
    memory = [(e["rank"], e["step"]) for e in facts.events if e["kind"] == "memory"]
    assert sorted(memory) == [(rank, step) for rank in (0, 1) for step in range(1, steps + 1)]
    saved = [e["tag"] for e in facts.events if e["kind"] == "checkpoint" and e["rank"] == 0]
    assert saved == [each.tag for each in facts.checkpoints]
    assert all(each.complete for each in facts.checkpoints)


def check_screen(output):
    assert output.count("samples per step") == 1
    assert re.search(r"learning rate +[0-9.e-]+, \w", output), output
    assert "tokens/s" in output
    assert "results" in output
    assert "Warning" not in output, output


@pytest.mark.parametrize("engine", GPT_ENGINES)
def test_gpt_pretraining_and_finetuning(
    command, recipe, small_options, recipe_config, text_folder, tmp_path, engine
):
    pretrained, finetuned = tmp_path / "pretrained", tmp_path / "finetuned"
    config = recipe_config("gpt/pretrain", engine)
    options = small_options("gpt", pretrained)
    ended = command("wavemare", "train", "gpt", "--config", config, *options).check()
    check_screen(ended.output)
    losses, results = check_run_folder(pretrained, batch=16)
    assert results["eval_loss"] < losses[0] - 0.5

    model = AutoModelForCausalLM.from_pretrained(pretrained / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(pretrained / "model")
    assert model.config.num_hidden_layers == 4
    inputs = tokenizer((text_folder / "00.txt").read_text()[:100], return_tensors="pt")
    with torch.no_grad():
        loss = model(**inputs, labels=inputs["input_ids"]).loss
    assert loss < losses[0] - 0.5

    config = recipe_config("gpt/finetune", engine)
    options = small_options(
        "gpt", finetuned, model=pretrained / "model", vocab_size=None, model_config=None
    )
    recipe("gpt/finetune", "--deepspeed_config", config, *options).check()
    continued, _ = check_run_folder(finetuned, batch=16)
    assert continued[0] < losses[0] - 0.5, "finetuning did not start from the pretrained weights"

    page = tmp_path / "report.html"
    command("wavemare", "report", pretrained, finetuned, "--output", page).check()
    html = page.read_text()
    for curve in (losses, continued):
        assert json.dumps(curve, separators=(",", ":")) in html


@pytest.mark.nightly
def test_experts_are_pretrained_on_two_ranks(command, small_options, recipe_config, tmp_path):
    options = small_options("llama", tmp_path / "run")
    config = recipe_config("llama/pretrain", "experts")
    shape = json.loads((RECIPES / "llama" / "model_experts.json").read_text())
    shape |= {"hidden_size": 32, "moe_intermediate_size": 32, "head_dim": 8}
    Path(options[options.index("--model_config") + 1]).write_text(json.dumps(shape))
    command("wavemare", "train", "llama", "--config", config, *options).check()
    losses, results = check_run_folder(tmp_path / "run", batch=16)
    assert results["eval_loss"] < losses[0] - 0.3


@pytest.mark.nightly
def test_replicas_with_local_steps_are_pretrained(command, small_options, recipe_config, tmp_path):
    values = json.loads(recipe_config("gpt/pretrain", "local_steps").read_text())
    one_host = {"replica": "rank", "every": 8, "overlap": 2, "warmup_steps": 4}
    values["wavemare"]["local_steps"] |= one_host
    config = tmp_path / "config.json"
    config.write_text(json.dumps(values))
    options = small_options("gpt", tmp_path / "run")
    command("wavemare", "train", "gpt", "--config", config, *options).check()
    losses, results = check_run_folder(tmp_path / "run", batch=16)
    assert results["eval_loss"] < losses[0] - 0.5
    lines = read_run(tmp_path / "run").metrics
    assert sum("outer_bytes" in line for line in lines) == 7  # of 16 steps, one every 2


def write_chats(folder):
    """Forty chats, four that are too long, and a template without markers for the assistant."""
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    with (folder / "chats.jsonl").open("w") as file:
        for number in range(40):
            asked = {"role": "user", "content": f"number {number}"}
            said = " ".join(names[int(digit)] for digit in str(number))
            row = {"messages": [asked, {"role": "assistant", "content": said}]}
            file.write(json.dumps(row) + "\n")
        for number in range(4):
            asked = {"role": "user", "content": f"number {number} " * 100}
            row = {"messages": [asked, {"role": "assistant", "content": names[number]}]}
            file.write(json.dumps(row) + "\n")
    (folder / "template.txt").write_text(
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    return {"data": folder / "chats.jsonl", "chat_template": folder / "template.txt"}


@pytest.mark.parametrize(
    ("engine", "sft"),
    [
        ("pipeline", {}),
        pytest.param("wave", {"no_packing": True}, marks=SLOW),
        pytest.param("pipemare", {"lora_r": 4}, marks=SLOW),
        pytest.param("zero", {"lora_r": 4, "merge": True}, marks=SLOW),
    ],
)
def test_llama_pretraining_and_fine_tuning(
    recipe, small_options, recipe_config, tmp_path, engine, sft
):
    pretrained, tuned = tmp_path / "pretrained", tmp_path / "tuned"
    config, options = recipe_config("llama/pretrain", engine), small_options("llama", pretrained)
    if engine == "pipeline":  # by Megatron's options, and on by way of its checkpoint
        at = options.index("--model_config")
        del options[at : at + 2]
        options += [*TINY_LLAMA_OF_MEGATRON.split(), "--save-megatron", tmp_path / "megatron"]
        sft = {"load": tmp_path / "megatron", "use_checkpoint_args": True}
    check_screen(recipe("llama/pretrain", "--deepspeed_config", config, *options).check().output)
    losses, results = check_run_folder(pretrained, batch=16)
    assert results["eval_loss"] < losses[0] - 0.3

    if "lora_r" in sft:
        pytest.importorskip("peft")
    config = recipe_config("llama/sft", "zero" if engine == "zero" else "pipeline")
    values = {
        "model": None if "load" in sft else pretrained / "model",
        **write_chats(tmp_path),
        "sequence_length": 128,
        "lr": 5e-3,
        "vocab_size": None,
        "model_config": None,
        **sft,
    }
    options = small_options("llama", tuned, **values)
    ended = recipe("llama/sft", "--deepspeed_config", config, *options).check()
    assert "4 of 44 rows are longer than 128 tokens" in ended.output
    assert re.search(r"u:number \d+<\|endoftext\|>a:»[a-z ]+<\|endoftext\|>«", ended.output)
    losses, results = check_run_folder(tuned, batch=16)
    assert results["eval_loss"] < losses[0] - 0.1
    evaluated = {m["step"]: m["eval_loss"] for m in read_run(tuned).metrics if "eval_loss" in m}
    assert results["best step"] == min(evaluated, key=evaluated.get)
    assert (tuned / "model" / "adapter_config.json").exists() == (sft == {"lora_r": 4})
    AutoModelForCausalLM.from_pretrained(tuned / "model")
    assert AutoTokenizer.from_pretrained(tuned / "model").chat_template

    if engine == "zero":
        values |= {"max_steps": 22, "eval_interval": 1, "save_interval": 1}
        words = [*small_options("llama", tuned, **values), "--resume"]
        best = tuned / "best.json"
        best.unlink()
        best.mkdir()  # cannot be written: the run ends between an export and its checkpoint
        assert recipe("llama/sft", "--deepspeed_config", config, *words).code == 1
        best.rmdir()
        for done in (20, 22):  # the second time no step is left, and the model is gone
            ended = recipe("llama/sft", "--deepspeed_config", config, *words).check()
            assert f"resumed after step {done}" in ended.output
            assert read_run(tuned).summary["results"]["best step"] in (done + 1, 22)
            AutoModelForCausalLM.from_pretrained(tuned / "model")
            shutil.rmtree(tuned / "model")


def write_preferences(folder):
    """Write a small model with its tokenizer, another one of its size, and pairs."""
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    rows = [
        {"prompt": f"{n} is", "chosen": f" {names[n % 10]}", "rejected": f" {names[n % 7 - 1]}."}
        for n in range(60)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = train_tokenizer([json.dumps(row) for row in rows], 300, kind="gpt")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=4, **sizes)
    for number, name in enumerate(("model", "other")):
        set_seed(number)
        LlamaForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("pipeline", {"lora_r": 4}),
        pytest.param("zero", {"reference": "other"}, marks=SLOW),
        pytest.param("wave", {}, marks=SLOW),
        pytest.param("pipemare", {"lora_r": 4, "merge": True}, marks=SLOW),
    ],
)
def test_preference_tuning(recipe, small_options, recipe_config, tmp_path, engine, options):
    if "lora_r" in options:
        pytest.importorskip("peft")
    write_preferences(tmp_path)
    run, config = tmp_path / "run", recipe_config("llama/dpo", engine)
    values = {
        **{"model": tmp_path / "model", "data": tmp_path / "pairs.jsonl", "vocab_size": None},
        **{"model_config": None, "lr": 5e-3, **options},
    }
    if "reference" in options:
        values["reference"] = tmp_path / "other"
    words = small_options("llama", run, **values)
    if engine == "pipemare":
        words += ["--set", "wavemare.pipeline.stages=2"]
    ended = recipe("llama/dpo", "--deepspeed_config", config, *words).check()
    assert "the answer in »«" in ended.output
    losses, results = check_run_folder(run, batch=16)
    # The learning rate begins at 0, and the model as its own reference.
    assert (losses[0] == pytest.approx(math.log(2), abs=1e-6)) == ("reference" not in options)
    lines = [line for line in read_run(run).metrics if "eval_loss" in line]
    assert lines[-1]["eval_rewards/margins"] > lines[0]["eval_rewards/margins"]
    assert results["eval_loss"] == pytest.approx(min(line["eval_loss"] for line in lines))
    adapted = (run / "model" / "adapter_config.json").exists()
    assert adapted == ("lora_r" in options and "merge" not in options)
    AutoModelForCausalLM.from_pretrained(run / "model")

    if engine == "pipeline":  # it does not ask the reference again
        before = (run / "reference.npz").stat().st_mtime_ns
        words = [*small_options("llama", run, **{**values, "max_steps": 22}), "--resume"]
        for done in (20, 22):  # the second time no step is left, and the model is gone
            ended = recipe("llama/dpo", "--deepspeed_config", config, *words).check()
            assert f"resumed after step {done}" in ended.output
            assert (run / "reference.npz").stat().st_mtime_ns == before
            shutil.rmtree(run / "model")
        assert read_run(run).summary["results"]["best step"] == 22
        more = [line["loss"] for line in read_run(run).metrics if "loss" in line][20:]
        assert max(more) < losses[0] - 0.02


@pytest.mark.parametrize("engine", BERT_ENGINES)
def test_bert_pretraining_and_finetuning(recipe, small_options, recipe_config, tmp_path, engine):
    pretrained, finetuned = tmp_path / "pretrained", tmp_path / "finetuned"
    config = recipe_config("bert/pretrain", engine)
    options = small_options("bert", pretrained)
    ended = recipe("bert/pretrain", "--deepspeed_config", config, *options).check()
    check_screen(ended.output)
    assert "->" in ended.output
    check_run_folder(pretrained)
    AutoModelForMaskedLM.from_pretrained(pretrained / "model")

    table = tmp_path / "reviews.tsv"
    rows = [
        f"{'good' if i % 2 else 'bad'} and number {i}\t{'pos' if i % 2 else 'neg'}"
        for i in range(200)
    ]
    table.write_text("text\tlabel\n" + "\n".join(rows) + "\n")
    config = recipe_config("bert/finetune", engine)
    options = small_options(
        "bert",
        finetuned,
        model=pretrained / "model",
        data=table,
        vocab_size=None,
        model_config=None,
    )
    recipe("bert/finetune", "--deepspeed_config", config, *options).check()
    _, results = check_run_folder(finetuned)
    assert 0 <= results["macro_f1"] <= 1
    assert results["accuracy"] >= results["majority accuracy"] - 0.1

    model = AutoModelForSequenceClassification.from_pretrained(finetuned / "model")
    assert sorted(model.config.id2label.values()) == ["neg", "pos"]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_a_sparse_configuration_says_what_it_saves(
    command, small_options, recipe_config, tmp_path, kind
):
    options = small_options("gpt", tmp_path / "run")
    shape = options.index("--model_config") + 1
    tied = {**json.loads(Path(options[shape]).read_text()), "tie_word_embeddings": kind == "tied"}
    options[shape] = str(tmp_path / "model.json")
    Path(options[shape]).write_text(json.dumps(tied))
    config = recipe_config("gpt/pretrain", "sparse")
    ended = command("wavemare", "train", "gpt", "--config", config, *options).check()
    check_run_folder(tmp_path / "run", batch=16)
    said = re.search(r"sparse collective \(auto\).*? (\d+) % of", ended.output, re.DOTALL)
    share = int(said[1])
    assert (share == 100) == (kind == "tied")


@pytest.mark.nightly
def test_the_default_classification_corpus_beats_the_majority(
    command, small_options, recipe_config, tmp_path
):
    model = {**SMALL_BERT, "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256}
    (tmp_path / "model.json").write_text(json.dumps(model))
    config = json.loads(recipe_config("bert/finetune", "pipeline").read_text())
    config["optimizer"]["params"]["lr"] = 2e-3
    config["wavemare"]["pipeline"]["partition"] = "parameters"
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = small_options(
        "bert",
        tmp_path / "run",
        data=None,
        model_config=tmp_path / "model.json",
        vocab_size=1000,
        max_steps=100,
        sequence_length=64,
        eval_interval=50,
    )
    command(
        "wavemare", "train", "bert/finetune", "--config", tmp_path / "config.json", *options
    ).check()
    _, results = check_run_folder(tmp_path / "run", steps=100)
    assert results["majority accuracy"] < 0.2
    assert results["accuracy"] > 1.5 * results["majority accuracy"]


def write_table(folder, kind, text_folder):
    texts = [file.read_text() for file in sorted(text_folder.glob("*.txt"))]
    if kind == "jsonl":
        rows = "".join(json.dumps({"body": text}) + "\n" for text in texts)
        (folder / "rows.jsonl").write_text(rows)
        return {"data": folder / "rows.jsonl", "text_column": "body"}
    tokenizer = train_tokenizer(texts, 300, kind="gpt")
    tokenizer.save_pretrained(folder / "tokenizer")
    with IndexedWriter(folder / "corpus", "u2") as writer:
        for text in texts:
            writer.add_sequence(tokenizer(text)["input_ids"])
            writer.end_document()
    tokens = {"tokenizer": folder / "tokenizer", "vocab_size": None}
    return {"data": folder / "corpus", **tokens}


@pytest.mark.parametrize("kind", [pytest.param("jsonl", marks=SLOW), "megatron"])
def test_other_kinds_of_data_reach_the_model(
    recipe, small_options, recipe_config, text_folder, tmp_path, kind
):
    data = write_table(tmp_path, kind, text_folder)
    run = tmp_path / "run"
    options = small_options("gpt", run, max_steps=2, trace_steps=0, **data)
    config = recipe_config("gpt/pretrain", "pipemare")
    recipe("gpt/pretrain", "--deepspeed_config", config, *options).check()
    results = json.loads((run / "summary.json").read_text())["results"]
    assert results["eval_loss"] < 6
    assert not (run / "timeline").exists()
    if kind == "jsonl":
        assert results["bigram cross-entropy"] < results["unigram cross-entropy"] < 4


@pytest.mark.nightly
@pytest.mark.timeout(6000)
def test_the_default_run_ends_below_the_bigram_entropy(command, tmp_path):
    command("wavemare", "train", "gpt", "--output", tmp_path / "run", timeout=5600).check()
    results = read_run(tmp_path / "run").summary["results"]
    assert results["eval_loss"] < results["bigram cross-entropy"]
    assert results["bigram cross-entropy"] < results["unigram cross-entropy"]
