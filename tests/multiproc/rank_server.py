# SPDX-License-Identifier: Apache-2.0
"""A process that has imported the large libraries, and forks each rank of a program.

Imports and the end of an interpreter take longer than most programs of several ranks. Requests and
replies are lines of JSON on the standard streams:

* ``{"program", "arguments", "environment", "log", "folder", "own"}`` is answered by the pid of the
  process that runs the program. With ``own`` it ends as any interpreter does, otherwise at once.
* ``{"poll": pid}`` is answered by an exit code, or null while the program runs.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import tqdm

LIBRARIES = [
    "deepspeed",
    "deepspeed.module_inject",
    "deepspeed.moe.layer",
    "deepspeed.ops.adam",
    "deepspeed.runtime.zero.muon.original_muon",  # compiles, for which torch imports much
    "setuptools",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.trainer_utils",
    "wavemare.api",
    "wavemare.cli",
    "wavemare.comm.sparse",
    "wavemare.engine",
    "wavemare.engine.pipe.pipemare",
    "wavemare.engine.waves.wavelet",
    "wavemare.models",
    "wavemare.parallel",
    "wavemare.pipeline",
]
ALONE = Path("/dev/nvidiactl").exists()
"""Whether each rank is an interpreter of its own: CUDA does not work in forks."""
TESTS = str(Path(__file__).parents[1])
STACKS = signal.SIGRTMIN
"""On this signal a rank writes the stacks of its threads into its log."""


def register_stacks():
    faulthandler.register(STACKS, file=2, all_threads=True, chain=False)


def enter(request):
    """Take the log, environment, folder and words of a program."""
    os.setsid()
    register_stacks()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in (nothing, 0), (log, 1), (log, 2):
        os.dup2(source, target)
        if target != 1:
            os.close(source)
    os.environ.clear()
    os.environ.update(request["environment"])
    if request["folder"]:
        os.chdir(request["folder"])
    program = request["program"]
    sys.argv = [program, *request["arguments"]]
    sys.path[:1] = [os.path.dirname(program), TESTS]


def exit_code_of(program):
    """Run it, and wait for no threads; return the exit code that an interpreter would end with."""
    try:
        runpy.run_path(program, run_name="__main__")
        code: Any = 0
    except SystemExit as ended:
        code = 0 if ended.code is None else ended.code
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    return code


def run(request):
    """Run a program in this fork."""
    enter(request)
    if ALONE:
        os.execv(sys.executable, [sys.executable, __file__, *sys.argv])
    if request["own"]:
        runpy.run_path(request["program"], run_name="__main__")
        sys.exit()
    atexit._clear()
    code = exit_code_of(request["program"])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def poll(pid):
    """Return the exit code of a process, or None while it runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def run_alone():
    """Run the program that the command line names."""
    register_stacks()
    del sys.argv[0]
    sys.path[:1] = [os.path.dirname(sys.argv[0]), TESTS]
    sys.exit(exit_code_of(sys.argv[0]))


if __name__ == "__main__":
    if sys.argv[1:]:
        run_alone()
    for library in [] if ALONE else LIBRARIES:
        importlib.import_module(library)
    tqdm.tqdm.monitor_interval = 0  # without a thread
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: a fork would lose all but one"
    gc.collect()
    gc.freeze()  # forks need not look through what is common to all
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "poll" in request:
            answer = poll(request["poll"])
        elif (answer := os.fork()) == 0:
            run(request)
        print(json.dumps(answer), flush=True)
