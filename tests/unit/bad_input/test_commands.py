# SPDX-License-Identifier: Apache-2.0
"""Mistakes on the command line of ``wavemare`` and of its recipes."""

import subprocess
import sys
from shlex import split

import pytest

from benchmarks import __main__ as benchmarks
from wavemare import cli
from wavemare.failure import run_main
from wavemare.recipes.bert import finetune
from wavemare.recipes.gpt import pretrain

SEARCH = "plan search --cluster 2xV100 --global-batch 8 --sequence 128 --model"
COMMANDS = [
    ("train gtp", "RECIPE = 'gtp'", "Did you mean 'gpt'?"),
    ("train bert/pretrian", "RECIPE = 'bert/pretrian'", "Did you mean 'bert/pretrain'?"),
    ("train gpt --config nosuch.json", "--config = 'nosuch.json'", "Name an existing"),
    ("train gpt --deepspeed_config=x.json", "--deepspeed_config = 'x.json'", "--config FILE"),
    ("train gpt --hostfile nosuch", "--hostfile = 'nosuch'", "existing"),
    ("train gpt --launcher mpirun", "--launcher = ''", "mpirun -n 4"),
    ("launch --launcher mpirun x.py", "SCRIPT = '--launcher'", "no such file or option"),
    ('train gpt --launcher-args "\'x"', "--launcher-args", "quotes are not closed"),
    ("launch nosuch.py", "SCRIPT = 'nosuch.py'", "no such file"),
    ("launch .", "SCRIPT = '.'", "Name a Python script"),
    ("plan show --schedule gpipe", "schedule = 'gpipe'", "Did you mean 'pipemare'?"),
    ("plan show --stages 0", "stages = 0", "at least 1"),
    ("plan show --stages 99999 --micro-batches 99999", "--stages = 99999", "than can be shown"),
    ("plan show --forward-ms 1;2", "--forward-ms = '1;2'", "no numbers"),
    ("plan show --send-ms 1,2", "--send-ms = '1,2'", "2 numbers for 4 stages"),
    ("plan show --backward-ms -1", "--backward-ms = '-1'", "0 or more"),
    ("plan show --collective-ms 1", "--collective-ms = '1'", "with tick-tock or accumulation"),
    ("plan show --schedule 1f1b --warmup-steps 2", "--warmup-steps = 2", "with pipemare"),
    ("plan show --schedule file:nosuch", "--schedule = 'nosuch'", "No such file"),
    ("plan show --schedule file:x --steps 2", "--steps = 2", "Leave out --steps"),
    ("plan show --output /proc/nosuch", "--output = '/proc/nosuch'", "Name another folder"),
    (f"{SEARCH} gpt9", "--model = 'gpt9'", "Did you mean 'gpt2'?"),
    (f"{SEARCH} gpt2 --dtype fp8", "dtype = 'fp8'", "no such dtype"),
    (f"{SEARCH} gpt2 --margin 0.999", "--cluster = ", "equal parts need"),
    (f"{SEARCH} gpt2 --output /proc/nosuch/x", "--output = '/proc/nosuch'", "no such folder"),
    (f"{SEARCH} gpt2 --json .", "--json = '.'", "a folder"),
    (
        "benchmarks pipeline --json /no/such/folder/x",
        "--json = '/no/such/folder'",
        "no such folder",
    ),
    (
        "benchmarks pipeline --trace /dev/null/folder",
        "--trace = '/dev/null/folder'",
        "cannot be made",
    ),
    ("benchmarks planner --ranks 3", "--ranks = 3", "even numbers"),
    ("benchmarks pipeline --stages 1", "--stages = 1", "Give 2 or more"),
    ("benchmarks pipeline --micro-batches 1,x", "--micro-batches = '1,x'", "as in 1,2,4,8"),
    ("benchmarks pipeline --forward-ms 3", "--forward-ms = 3.0", "Add --synthetic"),
    ("benchmarks sparse --densities nan", "--densities = [nan]", "at most 1"),
    ("benchmarks sparse --plot cost.txt", "--plot = 'cost.txt'", ".png or .svg"),
    ("simulate gpt --systems flash", "--systems = 'flash'", "Did you mean"),
    ("benchmarks wave --json .", "--json = '.'", "a folder of that name"),
    ("simulate gpt --set scheduler=WarmupLR", "scheduler = 'WarmupLR'", "not a mapping"),
    pytest.param(
        "simulate gpt --set scheduler.params=" + "[" * 100_000,
        "scheduler.params = '[[[",
        "not a mapping",
        id="100,000 brackets",
    ),
    ("benchmarks sparse --mib -1", "--mib = -1.0", "more than 0"),
    ("data inspect nosuch", "--data = 'nosuch'", "nosuch.idx does not exist"),
    ("data merge nosuch --output o", "--data = 'nosuch'", "side by side"),
    ("data build x.txt --output o --tokenizer nosuch", "--tokenizer = 'nosuch'", "save_pretrained"),
    ("convert ~nosuchuser/x t --to hf", "SOURCE = '~nosuchuser/x'", "neither config.json"),
    ("convert . . --to hf", "TARGET = ", "Choose another name"),
    ("convert . t --to onnx", "--to = 'onnx'", "no such format"),
    ("simulate t5", "RECIPE = 't5'", "no such recipe"),
]


def run(ended, words):
    """Run a command line of ours, or of the benchmarks, which are a program of their own."""
    first, *rest = split(words)
    return ended(benchmarks.main, *rest) if first == "benchmarks" else ended(cli.main, first, *rest)


@pytest.mark.parametrize(("words", "start", "said"), COMMANDS)
def test_a_command_ends_with_one_message(ended, words, start, said):
    message = run(ended, words)
    assert message.startswith(f"error: {start}"), message
    assert said in message
    assert message.count("\n") == 1


def test_a_process_ends_with_code_2_and_one_line(tmp_path):
    command = [sys.executable, "-m", "wavemare", "train", "gpt", "--config", "nosuch.json"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout == ""
    assert ended.stderr.startswith("error: --config = ")
    assert ended.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


USAGE = [
    ("trian", "No such command 'trian'. Did you mean 'train'?"),
    ("plan shwo", "No such command 'shwo'"),
    ("train", "Missing argument"),
    ("launch", "Missing argument"),
    ("train gpt --nproc 0", "value for '--nproc'"),
    ("plan show --slack -1", "value for '--slack'"),
    ("plan search", "Missing option '--model'"),
    ("benchmarks sparse --fast", "No such option"),
    ("data build x --workers 0", "value for '--workers'"),
    ("convert a b --to megatron --checkpoint-version 9", "value for '--checkpoint-version'"),
]


@pytest.mark.parametrize(("words", "said"), USAGE)
def test_usage_is_told_with_code_2(ended, words, said, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert said in run(ended, words)


OPTIONS = [
    ("--max_steps ten", "--max_steps = 'ten'", "invalid int"),
    ("--max_steps", "--max_steps = None", "expected one argument"),
    ("--max_steps 0", "--max_steps = 0", "Give 1 or more"),
    ("--max_stepz 4", "--max_stepz", "Did you mean 'max_steps'?"),
    ("stray", "stray", "no such option"),
    ("--sequence_length 9999", "--sequence_length = 9999", "256 positions"),
    ("--seed -1", "--seed = -1", "Give 0 to"),
    ("--resume maybe", "--resume = 'maybe'", "yes/no"),
    ("--data ''", "--data = ''", "it is empty"),
    ("--data nosuch.txt", "--data = 'nosuch.txt'", "Check the path"),
    ("--output /proc/nosuch", "--output = '/proc/nosuch'", "another"),
    ("--balance nosuch", "--balance = 'nosuch'", "auto, none"),
    ("--split 9,1", "--split = '9,1'", "wavemare data build"),
    ("--resume", "--resume = ", "there is no checkpoint"),
    ("--prompt ''", "--prompt = ''", "it is empty"),
    ("--model_config nosuch.json", "--model_config = 'nosuch.json'", "JSON file"),
    # Megatron's
    ("--num-layers 0", "--num_layers = 0", "Give 1 or more"),
    ("--num-layers", "--num_layers = None", "expected one argument"),
    ("--num-layer 2", "--num-layer", "Did you mean 'num_layers'"),
    ("--swiglu --num-experts 8", "--swiglu = None", "no such option, nor --num-experts. "),
    ("--lr nan", "--lr = nan", "0 or more"),
    ("--clip-grad inf", "--clip_grad = inf", "0 or more"),
    ("--min-lr 1", "--min-lr = 1.0", "Give less than --lr"),
    ("--lr-warmup-fraction 7", "--lr_warmup_fraction = 7.0", "Give 0 to 1"),
    ("--lr-decay-style step", "--lr-decay-style = 'step'", "cosine"),
    ("--fp16 --bf16", "fp16.enabled = True", "bf16"),
    ("--global-batch-size 7", "train_batch_size = 7", "Give 6"),
    ("--tensor-model-parallel-size 3", "wavemare.tensor_parallel.size = 3", "a multiple of 3"),
    (
        "--num-virtual-stages-per-pipeline-rank 2",
        "--num-virtual-stages-per-pipeline-rank = 2",
        "there is no pipeline",
    ),
    (
        "--tokenizer-type SentencePieceTokenizer",
        "--tokenizer-type = 'SentencePieceTokenizer'",
        "Hugging Face folders",
    ),
    ("--vocab-file a/v.json --merge-file b/m.txt", "--merge-file = 'b/m.txt'", "different folders"),
    ("--load a --save b", "--load = 'a'", "same folder"),
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
    monkeypatch.setattr("wavemare.training.setup.quiet_libraries", lambda: None)
    config = str(pretrain.__file__).replace("pretrain.py", "pretrain_zero.json")

    def run(main, *words):
        start = ["--deepspeed_config", config, "--output", tmp_path / "run"]
        return ended(lambda: run_main(main, grace_s=0), *start, *words)

    return run


@pytest.mark.parametrize(("words", "start", "said"), OPTIONS)
def test_an_option_of_a_recipe(recipe, words, start, said):
    message = recipe(pretrain.main, *split(words))
    assert message.startswith(f"error: {start}"), message
    assert said in message


CONFIGURATIONS = [
    ("{}", "--model", "no model_type"),
    ("[", "--model", "cannot be read"),
    pytest.param("[" * 50_000, "--model", "too deeply", id="50,000 brackets"),
    ('{"model_type": "bret"}', "--model", "Did you mean 'bert'?"),
    ('{"model_type": ["bert"]}', "--model", 'Add "model_type"'),
    ('{"model_type": "bert", "hidden_size": "x"}', "--model", "expected int, got str"),
    ('{"model_type": "bert", "max_position_embeddings": 8}', "--sequence_length", "8 positions"),
]


@pytest.mark.parametrize(("content", "key", "said"), CONFIGURATIONS)
def test_the_configuration_of_a_model_to_finetune(recipe, write, content, key, said):
    write("model/x.bin")
    config = write("model/config.json", content)
    message = recipe(finetune.main, "--model", config.parent)
    assert message.startswith(f"error: {key} = "), message
    assert said in message


def test_a_folder_without_a_model_to_finetune(recipe, write):
    folder = write("model/x.safetensors").parent
    assert "it has no config.json" in recipe(finetune.main, "--model", folder)
    write("model/config.json", "{}")
    assert "no model_type" in recipe(finetune.main, "--model", folder)
    (folder / "x.safetensors").unlink()
    assert "it has no weights" in recipe(finetune.main, "--model", folder)


@pytest.mark.parametrize(
    ("words", "package", "extra"),
    [
        ("report runs --output report.html", "plotly", "report"),
        ("plan show --schedule file:nosuch --output plan", "matplotlib", "report"),
        ("simulate gpt --systems flush --plot losses.png", "matplotlib", "report"),
        ("benchmarks sparse --plot cost.png", "matplotlib", "report"),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_its_extra(
    ended, words, package, extra, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    message = run(ended, words)
    assert message.startswith(f"error: {package} = None"), message
    assert f"pip install 'wavemare[{extra}]'" in message
    assert not list(tmp_path.iterdir())


WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None
from wavemare.comm.sparse import SparseComm
from wavemare.data.megatron_order import blend_index
from wavemare.errors import LaunchError
for act in (SparseComm, lambda: blend_index([1.0, 2.0], 3)):
    try:
        act()
    except LaunchError as error:
        print(error.key, error.remedy)
"""


def test_what_numba_compiles_names_its_extra():
    command = [sys.executable, "-c", WITHOUT_NUMBA]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.count("numba Install it: pip install 'wavemare[sparse]'\n") == 2
