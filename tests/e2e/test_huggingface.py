# SPDX-License-Identifier: Apache-2.0
"""The script of docs/huggingface.md, run as it stands there."""

import ast
import re
from pathlib import Path

import pytest
from transformers import AutoModelForMaskedLM

PAGE = Path(__file__).resolve().parents[2] / "docs" / "huggingface.md"
SECTION = PAGE.read_text().partition("A whole script, `mlm.py`")[2].partition("\n## ")[0]


def block(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)[0]


@pytest.mark.world_size(2)
def test_a_script_trains_a_pipeline_with_one_line_more(command, tmp_path):
    (tmp_path / "mlm.py").write_text(block("python"))
    (tmp_path / "ds.json").write_text(block("json"))
    lines = [
        f"stage {n % 5} holds batch {n % 7} and sends it on {'again ' * (n % 4)}" * 2
        for n in range(60)
    ]
    (tmp_path / "notes.txt").write_text("\n".join(lines))
    (line,) = re.findall("^torchrun .*$", SECTION, re.MULTILINE)
    ended = command(*line.split(), environment={"DS_ACCELERATOR": "cpu"}).check()
    logged = [ast.literal_eval(found) for found in re.findall(r"\{'loss'.*?\}", ended.output)]
    assert len(logged) == 4
    assert float(logged[-1]["loss"]) < float(logged[0]["loss"])
    assert "eval_loss" in ended.output
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    assert model.config.num_hidden_layers == 4
