# SPDX-License-Identifier: Apache-2.0
"""``wavemare train``: which command it makes of its options, and what it refuses at once."""

import json
import re
import shlex

import pytest
from typer.testing import CliRunner

from support.refusals import refuses
from wavemare.cli import app, launch
from wavemare.cli.train import (
    RECIPES,
    WHOLE_MODELS,
    changes_for_sizes,
    check_early,
    find_recipe,
    given_changes,
)
from wavemare.engine.config.resolve import check_batch_sizes, load_config
from wavemare.errors import ConfigError, LaunchError
from wavemare.training.arguments import TrainArguments, parse_arguments
from wavemare.training.config import change_config


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 8}')
    return file


@pytest.fixture
def command(monkeypatch, config):
    """Return the launcher's command for options of ``wavemare train``."""
    monkeypatch.setattr(launch, "extra_environment", lambda: {"OMP_NUM_THREADS": "1"})
    monkeypatch.setattr(launch, "find_deepspeed", lambda: "/bin/deepspeed")

    def run(*options):
        arguments = ["train", *options, "--config", str(config), "--print-command"]
        if "--" in options:
            arguments = ["train", "--config", str(config), "--print-command", *options]
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        variable, *words = shlex.split(result.stdout)
        assert variable == "OMP_NUM_THREADS=1"
        return words

    return run


def test_command_in_full(command, config):
    words = command("gpt", "--nproc", "4", "--data", "my corpus.txt", "--max_steps=3")
    port = words[words.index("--master_port") + 1]
    assert 1024 <= int(port) < 65536
    assert words == [
        *("/bin/deepspeed", "--num_accelerators", "4", "--master_port", port),
        *(
            "--log_level",
            "critical",
            "--no_local_rank",
            "--module",
            "wavemare.recipes.gpt.pretrain",
        ),
        *("--deepspeed_config", str(config), "--data", "my corpus.txt", "--max_steps=3"),
    ]


def test_options_after_two_dashes_belong_to_the_recipe(command):
    words = command("bert/finetune", "--", "--nproc", "9")
    assert words[-2:] == ["--nproc", "9"]
    assert words[words.index("--num_accelerators") + 1] == "2"  # by default
    assert "wavemare.recipes.bert.finetune" in words


def test_launcher_options_come_before_the_module(command):
    words = command("gpt", "--launcher-args", "--hostfile 'my hosts' --master_port=7")
    index = words.index("--hostfile")
    assert words[index + 1] == "my hosts"
    assert index < words.index("--module")
    assert "--master_port" not in words  # the user's alone
    assert "--num_accelerators" not in words  # its slots
    words = command("gpt", "--launcher-args", "--include=a:0,1")
    assert "--num_accelerators" not in words  # chosen devices replace it


def test_recipes_are_found_by_both_names():
    assert find_recipe("gpt") is RECIPES["gpt/pretrain"]
    assert find_recipe("bert") is RECIPES["bert/pretrain"]
    for name, recipe in RECIPES.items():
        assert find_recipe(name) is recipe
        assert recipe.module == "wavemare.recipes." + name.replace("/", ".")


@pytest.mark.parametrize(
    ("words", "stages", "schedule"),
    [
        ("--lr 1", 2, "pipemare"),
        ("--pipeline-model-parallel-size 2", 2, "1f1b"),
        ("--pipeline_model_parallel_size=2 --tensor-model-parallel-size 2", 2, "1f1b"),
        ("--pipeline-model-parallel-size 1", 1, "1f1b"),
        ("--tensor-model-parallel-size 2", 1, "1f1b"),
        # Refused by the recipe: there is no pipeline.
        ("--num-virtual-stages-per-pipeline-rank 2", 1, "1f1b"),
    ],
)
def test_megatrons_sizes_mean_its_synchronous_schedules(words, stages, schedule):
    config = load_config(RECIPES["gpt/pretrain"].config)
    found = check_early(change_config(config, changes_for_sizes(words.split()))).pipeline
    assert (found.stages, found.schedule) == (stages, schedule)


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("--set a=1 b.c=2 --lr 3 --set d=x", ["a=1", "b.c=2", "d=x"]),
        ("--set=a=1 --lr=2 e=3", ["a=1"]),
        ("--lr 1", []),
    ],
)
def test_changes_of_the_json_are_those_that_the_recipe_reads(words, changes):
    assert given_changes(words.split()) == changes
    if "e=3" not in words:
        read = parse_arguments(TrainArguments, ["--deepspeed_config=x", *words.split()])
        assert read.set == changes


@pytest.fixture
def gpus(monkeypatch):
    """Pretend a number of GPUs, and return the launcher's words for a recipe's own JSON."""
    monkeypatch.setattr(launch, "find_deepspeed", lambda: "/bin/deepspeed")

    def train(count, *options):
        monkeypatch.setattr(launch, "device_count", lambda: count)
        words = ["train", *options, "--print-command"]
        result = CliRunner().invoke(app, words, catch_exceptions=True)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return shlex.split(result.stdout)

    return train


def started(words):
    return int(words[words.index("--num_accelerators") + 1])


def test_each_gpu_gets_a_process(gpus):
    assert started(gpus(0, "gpt")) == 2  # on the CPU
    assert started(gpus(8, "gpt")) == 8
    assert started(gpus(8, "gpt", "--nproc", "4")) == 4
    assert started(gpus(1, "llama/sft")) == 1  # data-parallel


TWO = [
    ("wavemare.pipeline.stages=2",),
    ("wavemare.pipeline=null", "wavemare.tensor_parallel.size=2", "wavemare.wavelet.mode=sync"),
]


@pytest.mark.parametrize("name", [*RECIPES])
@pytest.mark.parametrize("changes", TWO, ids=["pipeline", "wave"])
def test_a_layout_for_which_there_are_too_few_gpus_is_refused_at_once(gpus, name, changes):
    options = (name, "--set", *changes)
    assert started(gpus(2, *options)) == 2
    with pytest.raises(ConfigError) as caught:
        gpus(1, *options)
    assert caught.value.key.startswith("wavemare.")
    assert caught.value.value == 2
    # Its remedy works.
    (words,) = re.findall(r"(--set .*)$", caught.value.remedy)
    assert started(gpus(1, name, *shlex.split(words))) == 1
    with pytest.raises(ConfigError) as caught:
        gpus(3, *options)
    (fewer,) = re.findall(r"--nproc (\d+)", caught.value.remedy)
    assert started(gpus(3, *options, "--nproc", fewer)) == 2


def test_megatrons_sizes_count_too(gpus):
    assert started(gpus(1, "gpt", "--pipeline-model-parallel-size", "1")) == 1
    with pytest.raises(ConfigError) as caught:
        gpus(6, "gpt", "--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size=2")
    assert "--nproc 4" in caught.value.remedy


@pytest.mark.parametrize("name", [*RECIPES])
@pytest.mark.parametrize("processes", [1, 2, 4, 8, 16])
def test_whole_models_train_on_any_number_of_gpus(name, processes):
    config = change_config(load_config(RECIPES[name].config), WHOLE_MODELS)
    sizes = check_batch_sizes(config, data_world_size=processes)
    train, micro, steps = sizes.values()
    assert (train, train) == (config["train_batch_size"], micro * steps * processes)


def test_gpus_are_counted_as_ranks_will_see_them(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert launch.device_count() == 0
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert launch.device_count() == 0


def test_missing_launcher(monkeypatch, tmp_path):
    monkeypatch.setattr(launch.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with refuses(LaunchError, "deepspeed", None):
        launch.find_deepspeed()


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({"wavemare": {"pipeline": {"stagse": 2}}}, "wavemare.pipeline.stagse"),
        ({"wavemare": {"guard": {"max_skips": "auto"}}}, "wavemare.guard.max_skips"),
    ],
)
def test_what_no_option_mends_is_refused_before_a_launcher_is_sought(
    monkeypatch, config, content, key
):
    monkeypatch.setattr(launch, "find_deepspeed", lambda: pytest.fail("a launcher was sought"))
    config.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        app(["train", "gpt", "--config", str(config)], standalone_mode=False)
    assert caught.value.key == key


@pytest.mark.parametrize("name", [*RECIPES])
def test_the_recipes_own_files_are_not_refused(name):
    check_early(load_config(RECIPES[name].config))


@pytest.fixture
def under_mpirun(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")


LAUNCHER_OPTIONS = [("--nproc", "2"), ("--launcher-args", "-v"), ("--max-restarts", "1")]


@pytest.mark.parametrize(("option", "value"), LAUNCHER_OPTIONS)
@pytest.mark.usefixtures("under_mpirun")
def test_ranks_of_mpirun_are_not_launched_again(config, option, value):
    with pytest.raises(LaunchError) as caught:
        app(["train", "gpt", "--config", str(config), option, value], standalone_mode=False)
    assert caught.value.key == option


@pytest.mark.usefixtures("under_mpirun")
def test_a_process_of_mpirun_becomes_a_rank(monkeypatch, config):
    class BecameError(Exception):
        pass

    def become(program, words, variables):
        assert variables["PMI_RANK"] == "0"
        raise BecameError(program, *words)

    monkeypatch.setattr("os.execve", become)
    with pytest.raises(BecameError) as caught:
        app(["train", "gpt", "--config", str(config), "--max_steps", "3"], standalone_mode=False)
    python, *words = caught.value.args
    recipe = ["wavemare.recipes.gpt.pretrain", "--deepspeed_config", str(config)]
    assert words == [python, "-u", "-m", "mpi4py", "-m", *recipe, "--max_steps", "3"]
