# SPDX-License-Identifier: Apache-2.0
"""Mistakes on the command line of ``wavemare`` and of its recipes."""

import subprocess
import sys
from shlex import split

import pytest

from benchmarks import __main__ as benchmarks
from wavemare import cli
from wavemare.cli.train import WHOLE_MODELS
from wavemare.failure import run_main
from wavemare.recipes.bert import finetune
from wavemare.recipes.gpt import pretrain

SEARCH = "layout search --cluster 2xV100 --global-batch 8 --sequence 128 --model"
COMMANDS = [
    ("train gtp", "RECIPE = 'gtp'"),
    ("train bert/pretrian", "RECIPE = 'bert/pretrian'"),
    ("train gpt --config nosuch.json", "--config = 'nosuch.json'"),
    ("train gpt --deepspeed_config=x.json", "--deepspeed_config = 'x.json'"),
    ("train gpt --hostfile nosuch", "--hostfile = 'nosuch'"),
    ("train gpt --launcher mpirun", "--launcher = ''"),
    ("launch --launcher mpirun x.py", "SCRIPT = '--launcher'"),
    ('train gpt --launcher-args "\'x"', "--launcher-args"),
    ("launch nosuch.py", "SCRIPT = 'nosuch.py'"),
    ("launch .", "SCRIPT = '.'"),
    ("plan show --schedule gpipe", "schedule = 'gpipe'"),
    ("plan show --stages 0", "stages = 0"),
    ("plan show --stages 99999 --micro-batches 99999", "--stages = 99999"),
    ("plan show --forward-ms 1;2", "--forward-ms = '1;2'"),
    ("plan show --send-ms 1,2", "--send-ms = '1,2'"),
    ("plan show --backward-ms -1", "--backward-ms = '-1'"),
    ("plan show --collective-ms 1", "--collective-ms = '1'"),
    ("plan show --schedule 1f1b --warmup-steps 2", "--warmup-steps = 2"),
    ("plan show --schedule file:nosuch", "--schedule = 'nosuch'"),
    ("plan show --schedule file:x --steps 2", "--steps = 2"),
    ("plan show --output /proc/nosuch", "--output = '/proc/nosuch'"),
    (f"{SEARCH} gpt9", "--model = 'gpt9'"),
    (f"{SEARCH} gpt2 --dtype fp8", "dtype = 'fp8'"),
    (f"{SEARCH} gpt2 --margin 0.999", "--cluster = "),
    (f"{SEARCH} gpt2 --output /proc/nosuch/x", "--output = '/proc/nosuch'"),
    (f"{SEARCH} gpt2 --json .", "--json = '.'"),
    ("benchmarks pipeline --json /no/such/folder/x", "--json = '/no/such/folder'"),
    ("benchmarks pipeline --trace /dev/null/folder", "--trace = '/dev/null/folder'"),
    ("benchmarks planner --ranks 3", "--ranks = 3"),
    ("benchmarks pipeline --stages 1", "--stages = 1"),
    ("benchmarks pipeline --micro-batches 1,x", "--micro-batches = '1,x'"),
    ("benchmarks pipeline --forward-ms 3", "--forward-ms = 3.0"),
    ("benchmarks sparse --densities nan", "--densities = [nan]"),
    ("benchmarks sparse --plot cost.txt", "--plot = 'cost.txt'"),
    ("simulate gpt --systems flash", "--systems = 'flash'"),
    ("benchmarks wave --json .", "--json = '.'"),
    ("simulate gpt --set scheduler=WarmupLR", "scheduler = 'WarmupLR'"),
    pytest.param(
        "simulate gpt --set scheduler.params=" + "[" * 100_000,
        "scheduler.params = '[[[",
        id="100,000 brackets",
    ),
    ("benchmarks sparse --mib -1", "--mib = -1.0"),
    ("data inspect nosuch", "--data = 'nosuch'"),
    ("data merge nosuch --output o", "--data = 'nosuch'"),
    ("data build x.txt --output o --tokenizer nosuch", "--tokenizer = 'nosuch'"),
    ("convert ~nosuchuser/x t --to hf", "checkpoint = '~nosuchuser/x'"),
    ("convert . . --to hf", "TARGET = "),
    ("convert . t --to onnx", "--to = 'onnx'"),
    ("simulate t5", "RECIPE = 't5'"),
    ("simulate gpt --trace_steps 4", "--trace_steps = 4"),
    ("simulate gpt --final_eval_samples 64", "--final_eval_samples = '64'"),
    ("simulate gpt --prompt x", "--prompt = 'x'"),
    ("simulate bert --prompt x", "--prompt = 'x'"),
    ("simulate gpt --save-megatron x", "--save_megatron = 'x'"),
    ("simulate bert --balance auto", "--balance = 'auto'"),
]


def run(ended, words):
    """Run a command line of ours, or of the benchmarks, which are a program of their own."""
    first, *rest = split(words)
    return ended(benchmarks.main, *rest) if first == "benchmarks" else ended(cli.main, first, *rest)


@pytest.mark.parametrize(("words", "start"), COMMANDS)
def test_a_command_ends_with_one_message(ended, words, start):
    message = run(ended, words)
    assert message.startswith(f"error: {start}"), message
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
    ("layout search", "Missing option '--model'"),
    ("benchmarks sparse --fast", "No such option"),
    ("data build x --workers 0", "value for '--workers'"),
    ("convert a b --to megatron --iteration -1", "value for '--iteration'"),
]


@pytest.mark.parametrize(("words", "said"), USAGE)
def test_usage_is_told_with_code_2(ended, words, said, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert said in run(ended, words)


OPTIONS = [
    ("--max_steps ten", "--max_steps = 'ten'"),
    ("--max_steps", "--max_steps = None"),
    ("--max_steps 0", "--max_steps = 0"),
    ("--max_stepz 4", "--max_stepz"),
    ("stray", "stray"),
    ("--sequence_length 9999", "--sequence_length = 9999"),
    ("--seed -1", "--seed = -1"),
    ("--resume maybe", "--resume = 'maybe'"),
    ("--data ''", "--data = ''"),
    ("--data nosuch.txt", "--data = 'nosuch.txt'"),
    ("--output /proc/nosuch", "--output = '/proc/nosuch'"),
    ("--balance nosuch", "--balance = 'nosuch'"),
    ("--split 9,1", "--split = '9,1'"),
    ("--resume", "--resume = "),
    ("--prompt ''", "--prompt = ''"),
    ("--model_config nosuch.json", "--model_config = 'nosuch.json'"),
    # Megatron's
    ("--num-layers 0", "--num_layers = 0"),
    ("--num-layers", "--num_layers = None"),
    ("--num-layer 2", "--num-layer"),
    ("--swiglu --num-experts 8", "--position-embedding-type = 'learned_absolute'"),
    ("--lr nan", "--lr = nan"),
    ("--clip-grad inf", "--clip_grad = inf"),
    ("--min-lr 1", "--min-lr = 1.0"),
    ("--lr-warmup-fraction 7", "--lr_warmup_fraction = 7.0"),
    ("--lr-decay-style step", "--lr-decay-style = 'step'"),
    ("--fp16 --bf16", "fp16.enabled = True"),
    ("--global-batch-size 7", "train_batch_size = 7"),
    ("--tensor-model-parallel-size 3", "wavemare.tensor_parallel.size = 3"),
    ("--num-virtual-stages-per-pipeline-rank 2", "--num-virtual-stages-per-pipeline-rank = 2"),
    ("--tokenizer-type SentencePieceTokenizer", "--tokenizer-type = 'SentencePieceTokenizer'"),
    ("--vocab-file a/v.json --merge-file b/m.txt", "--merge-file = 'b/m.txt'"),
    ("--load a --save b", "--load = 'a'"),
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
    config = str(pretrain.__file__).replace(".py", ".json")

    def run(main, *words):
        start = ["--deepspeed_config", config, "--set", *WHOLE_MODELS, "--output", tmp_path / "run"]
        said = ended(lambda: run_main(main, grace_s=0), *start, *words)
        return said[said.index("error: ") :]  # behind what each "auto" has become

    return run


@pytest.mark.parametrize(("words", "start"), OPTIONS)
def test_an_option_of_a_recipe(recipe, words, start):
    message = recipe(pretrain.main, *split(words))
    assert message.startswith(f"error: {start}"), message


CONFIGURATIONS = [
    (None, "--model"),
    ("{}", "--model"),
    ("[", "--model"),
    pytest.param("[" * 50_000, "--model", id="50,000 brackets"),
    ('{"model_type": "bret"}', "--model"),
    ('{"model_type": ["bert"]}', "--model"),
    ('{"model_type": "bert", "hidden_size": "x"}', "--model"),
    ('{"model_type": "bert", "max_position_embeddings": 8}', "--sequence_length"),
]


@pytest.mark.parametrize(("content", "key"), CONFIGURATIONS)
def test_the_configuration_of_a_model_to_finetune(recipe, write, content, key):
    folder = write("model/x.bin").parent
    if content is not None:
        write("model/config.json", content)
    message = recipe(finetune.main, "--model", folder)
    assert message.startswith(f"error: {key} = "), message


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


@pytest.mark.long
def test_what_numba_compiles_names_its_extra():
    command = [sys.executable, "-c", WITHOUT_NUMBA]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.count("numba Install it: pip install 'wavemare[sparse]'\n") == 2
