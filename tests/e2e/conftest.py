# SPDX-License-Identifier: Apache-2.0
"""Small texts and models, and the commands that a person would type."""

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import psutil
import pytest

from wavemare.engine.config.resolve import load_config
from wavemare.engine.launch.environment import free_port
from wavemare.training.config import change_config

sys.path.append(str(Path(__file__).parents[1] / "mpi"))  # of mpi_jobs
from mpi_jobs import needed_mpi, remove_left, segments

LIMIT_S = 600
"""How long a command may run: a net below hangs, far from what any takes on a busy machine."""
CPU = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
BIN = Path(sys.executable).parent
PROGRAM = Path(__file__).parent / "programs" / "recipe.py"
LAUNCHERS = {
    "deepspeed": ["deepspeed", "--num_gpus", "2", "--master_port"],
    "torchrun": ["torchrun", "--nproc-per-node", "2", "--master-port"],
    "mpirun": ["mpirun", "-n", "2", sys.executable],
    "mpi4py": ["mpirun", "-n", "2", sys.executable, "-m", "mpi4py"],
    "launch": ["wavemare", "launch"],
}
RECIPES = Path(str(files("wavemare.recipes")))
TINY_GPT = {"model_type": "gpt2", "n_layer": 4, "n_embd": 32, "n_head": 2, "n_positions": 64}
TINY_BERT = {
    "model_type": "bert",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
TINY_LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
TINY = {"gpt": TINY_GPT, "bert": TINY_BERT, "llama": TINY_LLAMA}
SMALL = {"sequence_length": 32, "vocab_size": 300, "eval_samples": 16, "log_interval": 1}


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    output: str

    def check(self):
        assert self.code == 0, self.output[-6000:]
        return self


@dataclass(frozen=True)
class Started:
    """A command that runs, and the file in which all is that it prints."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def output(self):
        return self.log.read_text(errors="replace")

    def wait_until(self, condition):
        """Wait for a condition while the command runs."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert self.process.poll() is None, self.output[-4000:]
            assert time.monotonic() < deadline, self.output[-4000:]
            time.sleep(0.01)

    def end(self, timeout=LIMIT_S):
        """Wait for its end."""
        try:
            return Ended(self.process.wait(timeout), self.output)
        except subprocess.TimeoutExpired:
            pytest.fail(f"longer than {timeout} s:\n{self.output[-4000:]}")

    def finish(self, segments_before):
        """End what is left of it."""
        if self.process.poll() is None:
            # Launchers give sessions to what they start: all descendants are ended one by one.
            for descendant in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    descendant.kill()
            self.process.kill()
            self.process.wait()
        # mpirun may end with 0 although a rank left without MPI's end.
        remove_left(segments_before)


@pytest.fixture
def start(tmp_path, tmp_path_factory):
    """Start a program of this environment in a folder of its own; it ends with the test."""

    def run(*words, environment=None):
        program, *options = map(str, words)
        log, before = tmp_path_factory.mktemp("log") / "log", segments()
        with log.open("w") as output:
            process = subprocess.Popen(
                [str(BIN / program), *options],
                cwd=tmp_path,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **CPU, **(environment or {})},
                start_new_session=True,
            )
        started = Started(process, log)
        ends.callback(started.finish, before)
        return started

    with contextlib.ExitStack() as ends:
        yield run


@pytest.fixture
def command(tmp_path, fork, start):
    """Run a program of this environment to its end, which must come within a time limit.

    ``wavemare`` runs in a process that has imported it, unless it is to have its own interpreter.
    """

    def run(*words, timeout=LIMIT_S, environment=None, interpreter=False):
        if words[0] != "wavemare" or interpreter:
            return start(*words, environment=environment).end(timeout)
        environment, before = {**os.environ, **CPU, **(environment or {})}, segments()
        words = [BIN / words[0], *words[1:]]
        ended = fork(*words, folder=tmp_path, timeout=timeout, environment=environment)
        assert not ended.ended_by_harness, f"longer than {timeout} s:\n{ended.outputs[0][-8000:]}"
        if ended.codes[0]:
            remove_left(before)
        return Ended(ended.codes[0], ended.outputs[0])

    return run


@pytest.fixture
def recipe(launch, tmp_path_factory):
    """Run a recipe as two ranks, as a launcher does, but without its start-up."""

    def run(name, *options):
        module = f"wavemare.recipes.{name.replace('/', '.')}"
        folder = tmp_path_factory.mktemp("ranks")
        finished = launch(PROGRAM, module, *options, folder=folder)
        return Ended(max(finished.codes, key=abs), "".join(finished.outputs))

    return run


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    """Forty documents of a small made-up language, in which words predict each other."""
    folder = tmp_path_factory.mktemp("text")
    subjects, verbs = ["the wave", "a stage", "one rank", "this batch"], ["sends", "holds", "waits"]
    for number in range(40):
        lines = [
            f"{subjects[(number + line) % 4]} {verbs[line % 3]} number {line % 10} to another."
            for line in range(60)
        ]
        (folder / f"{number:02d}.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="session")
def small_options(text_folder, tmp_path_factory):
    """Options that make a recipe small, with a model configuration for its family."""
    folder = tmp_path_factory.mktemp("models")
    cache = tmp_path_factory.mktemp("cache")

    def options(family, output, **changes):
        config = folder / f"{family}.json"
        config.write_text(json.dumps(TINY[family]))
        values = {
            **SMALL,
            "data": text_folder,
            "model_config": config,
            "output": output,
            "cache": cache,
            "max_steps": 20,
            "eval_interval": 10,
            "save_interval": 10,
            **changes,
        }
        words = []
        for name, value in values.items():
            if value is True:
                words.append(f"--{name}")
            elif value is not None:
                words += [f"--{name}", str(value)]
        return words

    return options


ALONE = ("wavemare.pipeline=null", "train_micro_batch_size_per_gpu=null")
LAYOUTS = {
    "pipeline": ("wavemare.pipeline.stages=2", "wavemare.pipeline.schedule=1f1b"),
    "pipemare": (
        "wavemare.pipeline.schedule=pipemare",
        "wavemare.pipeline.pipemare.warmup_steps=auto",
    ),
    "zero": ALONE,
    "wave": (
        "wavemare.pipeline=null",
        "wavemare.tensor_parallel.size=2",
        "wavemare.wavelet.mode=sync",
    ),
    "sparse": (*ALONE, "zero_optimization.stage=0", "wavemare.sparse_collective.mode=auto"),
    "experts": (*ALONE, "wavemare.expert_parallel.size=2"),
    "local_steps": (
        *ALONE,
        'wavemare.local_steps={"mode": "diloco", "every": 32, "fragments": 4, "overlap": 8}',
    ),
}
"""Changes of a recipe's JSON, as docs/recipes.md gives them."""


@pytest.fixture
def recipe_config(tmp_path_factory):
    """The JSON of a recipe, changed to another layout by the words of ``--set``."""

    def write(recipe, layout):
        config = load_config(RECIPES / f"{recipe}.json")
        changed = change_config(config, LAYOUTS[layout])
        file = tmp_path_factory.mktemp("config") / f"{layout}.json"
        file.write_text(json.dumps(changed))
        return file

    return write


@pytest.fixture
def words_of(monkeypatch):
    """Return the words by which a launcher starts two ranks of the script that follows them."""
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")

    def words(launcher):
        found = LAUNCHERS[launcher]
        if "mpi" in launcher:
            if needed_mpi().flavour == "Open MPI" and found[0] == "mpirun":
                found = ["mpirun", "--oversubscribe", *found[1:]]
        if found[-1].endswith("port"):
            found = [*found, str(free_port())]
        return found

    return words
