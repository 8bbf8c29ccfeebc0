# SPDX-License-Identifier: Apache-2.0
"""The scripts of docs/trl.md, and docs/lora.md's for quantized bases (``make test-tuning``)."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import peft
import pytest
import transformers

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
