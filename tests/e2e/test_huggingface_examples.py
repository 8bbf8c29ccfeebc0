# SPDX-License-Identifier: Apache-2.0
"""The scripts of docs/trainer-scripts.md, and transformers' own examples.

transformers' own are no part of any package: WAVEMARE_TRANSFORMERS_EXAMPLES names a folder of them.
"""

import ast
import importlib.util
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "trainer-scripts.md"
SCRIPT, EXAMPLE_SCRIPTS = (
    PAGE.read_text().partition(heading)[2].partition("\n## ")[0]
    for heading in ("A whole script, `mlm.py`", "\n## transformers' example scripts\n")
)
COMMANDS = re.findall(r"^torchrun (?:.*\\\n)*.*$", EXAMPLE_SCRIPTS, re.MULTILINE)
EXAMPLES = os.environ.get("WAVEMARE_TRANSFORMERS_EXAMPLES")
SCRIPTS = {
    "run_clm.py": AutoModelForCausalLM,
    "run_mlm.py": AutoModelForMaskedLM,
    "run_glue.py": AutoModelForSequenceClassification,
}
ENVIRONMENT = {"HF_HUB_OFFLINE": "1"}
CHOICES = {"no", "yes"}
LINES = [
    f"stage {n % 5} holds batch {n % 7} and sends it on {'again ' * (n % 4)}" * 2
    for n in range(200)
]


def blocks(section, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


@pytest.fixture
def examples(tmp_path):
    """A folder with what the page's commands need; transformers' scripts have one line more."""
    if EXAMPLES is None:
        pytest.skip(
            "needs a clone of transformers; WAVEMARE_TRANSFORMERS_EXAMPLES names its examples"
        )
    if importlib.util.find_spec("evaluate") is None:
        pytest.skip("transformers' examples need the package evaluate (pip install evaluate)")
    for name in SCRIPTS:
        (source,) = Path(EXAMPLES).rglob(name)
        first, _, rest = source.read_text().partition("\n")
        (tmp_path / name).write_text(f"{first}\nimport wavemare.hf.patch\n{rest}")
    prepare, metric = blocks(EXAMPLE_SCRIPTS, "python")
    (tmp_path / "prepare.py").write_text(prepare)
    (tmp_path / "accuracy").mkdir()
    (tmp_path / "accuracy" / "accuracy.py").write_text(metric)
    for name, block in zip(
        ("zero.json", "pipeline.json"), blocks(EXAMPLE_SCRIPTS, "json"), strict=True
    ):
        (tmp_path / name).write_text(block)
    (tmp_path / "pipemare.json").write_text(
        blocks(EXAMPLE_SCRIPTS, "json")[1].replace("1f1b", "pipemare")
    )
    return tmp_path


def metrics_of(folder, part):
    return json.loads((folder / f"{part}_results.json").read_text())


@pytest.mark.nightly
@pytest.mark.world_size(2)
@pytest.mark.parametrize("engine", ["zero", "pipeline", "pipemare"])
def test_transformers_own_scripts_run_with_one_line_more(examples, command, engine):
    environment = {**ENVIRONMENT, "HF_HOME": str(examples / "home")}
    command("python", "prepare.py", environment=environment).check()
    assert len(COMMANDS) == len(SCRIPTS)
    for line, (name, family) in zip(COMMANDS, SCRIPTS.items(), strict=True):
        words = line.replace("\\\n", " ").replace("pipeline.json", f"{engine}.json").split()
        assert name in words
        assert f"{engine}.json" in words
        command(*words, environment=environment).check()
        folder = examples / words[words.index("--output_dir") + 1]
        assert metrics_of(folder, "train")["train_loss"] > 0
        found = metrics_of(folder, "eval")
        # ln(400) is 6; transformers multiplies BERT's by the number of processes.
        assert 0 < found["eval_loss"] < (13 if engine == "zero" else 6.5)
        assert 0 < found["eval_accuracy"] <= 1
        assert (folder / "checkpoint-20").is_dir()
        family.from_pretrained(folder)
        AutoTokenizer.from_pretrained(folder)
        shutil.rmtree(folder / "checkpoint-20")
    predicted = (folder / "predict_results_None.txt").read_text().splitlines()
    assert len(predicted) == 1 + 20
    assert {row.split("\t")[1] for row in predicted[1:]} <= CHOICES


@pytest.mark.world_size(2)
def test_a_script_trains_a_pipeline_with_one_line_more(command, tmp_path):
    (tmp_path / "mlm.py").write_text(blocks(SCRIPT, "python")[0])
    (tmp_path / "ds.json").write_text(blocks(SCRIPT, "json")[0])
    (tmp_path / "notes.txt").write_text("\n".join(LINES[:60]))
    (line,) = re.findall("^torchrun .*$", SCRIPT, re.MULTILINE)
    ended = command(*line.split()).check()
    logged = [ast.literal_eval(found) for found in re.findall(r"\{'loss'.*?\}", ended.output)]
    assert len(logged) == 4
    assert float(logged[-1]["loss"]) < float(logged[0]["loss"])
    assert "eval_loss" in ended.output
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    assert model.config.num_hidden_layers == 4
