# SPDX-License-Identifier: Apache-2.0
"""Let command lines read and check their options, and stop each where its work would begin.

Arguments: result folder, and a JSON list of lines. ``rank_0.json`` says what is wrong with which.
"""

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import sys
from importlib import import_module
from pathlib import Path

import typer

from benchmarks.__main__ import app as benchmarks
from wavemare.cli import app
from wavemare.errors import WavemareError

# Where work begins: other processes, a process group, text, measurements, files of other commands.
WORK = {
    "subprocess": ["Popen"],
    "wavemare.engine": ["init_distributed"],
    "wavemare.training.run": ["join_and_seed"],
    "wavemare.training.text": ["read_text"],
    "wavemare.data.text": ["load_texts_to_build"],
    "wavemare.data.indexed": ["open_indexed", "merge_indexed"],
    "wavemare.megatron.convert": ["convert"],
    "wavemare.megatron.inspect": ["inspect"],
    "wavemare.parallel.planner.memory": ["rank_memory"],
    "wavemare.report": ["read_run"],
}
COMMANDS = {
    "wavemare": typer.main.get_command(app),
    "benchmarks": typer.main.get_command(benchmarks),
}
OF_RANKS = re.compile(r".* (?:-m|--module) (wavemare\.recipes\.\S+) (.*)")
RANKS = re.compile(r" --(?:num_accelerators|num_gpus|nproc-per-node) (\d+) ")


class WorkBegins(BaseException):
    """The options are accepted. Its arguments are the command of a process that is started."""


def begin(command=(), *_, **__):
    raise WorkBegins(*(map(str, command) if isinstance(command, list) else ()))


def run(words):
    """Run a command of ours, or rank 0 of a program of ranks."""
    line = shlex.join(words)
    if (program := OF_RANKS.match(line)) and (ranks := RANKS.search(line)):
        os.environ["WORLD_SIZE"] = ranks[1]
        sys.argv = [program[1], *shlex.split(program[2])]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    for program, command in COMMANDS.items():
        if program in words:
            command.main([*words[words.index(program) + 1 :]], program)


def accept(words):
    """Check the options of a command, and those of the command that it starts."""
    try:
        run(words)
    except WorkBegins as begun:
        accept(begun.args)


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    for module, names in WORK.items():
        for name in names:
            holder, _, function = name.rpartition(".")
            imported = import_module(module)
            setattr(getattr(imported, holder) if holder else imported, function, begin)
    problems = {}
    for line in json.loads(sys.argv[2]):
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                accept(shlex.split(line))
        except WavemareError as error:
            problems[line] = str(error)
        except SystemExit as end:
            if end.code:
                problems[line] = said.getvalue()
    Path("rank_0.json").write_text(json.dumps(problems))
