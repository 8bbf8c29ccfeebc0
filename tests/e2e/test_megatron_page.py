# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/megatron.md, as they are written, one after another."""

import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def blocks(language):
    text = (ROOT / "docs" / "megatron.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_page_runs_as_written(command, tmp_path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("results"))
    (tmp_path / "tokenizer.py").write_text(blocks("python")[0])
    command("python", "tokenizer.py").check()
    for block in blocks("bash"):
        for line in block.replace("\\\n", " ").strip().splitlines():
            words = [word.strip("'") for word in re.findall(r"'[^']*'|\S+", line)]
            ended = command(*words, timeout=400).check()
            if words[1] == "convert":
                assert "logits differ by at most" in ended.output
    assert (tmp_path / "named" / "model" / "config.json").is_file()
    first, again = (
        (tmp_path / folder / "model.safetensors").read_bytes()
        for folder in ("runs/gpt-pretrain/model", "again")
    )
    assert first == again
