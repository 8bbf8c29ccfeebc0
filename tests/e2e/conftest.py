# SPDX-License-Identifier: Apache-2.0
"""Small texts and models, and the commands that a person would type."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import psutil
import pytest

from wavemare.comm.mpi import describe_mpi
from wavemare.engine.job_environment import reserved_port

BIN = Path(sys.executable).parent
PROGRAM = Path(__file__).parent / "programs" / "recipe.py"
LAUNCHERS = {
    "deepspeed": ["deepspeed", "--num_gpus", "2", "--master_port"],
    "torchrun": ["torchrun", "--nproc-per-node", "2", "--master-port"],
    "mpirun": ["mpirun", "-n", "2", sys.executable],
    "mpi4py": ["mpirun", "-n", "2", sys.executable, "-m", "mpi4py"],
    "launch": ["wavemare", "launch"],
    "launch-mpirun": ["wavemare", "launch", "--launcher", "mpirun"],
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
SMALL = {"sequence_length": 32, "vocab_size": 300, "eval_samples": 16, "log_interval": 1}


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    output: str

    def check(self) -> Ended:
        assert self.code == 0, self.output[-6000:]
        return self


@pytest.fixture
def command(tmp_path: Path, fork: Callable[..., Any]) -> Callable[..., Ended]:
    """Run a program of this environment from a folder of its own; all of it ends at the limit.

    ``wavemare`` runs in a process that has imported it, unless it is to have its own interpreter.
    """

    def run(
        *words: object,
        timeout: float = 600,
        environment: dict[str, str] | None = None,
        interpreter: bool = False,
    ) -> Ended:
        program, *options = map(str, words)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        if program == "wavemare" and not interpreter:
            ended = fork(
                BIN / program, *options, folder=tmp_path, timeout=timeout, environment=environment
            )
            assert not ended.ended_by_harness, (
                f"longer than {timeout} s:\n{ended.outputs[0][-8000:]}"
            )
            return Ended(ended.codes[0], ended.outputs[0])
        process = subprocess.Popen(
            [str(BIN / program), *options],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            # The launcher has a session of its own: all descendants are ended one by one.
            for descendant in psutil.Process(process.pid).children(recursive=True):
                descendant.kill()
            process.kill()
            output, _ = process.communicate()
            pytest.fail(f"{program} took longer than {timeout} s:\n{output[-4000:]}")
        return Ended(process.returncode, output)

    return run


@pytest.fixture
def recipe(
    launch: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Ended]:
    """Run a recipe as two ranks, as a launcher does, but without its start-up."""

    def run(name: str, *options: object) -> Ended:
        module = f"wavemare.recipes.{name.replace('/', '.')}"
        folder = tmp_path_factory.mktemp("ranks")
        finished = launch(PROGRAM, module, *options, folder=folder)
        return Ended(max(finished.codes, key=abs), "".join(finished.outputs))

    return run


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
def small_options(
    text_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """Options that make a recipe small, with a model configuration for its family."""
    folder = tmp_path_factory.mktemp("models")
    cache = tmp_path_factory.mktemp("cache")

    def options(family: str, output: Path, **changes: Any) -> list[str]:
        config = folder / f"{family}.json"
        config.write_text(json.dumps(TINY_GPT if family == "gpt" else TINY_BERT))
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


@pytest.fixture
def recipe_config() -> Callable[[str, str], Path]:
    """The JSON that stands beside a recipe."""
    return lambda recipe, engine: RECIPES / f"{recipe}_{engine}.json"


@pytest.fixture
def words_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], list[str]]]:
    """Return the words by which a launcher starts two ranks of the script that follows them."""
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")

    def words(launcher: str) -> list[str]:
        found = LAUNCHERS[launcher]
        if "mpi" in launcher:
            mpi = describe_mpi()
            if mpi.launcher is None or mpi.flavour is None or not mpi.launcher_matches:
                pytest.skip(f"needs MPI and its mpirun (the extra 'mpi'): {mpi.problem or mpi}")
            if mpi.flavour == "Open MPI" and found[0] == "mpirun":
                found = ["mpirun", "--oversubscribe", *found[1:]]
        if found[-1].endswith("port"):
            found = [*found, str(held.enter_context(reserved_port()))]
        return found

    with contextlib.ExitStack() as held:
        yield words
