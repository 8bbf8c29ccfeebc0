# SPDX-License-Identifier: Apache-2.0
"""Scripts of docs/trl.md and docs/lora.md; the recipe of DPO beside TRL (`make test-tuning`)."""

import json
import re
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import peft
import pytest
import transformers

from wavemare.data.chat import read_chats
from wavemare.data.preferences import iterate_pairs
from wavemare.data.sources import resolve
from wavemare.data.tokenizer import train_tokenizer
from wavemare.report import read_run

RECIPES = Path(str(files("wavemare.recipes")))
DOCS = Path(__file__).resolve().parents[2] / "docs"
TRL, LORA = ((DOCS / name).read_text() for name in ("trl.md", "lora.md"))
LINES = [
    f"stage {n % 5} holds batch {n % 7} and sends it on {'again ' * (n % 4)}" for n in range(60)
]
pytestmark = [pytest.mark.nightly, pytest.mark.world_size(2)]


def block(page, language, word):
    """The one block of a page that has a word."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (text,) = [text for text in found if word in text]
    return text


def line(page, word):
    (found,) = re.findall(rf"^torchrun .*{word}.*$", page, re.MULTILINE)
    return found.split()


@pytest.mark.skipif(find_spec("trl") is None, reason="needs trl")
@pytest.mark.parametrize(
    ("script", "figure"), [("sft", "mean_token_accuracy"), ("dpo", "rewards/margins")]
)
def test_trainers_of_trl_train_in_stages_as_the_page_says(command, tmp_path, script, figure):
    (tmp_path / f"{script}.py").write_text(block(TRL, "python", f"{script.upper()}Trainer("))
    (tmp_path / "stages.json").write_text(block(TRL, "json", "stages"))
    rows = [{"text": text} for text in LINES]
    pairs = [{"prompt": text, "chosen": f" {text}", "rejected": " it waits"} for text in LINES]
    for name, data in (("chats", rows), ("pairs", pairs)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    ended = command(*line(TRL, f"{script}.py"), environment={"HF_HUB_OFFLINE": "1"}).check()
    found = re.findall(r"\{'loss': '?([\d.e-]+)", ended.output)
    assert len(found) == 2
    assert float(found[1]) < float(found[0])
    assert figure in ended.output
    assert (tmp_path / script / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("package", ["bitsandbytes", "torchao"])
def test_a_quantized_base_trains_in_stages_as_the_page_says(command, tmp_path, package):
    if find_spec(package) is None:
        pytest.skip(f"needs {package}")
    script = block(LORA, "python", "BitsAndBytesConfig(")
    if package == "torchao":
        lines = block(LORA, "python", "TorchAoConfig(")
        script, count = re.subn(r"^quantized = .*?^\)\n", lines, script, flags=re.M | re.S)
        assert count == 1
    (tmp_path / "qlora.py").write_text(script)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    command(*line(LORA, "qlora.py")).check()
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    peft.PeftModel.from_pretrained(base, tmp_path / "out" / "adapter")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged")
    assert not hasattr(merged.config, "quantization_config")


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FIGURES = [f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")]
LAYOUTS = {
    "stages": (4, False, ["wavemare.pipeline.stages=2"]),
    "split": (4, True, ["wavemare.tensor_parallel.size=2"]),
    "ZeRO 1": (4, False, ["zero_optimization.stage=1"]),
    "whole weights": (0, True, ["zero_optimization.stage=2"]),
}
"""By name: the rank of LoRA, whether rows are chats, and changes of the recipe's JSON."""


def write_pairs(file, *, chats):
    """Write pairs of which a multiple of four is to train on; return these."""
    rows = [
        {
            "prompt": LINES[n],
            "chosen": f" {' '.join(LINES[n + 1].split()[: 2 + n % 5])}",
            "rejected": f" {' '.join(LINES[n + 2].split()[: 3 + n % 4])}",
        }
        for n in range(30)
    ]
    if chats:
        roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
        rows = [
            {name: [{"role": roles[name], "content": text}] for name, text in row.items()}
            for row in rows
        ]
    while True:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        train, _ = read_chats(resolve(str(file)), file.parent / f"rows-{len(rows)}", iterate_pairs)
        if not len(train) % 4:
            return [json.loads(text) for text in train["row"]]
        rows.pop()


@pytest.mark.skipif(find_spec("trl") is None, reason="needs trl")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_recipe_has_the_losses_and_rewards_of_trl_in_one_process(
    command, recipe, tmp_path, layout
):
    lora, chats, changes = LAYOUTS[layout]
    rows = write_pairs(tmp_path / "pairs.jsonl", chats=chats)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = train_tokenizer(LINES, 300, kind="gpt")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    transformers.set_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), num_attention_heads=4, initializer_range=0.2, **sizes
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")

    program = Path(__file__).with_name("programs") / "trl_dpo.py"
    words = [tmp_path / "model", tmp_path / "train.jsonl", tmp_path / "trl.json", lora]
    command("python", program, *words, environment={"HF_HUB_OFFLINE": "1"}).check()
    expected = json.loads((tmp_path / "trl.json").read_text())

    given = {
        **{"model": tmp_path / "model", "data": tmp_path / "pairs.jsonl", "beta": 0.5},
        **{"output": tmp_path / "run", "cache": tmp_path / "cache", "sequence_length": 64},
        **{"max_steps": 4, "log_interval": 1, "eval_interval": 4, "lr": 1e-3, "trace_steps": 0},
        **({"lora_r": lora} if lora else {}),
    }
    options = [word for name, value in given.items() for word in (f"--{name}", value)]
    sizes = [f"train_batch_size={len(rows)}", "train_micro_batch_size_per_gpu=2"]
    changes = ["scheduler=null", *sizes, *changes]
    config = RECIPES / "llama" / "dpo.json"
    recipe("llama/dpo", "--deepspeed_config", config, *options, "--set", *changes).check()
    found = [line for line in read_run(tmp_path / "run").metrics if "loss" in line]
    assert len(found) == len(expected) == 4
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("loss", *FIGURES):
            assert ours[name] == pytest.approx(theirs[name], rel=2e-3, abs=2e-3), name
    assert found[-1]["loss"] < found[0]["loss"] - 0.02
