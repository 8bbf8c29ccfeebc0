# SPDX-License-Identifier: Apache-2.0
"""Mistakes on the command line of ``wavemare`` and of its recipes."""

import pytest

from wavemare import cli
from wavemare.failure import run_main
from wavemare.recipes.bert import finetune
from wavemare.recipes.gpt import pretrain

SEARCH = ["plan", "search", "--cluster", "2xV100", "--global-batch", "8", "--sequence", "128"]
COMMANDS = [
    pytest.param(["train", "gtp"], "RECIPE = 'gtp'", "Did you mean 'gpt'?", id="a recipe"),
    pytest.param(
        ["train", "gpt", "--config", "nosuch.json"],
        "--config = 'nosuch.json'",
        "Name an existing",
        id="no configuration",
    ),
    pytest.param(
        ["train", "gpt", "--deepspeed_config=x.json"],
        "--deepspeed_config = 'x.json'",
        "--config FILE",
        id="a second configuration",
    ),
    pytest.param(
        ["train", "gpt", "--hostfile", "nosuch"], "--hostfile = 'nosuch'", "existing", id="no hosts"
    ),
    pytest.param(
        ["train", "gpt", "--launcher", "slurm"],
        "--launcher = 'slurm'",
        "'deepspeed', 'mpirun'",
        id="a launcher that there is not",
    ),
    pytest.param(
        ["train", "gpt", "--launcher", "openmpi"],
        "--launcher = 'openmpi'",
        "Use mpirun",
        id="a launcher of DeepSpeed",
    ),
    pytest.param(
        ["train", "gpt", "--launcher-args", "'x"],
        "--launcher-args",
        "quotes are not closed",
        id="an open quote",
    ),
    pytest.param(["launch", "nosuch.py"], "SCRIPT = 'nosuch.py'", "no such file", id="no script"),
    pytest.param(["launch", "."], "SCRIPT = '.'", "Name a Python script", id="a folder to launch"),
    pytest.param(
        ["plan", "show", "--schedule", "gpipe"],
        "schedule = 'gpipe'",
        "Did you mean 'pipemare'?",
        id="a schedule",
    ),
    pytest.param(["plan", "show", "--stages", "0"], "stages = 0", "1 or more", id="no stage"),
    pytest.param(["plan", "show", "--steps", "-1"], "steps = -1", "0 or more", id="negative steps"),
    pytest.param(
        ["plan", "show", "--stages", "100000", "--micro-batches", "100000"],
        "--stages = 100000",
        "more than can be shown",
        id="a plan that would fill the memory",
    ),
    pytest.param(
        ["plan", "show", "--forward-ms", "1;2"], "--forward-ms = '1;2'", "no numbers", id="times"
    ),
    pytest.param(
        ["plan", "show", "--forward-ms", "nan"],
        "--forward-ms = 'nan'",
        "finite",
        id="a time of nan",
    ),
    pytest.param(
        ["plan", "show", "--send-ms", "1,2"],
        "--send-ms = '1,2'",
        "2 numbers for 4 stages",
        id="too few times",
    ),
    pytest.param(
        ["plan", "show", "--file", "nosuch"], "--file = 'nosuch'", "No such file", id="no plan"
    ),
    pytest.param(["plan", "show", "--file", "."], "--file = '.'", "Is a directory", id="a folder"),
    pytest.param(
        ["plan", "show", "--file", "x", "--steps", "2"],
        "--steps = 2",
        "Leave out --steps or --file",
        id="a plan's own numbers",
    ),
    pytest.param(
        ["plan", "show", "--output", "/proc/nosuch"],
        "--output = '/proc/nosuch'",
        "Name another folder",
        id="a folder that cannot be made",
    ),
    pytest.param(
        [*SEARCH, "--model", "gpt9"], "--model = 'gpt9'", "Did you mean 'gpt2'?", id="a model"
    ),
    pytest.param(
        [*SEARCH, "--model", "gpt2", "--cluster", "8xV101"],
        "--cluster = 'V101'",
        "Did you mean 'V100'?",
        id="a card",
    ),
    pytest.param(
        [*SEARCH, "--model", "gpt2", "--dtype", "fp8"],
        "dtype = 'fp8'",
        "no such dtype",
        id="a dtype",
    ),
    pytest.param(
        [*SEARCH, "--model", "gpt2", "--margin", "2"], "margin = 2.0", "from 0", id="a margin"
    ),
    pytest.param(
        [*SEARCH, "--model", "gpt2", "--sequence", "4096"],
        "sequence_length = 4096",
        "1024 positions",
        id="a sequence longer than the model",
    ),
    pytest.param(
        [*SEARCH, "--model", "gpt2", "--output", "/proc/nosuch/plan.json"],
        "--output = '/proc/nosuch'",
        "no such folder",
        id="a plan that cannot be written",
    ),
    pytest.param(
        [*SEARCH, "--model", "gpt2", "--json", "."], "--json = '.'", "a folder", id="json a folder"
    ),
    pytest.param(
        ["bench", "pipeline", "--stages", "1"], "--stages = 1", "at least two", id="one stage"
    ),
    pytest.param(
        ["bench", "pipeline", "--micro-batches", "1,x"],
        "--micro-batches = '1,x'",
        "as in 1,2,4,8",
        id="micro-batches",
    ),
    pytest.param(
        ["bench", "pipeline", "--forward-ms", "3"],
        "--forward-ms = 3.0",
        "Add --synthetic",
        id="times without waits",
    ),
    pytest.param(
        ["bench", "sparse", "--densities", "nan"], "--densities = [nan]", "0 to 1", id="densities"
    ),
    pytest.param(
        ["bench", "sparse", "--plot", "cost.txt"], "--plot = 'cost.txt'", ".png or .svg", id="plot"
    ),
    pytest.param(
        ["bench", "quality", "--data", "texts"],
        "RECIPE = '--data'",
        "no such recipe",
        id="no recipe",
    ),
    pytest.param(
        ["bench", "kernels", "--json", "."], "--json = '.'", "a folder of that name", id="kernels"
    ),
    pytest.param(
        ["simulate", "gpt", "--set", "scheduler=WarmupLR"],
        "scheduler = 'WarmupLR'",
        "not a mapping",
        id="a scheduler's name alone",
    ),
    pytest.param(
        ["simulate", "gpt", "--set", "scheduler.params=" + "[" * 100_000],
        "scheduler.params = '[[[",
        "not a mapping",
        id="100,000 brackets",
    ),
    pytest.param(["bench", "sparse", "--mib", "-1"], "--mib = -1.0", "more than 0", id="a size"),
    pytest.param(
        ["data", "inspect", "nosuch"],
        "--data = 'nosuch'",
        "nosuch.idx does not exist",
        id="no data",
    ),
    pytest.param(
        ["data", "merge", "nosuch", "--output", "o"],
        "--data = 'nosuch'",
        "side by side",
        id="nothing to merge",
    ),
    pytest.param(
        ["data", "build", "x.txt", "--output", "o", "--tokenizer", "nosuch"],
        "--tokenizer = 'nosuch'",
        "written by save_pretrained",
        id="no tokenizer",
    ),
    pytest.param(
        ["convert", "nosuch", "t", "--to", "hf"],
        "SOURCE = 'nosuch'",
        "neither config.json",
        id="nothing to convert",
    ),
    pytest.param(
        ["convert", "~nosuchuser/x", "t", "--to", "hf"],
        "SOURCE = '~nosuchuser/x'",
        "neither config.json",
        id="the home of nobody",
    ),
    pytest.param(
        ["convert", ".", ".", "--to", "hf"], "TARGET = ", "Choose another name", id="a full target"
    ),
    pytest.param(
        ["convert", ".", "t", "--to", "onnx"], "--to = 'onnx'", "no such layout", id="a layout"
    ),
    pytest.param(["simulate", "t5"], "RECIPE = 't5'", "no such recipe", id="a simulated recipe"),
]


@pytest.mark.parametrize(("words", "start", "said"), COMMANDS)
def test_a_command_ends_with_one_message(ended, words, start, said):
    message = ended(cli.main, *words)
    assert message.startswith(f"error: {start}"), message
    assert said in message
    assert message.count("\n") == 1


USAGE = [
    pytest.param(["trian"], "No such command 'trian'. Did you mean 'train'?", id="a command"),
    pytest.param(["plan", "shwo"], "No such command 'shwo'", id="a command of plan"),
    pytest.param(["train"], "Missing argument", id="no recipe"),
    pytest.param(["launch"], "Missing argument", id="no script"),
    pytest.param(["train", "gpt", "--nproc", "0"], "greater than or equal to 1", id="no process"),
    pytest.param(["train", "gpt", "--nproc", "two"], "valid integer", id="two in letters"),
    pytest.param(["plan", "show", "--slack", "-1"], "greater than or equal to 0", id="slack"),
    pytest.param(["plan", "search"], "Missing option '--model'", id="nothing to plan"),
    pytest.param(["doctor", "--master-port", "70000"], "less than or equal to 65535", id="a port"),
    pytest.param(["bench", "kernels", "--fast"], "No such option: --fast", id="an option of bench"),
    pytest.param(["data", "build", "x", "--workers", "0"], "greater than or equal", id="workers"),
    pytest.param(
        ["convert", "a", "b", "--to", "megatron", "--checkpoint-version", "9"],
        "less than or equal to 3",
        id="a version",
    ),
]


@pytest.mark.parametrize(("words", "said"), USAGE)
def test_usage_is_told_with_code_2(ended, words, said, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert said in ended(cli.main, *words)


OPTIONS = [
    pytest.param(
        ["--max_steps", "ten"], "--max_steps = 'ten'", "invalid int", id="steps in letters"
    ),
    pytest.param(["--max_steps"], "--max_steps = None", "expected one argument", id="no value"),
    pytest.param(["--max_steps=5.0"], "--max_steps = '5.0'", "--help", id="half steps"),
    pytest.param(["--max_steps", "0"], "--max_steps = 0", "Give 1 or more", id="no step"),
    pytest.param(["--max_stepz", "4"], "--max_stepz", "Did you mean 'max_steps'?", id="misspelt"),
    pytest.param(["stray"], "stray", "no such option", id="a stray word"),
    pytest.param(["--eval_interval", "-1"], "--eval_interval = -1", "below 1", id="an interval"),
    pytest.param(["--sequence_length", "0"], "--sequence_length = 0", "below 1", id="no token"),
    pytest.param(
        ["--sequence_length", "9999"],
        "--sequence_length = 9999",
        "256 positions",
        id="a sequence longer than the model",
    ),
    pytest.param(["--vocab_size", "-3"], "--vocab_size = -3", "below 1", id="a vocabulary"),
    pytest.param(["--seed", "-1"], "--seed = -1", "Give 0 to", id="a seed below 0"),
    pytest.param(["--seed", "1" + "0" * 20], "--seed = 1", "Give 0 to", id="a seed beyond 32 bits"),
    pytest.param(["--resume", "maybe"], "--resume = 'maybe'", "yes/no", id="perhaps"),
    pytest.param(["--data", ""], "--data = ''", "it is empty", id="an unset variable for data"),
    pytest.param(
        ["--output", ""], "--output = ''", "it is empty", id="an unset variable for output"
    ),
    pytest.param(["--cache", " "], "--cache = ' '", "leave it out", id="a blank for a folder"),
    pytest.param(["--data", "nosuch.txt"], "--data = 'nosuch.txt'", "Check the path", id="no data"),
    pytest.param(
        ["--data", "~nosuchuser/x.txt"],
        "--data = '~nosuchuser/x.txt'",
        "no such file",
        id="no home",
    ),
    pytest.param(["--output", "/proc/nosuch"], "--output = '/proc/nosuch'", "another", id="proc"),
    pytest.param(["--balance", "nosuch"], "--balance = 'nosuch'", "auto, none", id="no plan"),
    pytest.param(["--balance_trial", "1"], "--balance_trial = True", "auto", id="an idle trial"),
    pytest.param(
        ["--split", "9,1"], "--split = '9,1'", "wavemare data build", id="a split of text"
    ),
    pytest.param(
        ["--model_config", "nosuch.json"],
        "--model_config = 'nosuch.json'",
        "JSON file",
        id="config",
    ),
    # Megatron's
    pytest.param(["--num-layers", "0"], "--num-layers = '0'", "above 0", id="no layer"),
    pytest.param(["--num-layers"], "--num-layers = None", "missing", id="layers without a value"),
    pytest.param(["--lr", "nan"], "--lr = 'nan'", "0 or more", id="a rate that is no number"),
    pytest.param(["--lr", "-1"], "--lr = '-1'", "0 or more", id="a negative rate"),
    pytest.param(
        ["--clip-grad", "inf"], "--clip-grad = 'inf'", "0 or more", id="infinite clipping"
    ),
    pytest.param(["--min-lr", "1"], "--min-lr = 1.0", "Give less than --lr", id="rates exchanged"),
    pytest.param(
        ["--lr-warmup-fraction", "7"], "--lr-warmup-fraction = '7'", "Give 0 to 1", id="7 warm-ups"
    ),
    pytest.param(["--lr-decay-style", "step"], "--lr-decay-style = 'step'", "cosine", id="a style"),
    pytest.param(["--fp16", "--bf16"], "fp16.enabled = True", "bf16", id="both 16-bit types"),
    pytest.param(
        ["--global-batch-size", "7"], "train_batch_size = 7", "Give at least 16", id="7 samples"
    ),
    pytest.param(
        ["--tensor-model-parallel-size", "3"],
        "wavemare.tensor_parallel.size = 3",
        "Start a multiple of 3",
        id="3 splits",
    ),
    pytest.param(
        ["--num-layers-per-virtual-pipeline-stage", "2"],
        "--num-layers-per-virtual-pipeline-stage = '2'",
        "no interleaved schedule",
        id="virtual stages",
    ),
    pytest.param(
        ["--tokenizer-type", "SentencePieceTokenizer"],
        "--tokenizer-type = 'SentencePieceTokenizer'",
        "Hugging Face folders",
        id="a tokenizer's type",
    ),
    pytest.param(
        ["--vocab-file", "a/v.json", "--merge-file", "b/m.txt"],
        "--merge-file = 'b/m.txt'",
        "different folders",
        id="two folders",
    ),
    pytest.param(["--load", "a", "--save", "b"], "--load = 'a'", "same folder", id="load and save"),
]


@pytest.fixture
def launched(monkeypatch):
    """This process as rank 0 of two, which never meet."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    values = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}
    for name, value in {**values, "MASTER_ADDR": "localhost", "MASTER_PORT": 29999}.items():
        monkeypatch.setenv(name, str(value))
    for name in ("TOKENIZERS_PARALLELISM", "HF_HUB_VERBOSITY"):  # set where libraries are quieted
        monkeypatch.setenv(name, "false" if name.startswith("TOK") else "error")


@pytest.fixture
def recipe(ended, launched, monkeypatch, tmp_path):
    monkeypatch.setattr("wavemare.recipes.job.quiet_libraries", lambda: None)
    config = str(pretrain.__file__).replace("pretrain.py", "pretrain_zero.json")

    def run(main, *words):
        start = ["--deepspeed_config", config, "--output", tmp_path / "run"]
        return ended(lambda: run_main(main, grace_s=0), *start, *words)

    return run


@pytest.mark.parametrize(("words", "start", "said"), OPTIONS)
def test_an_option_of_a_recipe(recipe, words, start, said):
    message = recipe(pretrain.main, *words)
    assert message.startswith(f"error: {start}"), message
    assert said in message


MODELS = [
    pytest.param({}, "--model", "it has no config.json", id="an empty folder"),
    pytest.param({"config.json": "{}"}, "--model", "it has no weights", id="no weights"),
    pytest.param(
        {"config.json": "{}", "x.safetensors": ""}, "--model", "no model_type", id="no model_type"
    ),
    pytest.param(
        {"config.json": "[", "x.safetensors": ""}, "--model", "cannot be read", id="no JSON"
    ),
    pytest.param(
        {"config.json": "[" * 50_000, "x.bin": ""}, "--model", "too deeply", id="brackets"
    ),
    pytest.param(
        {"config.json": '{"model_type": "bret"}', "x.bin": ""},
        "--model",
        "Did you mean 'bert'?",
        id="a type that there is not",
    ),
    pytest.param(
        {"config.json": '{"model_type": ["bert"]}', "x.bin": ""},
        "--model",
        'Add "model_type"',
        id="a list of types",
    ),
    pytest.param(
        {"config.json": '{"model_type": "bert", "hidden_size": "x"}', "x.bin": ""},
        "--model",
        "expected int, got str",
        id="a width in letters",
    ),
    pytest.param(
        {"config.json": '{"model_type": "bert", "max_position_embeddings": 8}', "x.bin": ""},
        "--sequence_length",
        "8 positions",
        id="a short model",
    ),
]


@pytest.mark.parametrize(("files", "key", "said"), MODELS)
def test_a_folder_to_finetune(recipe, write, tmp_path, files, key, said):
    (tmp_path / "model").mkdir()
    for name, content in files.items():
        write(f"model/{name}", content)
    message = recipe(finetune.main, "--model", tmp_path / "model")
    assert message.startswith(f"error: {key} = "), message
    assert said in message
