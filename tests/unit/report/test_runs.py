# SPDX-License-Identifier: Apache-2.0
"""What is read of a run folder, and what is said of one that cannot be read."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from wavemare.cli import app
from wavemare.errors import ConfigError, DataError, WavemareError
from wavemare.report import run_page
from wavemare.report.runs import Checkpoint, read_run


def error_of(*words):
    with pytest.raises(WavemareError) as caught:
        CliRunner().invoke(app, ["report", *map(str, words)], catch_exceptions=False)
    return caught.value


def test_facts_are_those_of_the_files(run_folder):
    run = read_run(run_folder)
    assert run.name == "one"
    assert run.series("loss") == [(2, 5.5), (4, 4.25)]
    assert run.series("eval_loss") == [(4, 4.125)]
    assert run.series("sparse_density") == []
    batch = {"train_batch_size": 8, "gradient_accumulation_steps": 2}
    assert run.layout == {"stages": 2, "schedule": "pipemare", **batch}
    saved = "2026-01-02T03:04:09.123+00:00"
    size = 5 + (run_folder / "checkpoints/step-4/wavemare.json").stat().st_size
    assert run.checkpoints == [Checkpoint("step-4", saved, size, complete=True, latest=True)]
    assert [event["kind"] for event in run.events] == ["memory", "warning", "checkpoint"]
    assert run.trace is not None


def test_a_loop_of_ones_own_writes_the_configuration_as_it_was_given(run_folder):
    given = {"gradient_accumulation_steps": 2, "train_batch_size": "auto"}
    section = {"pipeline": {"stages": 2, "schedule": "pipemare", "pipemare": {"slack": 1}}}
    config = {"configuration": {"deepspeed": {**given, "wavemare": section}}}
    (run_folder / "config.json").write_text(json.dumps(config))
    run = read_run(run_folder)
    assert run.layout == {"stages": 2, "schedule": "pipemare", "gradient_accumulation_steps": 2}
    assert run.pipemare == {"slack": 1}


def test_checkpoints_of_a_trainer_are_found_where_it_saves(run_folder, tmp_path):
    output = tmp_path / "trained"
    for step in (10, 100):
        checkpoint = output / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "model.safetensors").write_bytes(b"123")
    state = output / "checkpoint-10" / "trainer_state.json"  # it is written last
    state.write_text("{}")
    os.utime(state, (1_700_000_000, 1_700_000_000))
    (output / "checkpoint-best").mkdir()  # somebody's own
    config = json.loads((run_folder / "config.json").read_text())
    config["configuration"]["checkpoints"] = str(output)
    (run_folder / "config.json").write_text(json.dumps(config))
    saved = "2023-11-14T22:13:20+00:00"
    assert read_run(run_folder).checkpoints == [
        Checkpoint("checkpoint-10", saved, 5, complete=True, latest=False),
        Checkpoint("checkpoint-100", "", 3, complete=False, latest=True),
    ]
    event = {"step": 10, "time": 13.0, "kind": "checkpoint", "tag": "checkpoint-10", "seconds": 7.5}
    with (run_folder / "events" / "rank_00000.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    html = run_page([read_run(run_folder)])
    for cell in ("checkpoint-10", "2023-11-14 22:13:20", "7.5 s", "checkpoint-100 (latest)"):
        assert f"<td>{cell}</td>" in html, cell


def test_a_run_that_goes_on_is_read(run_folder):
    (run_folder / "summary.json").unlink()
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # being written
    run = read_run(run_folder)
    assert run.summary is None
    assert run.series("loss")[-1] == (4, 4.25)


def test_a_folder_that_is_no_run_is_refused(run_folder, tmp_path):
    for folder in (tmp_path / "oen", tmp_path, run_folder / "config.json"):
        error = error_of(folder, "--output", "x.html")
        assert isinstance(error, ConfigError)
        assert "it has none of config.json, metrics.jsonl" in error.reason


DAMAGES = [
    ("config.json", b'{"configuration": ', "not JSON at line 1"),
    ("config.json", b"[1, 2]", "it is not a JSON object"),
    ("config.json", b'{"a": 1, "a": 2}', "the key 'a' appears twice"),
    ("summary.json", b"\xff\xfe", "this is no text"),
    ("metrics.jsonl", b"nonsense\n", "this line of metrics is not a JSON object with a step"),
    ("metrics.jsonl", b'{"step": 1, "loss": "low"}\n', "in step 1 this metric is not a number"),
    ("metrics.jsonl", b"\xff\n", "these metrics cannot be read (no text)"),
    ("events/rank_00000.jsonl", b'{"step": 1}\n', "this line of events is not"),
    (
        "events/rank_00000.jsonl",
        b'{"step": 1, "time": 1, "kind": "memory"}\n',
        "this line of events",
    ),
    ("events/rank_00000.jsonl", b'{"step": 1, "time": 1, "kind": []}\n', "this line of events"),
    ("events/rank_one.jsonl", b"", "no rank has a file of this name"),
    ("timeline/rank_00001.json", b"{}", "it is not what a rank noted"),
    ("timeline/rank_00001.json", b"{", "not JSON at line 1"),
    ("checkpoints/step-4/wavemare.json", b"?", "not JSON at line 1"),
]


@pytest.mark.parametrize(("name", "content", "reason"), DAMAGES)
def test_a_damaged_file_is_named(run_folder, name, content, reason):
    (run_folder / name).write_bytes(content)
    error = error_of(run_folder, "--output", "x.html")
    assert isinstance(error, DataError)
    assert reason in error.reason
    assert Path(name).name in f"{error.key} {error.value}"
    assert error.remedy


SPOILT = [
    {"format": 2},
    {"steps": [[1.0]]},
    {"steps": [["now", "then"]]},
    {"spans": [["0F0", 1.0, 2.0]]},
    {"rank": "zero"},
    {"more": 1},
]


@pytest.mark.parametrize("change", SPOILT, ids=str)
def test_a_spoilt_timeline_is_named(run_folder, change):
    file = run_folder / "timeline" / "rank_00000.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(DataError) as caught:
        read_run(run_folder)
    assert str(file) in str(caught.value)


def test_an_output_that_cannot_be_written_is_refused(run_folder):
    error = error_of(run_folder, "--output", run_folder)
    assert (error.key, error.reason) == ("--output", "it cannot be written (Is a directory)")
    error = error_of(run_folder, "--output", run_folder / "config.json" / "x.html")
    assert isinstance(error, ConfigError)
