# SPDX-License-Identifier: Apache-2.0
"""``wavemare simulate`` beside real ranks, and its comparison of systems."""

import json

import pytest

from wavemare.report import read_run

GPT = {
    "model_type": "gpt2",
    "n_layer": 4,
    "n_embd": 32,
    "n_head": 2,
    "n_positions": 64,
    # Ranks draw their own random numbers.
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


def losses(folder):
    return [loss for _, loss in read_run(folder).series("loss")]


@pytest.fixture
def json_file(tmp_path):
    values = {
        "train_batch_size": 16,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.0,  # else earlier stages know a norm of the step before
        "optimizer": {"type": "AdamW", "params": {"lr": 0.005}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}},
        "zero_optimization": {"stage": 1},
        "wavemare": {
            "pipeline": {
                "schedule": "pipemare",
                "stages": 2,
                "inputs": ["input_ids"],
                "pipemare": {"error_feedback": True, "warmup_steps": 2},
            }
        },
    }
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(values))
    return file


def test_a_simulation_learns_what_the_ranks_learn(
    command, recipe, small_options, json_file, tmp_path
):
    model = tmp_path / "model.json"
    model.write_text(json.dumps(GPT))
    options = {"max_steps": 8, "eval_interval": 8, "save_interval": 8, "model_config": model}
    words = small_options("gpt", tmp_path / "real", **options)
    recipe("gpt/pretrain", "--deepspeed_config", json_file, *words).check()
    words = small_options("gpt", tmp_path / "simulated", **options)
    command("wavemare", "simulate", "gpt", "--config", json_file, *words).check()
    found, wanted = losses(tmp_path / "simulated"), losses(tmp_path / "real")
    assert found == pytest.approx(wanted, abs=1e-5)
    assert found[-1] < found[0]
    results = json.loads((tmp_path / "simulated" / "summary.json").read_text())["results"]
    assert results["stages"] == 2
    assert results["largest staleness"] == 1
    assert (tmp_path / "simulated" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_options_change_the_configuration(command, small_options, json_file, tmp_path):
    options = {"max_steps": 2, "eval_interval": 2, "save_interval": 1, "micro_batches": 2}
    words = small_options("bert", tmp_path / "out", stages=4, **options)
    changes = ["--set", "optimizer.type=SGD", "optimizer.params.lr=0.25"]
    changes += ["wavemare.pipeline.pipemare.optimizer_policy=auto"]
    ended = command("wavemare", "simulate", "bert", "--config", json_file, *words, *changes).check()
    # What the engine tells at its start.
    for said in (
        "2 micro-batches per optimizer step on 4 stages",
        "with 3 or more",
        "auto: SGD: it is",
    ):
        assert ended.output.count(said) == 1, said
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    config = written["configuration"]["deepspeed"]
    assert config["optimizer"] == {"type": "SGD", "params": {"lr": 0.25}}
    assert config["wavemare"]["pipeline"]["stages"] == 4
    assert config["gradient_accumulation_steps"] == 2

    # The checkpoint of the first step: the second one is trained again, to the same bits.
    def measured():
        lines = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
        return [(n["step"], n["eval_loss"]) for n in lines if "eval_loss" in n]

    before = measured()
    assert len(before) == 1
    resume = ["--resume", *changes]
    command("wavemare", "simulate", "bert", "--config", json_file, *words, *resume).check()
    assert measured() == before


MISTAKES = {
    "bort": (["bort"], "one of the two models"),
    "resume": (["gpt", "--resume", "--output", "nowhere"], "there is no checkpoint"),
    "split": (["gpt", "--split", "8,1,1"], "--split"),
    "no value": (["gpt", "--set", "lr"], "KEY.KEY=VALUE"),
    "schedule": (["gpt", "--set", "wavemare.pipeline.schedule=pipemore"], "pipemare"),
    "misspelt": (["gpt", "--delay", "x"], "delays"),
    "batches": (["gpt", "--eval-iters", "2"], "--eval_samples"),
}


def test_mistakes_are_told(launch, json_file, tmp_path):
    words = {
        case: [recipe, "--deepspeed_config", str(json_file), *options]
        for case, ((recipe, *options), _) in MISTAKES.items()
    }
    (tmp_path / "cases.json").write_text(json.dumps(words))
    finished = launch("refusals.py", "simulate", tmp_path / "cases.json", ranks=1).check()
    found = finished.result(0)
    for case, (_, said) in MISTAKES.items():
        assert said in found[case]["message"], case


def test_systems_are_compared_and_no_run_is_repeated(command, small_options, tmp_path):
    words = small_options(
        "gpt", None, eval_interval=None, save_interval=None, max_steps=None, log_interval=None
    )
    bench = ["wavemare", "simulate", "gpt", "--max_steps", 4, "--stages", 2]
    bench += ["--micro_batches", 1, "--seeds", 1, "--runs", tmp_path / "runs", *words]
    bench += ["--systems", "flush,auto", "--json", tmp_path / "q.json"]
    bench += ["--plot", tmp_path / "q.png"]
    first = command(*bench).check()
    answer = json.loads((tmp_path / "q.json").read_text())
    rows = {row["system"]: row for row in answer["rows"]}
    assert rows["flush"]["gap"] == 0
    assert rows["auto"]["gap"] == pytest.approx(
        rows["auto"]["eval_loss"] / rows["flush"]["eval_loss"] - 1
    )
    assert rows["auto"]["own_gap"] is None  # its own baseline was not asked for
    # A state of a matrix less than AdamW; on the stale stage one more for error feedback.
    assert 1 < rows["auto"]["memory"]["optimizer"] < rows["flush"]["memory"]["optimizer"] <= 2.1
    assert len(answer["runs"]) == 2
    assert (tmp_path / "q.png").read_bytes().startswith(b"\x89PNG")
    assert "gap to its own" in first.output

    def changed():
        return {run: run.stat().st_mtime for run in (tmp_path / "runs").iterdir()}

    assert "each system has its own" in command(*bench, "--seed", 3).output
    before = changed()
    assert "auto" in command(*bench).check().output
    assert changed() == before
