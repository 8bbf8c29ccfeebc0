# SPDX-License-Identifier: Apache-2.0
"""The run folder: what stands in it, also after a crash and a resume."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from matplotlib.image import imread

from support.refusals import refuses
from wavemare.errors import ConfigError, DataError
from wavemare.observe.lines import read_metrics
from wavemare.observe.run import Run


def steps(run):
    return [line["step"] for line in read_metrics(run.metrics_file)]


def test_other_ranks_write_nothing(tmp_path):
    run = Run(tmp_path / "run", rank=1)
    run.write_config({"a": 1}, world_size=2)
    run.log(1, loss=1.0)
    assert run.begin(done=0) is run.begin(done=1) is None
    run.curve({})
    run.summary({"a": 1})
    run.close()
    assert list(tmp_path.iterdir()) == []


def test_config_holds_the_environment(tmp_path):
    run = Run(tmp_path, rank=0)
    values = {"lr": 1e-3, "data": Path("corpus.txt"), "limit": math.inf}
    run.write_config(values, world_size=4)
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["configuration"] == {"lr": 1e-3, "data": "corpus.txt", "limit": None}
    environment = content["environment"]
    assert environment["world_size"] == 4
    assert environment["command"] == sys.orig_argv
    assert environment["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"wavemare", "torch", "deepspeed", "transformers"} <= environment["versions"].keys()


def test_a_line_is_on_disk_when_log_returns_and_what_json_cannot_say_is_null(tmp_path):
    run = Run(tmp_path, rank=0)
    run.log(3, loss=1.5, eval_loss=None, norm=math.inf, rate=numpy.float32(0.5))
    assert run.metrics_file.read_text() == (
        '{"step": 3, "loss": 1.5, "eval_loss": null, "norm": null, "rate": 0.5}\n'
    )
    run.log(4, loss=math.nan)
    assert read_metrics(run.metrics_file)[-1] == {"step": 4, "loss": None}


def test_torn_last_line_is_cut_off(tmp_path):
    run = Run(tmp_path, rank=0)
    run.metrics_file.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert steps(run) == [1]
    run.begin(done=5)
    run.log(2, loss=1.0)
    assert steps(run) == [1, 2]
    run.begin(done=1)  # by the same run
    run.log(2, loss=9.0)
    assert steps(run) == [1, 2]


@pytest.mark.parametrize("line", ["{broken", "[1]", '{"loss": 1.0}'])
def test_bad_line_is_named(tmp_path, line):
    run = Run(tmp_path, rank=0)
    text = '{"step": 1}\n' + line + '\n{"step": 3}\n'
    run.metrics_file.write_text(text)
    with refuses(DataError, str(tmp_path / "metrics.jsonl:2"), line):
        run.begin(done=1)
    assert run.metrics_file.read_text() == text


def test_output_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("precious")
    with refuses(ConfigError, "--output", str(tmp_path / "file" / "run")):
        Run(tmp_path / "file" / "run", rank=0)
    assert (tmp_path / "file").read_text() == "precious"
    with refuses(ConfigError, "--output", "/proc/run"):
        Run(Path("/proc/run"), rank=0)


def test_curve_is_a_png_of_readme_size(tmp_path):
    run = Run(tmp_path, rank=0)
    run.curve({})  # before the first step
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    for step in range(1, 101):
        run.log(step, loss=4.0 / step)
    run.log(100, eval_loss=0.5)
    run.curve({"unigram": 3.0})
    image = imread(tmp_path / "loss.png")
    assert image.shape[:2] == (600, 1050)
    assert len({tuple(pixel) for pixel in image.reshape(-1, image.shape[2])[::7]}) > 10


@pytest.mark.parametrize("name", ["run", "link", "link/../run", "run/inner/.."])
def test_an_older_run_moves_aside_whatever_names_it(tmp_path, name):
    (tmp_path / "run" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    run = Run(tmp_path / name, rank=0)
    run.log(0, loss=1.0)
    assert run.begin(done=0) == tmp_path / "run.1"
    assert (tmp_path / "run.1" / "metrics.jsonl").exists()
    assert (tmp_path / "link").is_symlink()
    run.log(3, loss=1.0)
    assert steps(Run(tmp_path / "run", rank=0)) == [3]


@pytest.mark.parametrize("name", [".", "..", "../../run/inner"])
def test_an_older_run_in_the_working_directory_is_refused(tmp_path, monkeypatch, name):
    (tmp_path / "run" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "run" / "inner")
    run = Run(Path(name), rank=0)
    run.log(0, loss=1.0)
    with refuses(ConfigError, "--output", name):
        run.begin(done=0)
    assert steps(run) == [0]


def test_a_run_begins_anew_or_goes_on(tmp_path):
    run = Run(tmp_path / "run", rank=0)
    run.checkpoints.mkdir(parents=True)
    assert run.begin(done=0) is None  # there is nothing yet
    (run.checkpoints / "first").mkdir()  # before the first line was logged
    assert run.begin(done=0) == tmp_path / "run.1"
    assert (tmp_path / "run.1" / "checkpoints" / "first").is_dir()
    for step in (0, 1, 2):
        run.log(step, loss=1.0)
    assert steps(run) == [0, 1, 2]
    assert Run(tmp_path / "run", rank=1).begin(done=0) is None
    assert run.begin(done=1) is None
    assert steps(run) == [0, 1]
    assert run.begin(done=0) == tmp_path / "run.2"
    older = read_metrics(tmp_path / "run.2" / "metrics.jsonl")
    assert [line["step"] for line in older] == [0, 1]
    (tmp_path / "run" / "watchdog").mkdir()  # it hung in its first step
    assert run.begin(done=0) == tmp_path / "run.3"


def test_the_folder_of_a_living_run_is_refused(tmp_path):
    """A second job with the same --output must not rename the folder of the first."""
    folder = tmp_path / "run"
    program = (
        "import sys; from wavemare.observe import Run; run = Run(sys.argv[1], rank=0)\n"
        "run.log(1, loss=1.0); run.begin(done=1); print('begun', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout.readline() == "begun\n"
        for done in (0, 1):
            with refuses(ConfigError, "--output", str(folder)):
                Run(folder, rank=0).begin(done=done)
        other.communicate("\n")
    assert other.returncode == 0
    assert Run(folder, rank=0).begin(done=0) == tmp_path / "run.1"
