# SPDX-License-Identifier: Apache-2.0
"""A pool of rank processes, forked from one process that has imported the large libraries.

Imports and the end of an interpreter take longer than most programs of several ranks. Here the
imports are paid once, and a process that a program left clean runs the next one. Requests and
replies are lines of JSON on the standard streams:

* ``{"program", "arguments", "environment", "log", "folder", "own"}`` is answered by the pid of the
  process that runs the program. With ``own`` it is a fork of its own, which ends as any interpreter
  does; otherwise it comes from the pool.
* ``{"poll": pid}`` is answered by an exit code, or null while the program runs.

A process goes back to the pool if its program succeeded and left no thread and no child. Before
the next program its process group is destroyed, and the state of the libraries' modules and
classes, the environment, the random state and the signal handlers are those of the start.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import faulthandler
import functools
import gc
import importlib
import itertools
import json
import logging
import operator
import os
import random
import runpy
import select
import signal
import sys
import threading
import traceback
import types
import warnings
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy
import torch
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
RESTORED = ("accelerate", "deepspeed", "torch.distributed", "transformers", "wavemare")
"""The packages whose modules and classes are restored; of torch itself, the functions."""
CONTAINERS = (dict, list, set, Counter, OrderedDict, defaultdict)
PROGRAMS_PER_PROCESS = 40
"""After so many a process is replaced, so that memory cannot pile up."""
STACKS = signal.SIGRTMIN
"""On this signal a rank writes the stacks of its threads into its log."""


# --- what a program may change ------------------------------------------------------------------


def namespaces():
    """Yield the modules that are restored, and the classes that they define."""
    packages = tuple(f"{package}." for package in RESTORED)
    for name, module in list(sys.modules.items()):
        if name == "torch" or f"{name}.".startswith(packages):
            yield module
            for value in list(vars(module).values()):
                if name != "torch" and issubclass(type(value), type) and value.__module__ == name:
                    yield value


def same(value, other):
    """Whether two containers of a kind hold the same objects in the same order."""
    if isinstance(value, dict):
        return same(list(value), list(other)) and same(list(value.values()), list(other.values()))
    if isinstance(value, set):
        return bool(value == other)
    return len(value) == len(other) and all(map(operator.is_, value, other))


def containers(value):
    """Yield the plain container that a name stands for, or those of a function's defaults."""
    if type(value) in CONTAINERS:
        yield value
    elif callable(value):
        while inner := vars(value).get("__wrapped__") if hasattr(value, "__dict__") else None:
            value = inner
        for default in getattr(value, "__defaults__", None) or ():
            if type(default) in CONTAINERS:
                yield default


class Saved:
    """What a module or class holds, and what its plain containers hold."""

    def __init__(self, owner):
        self.owner = owner
        self.values = {n: value for n, value in vars(owner).items() if not n.startswith("__")}
        self.counters = {
            name: copy.copy(value)
            for name, value in self.values.items()
            if isinstance(value, itertools.count)
        }
        self.contents = [(c, copy.copy(c)) for v in self.values.values() for c in containers(v)]

    def restore(self):
        present = vars(self.owner)
        for name in present.keys() - self.values.keys():
            # A submodule that was imported meanwhile stays imported.
            if not name.startswith("__") and not isinstance(present[name], types.ModuleType):
                delattr(self.owner, name)
        for name, value in self.values.items():
            if present.get(name) is not value:
                setattr(self.owner, name, value)
        for name, counter in self.counters.items():
            setattr(self.owner, name, copy.copy(counter))
        for container, content in self.contents:
            if not same(container, content):
                container.clear()
                container.extend(content) if isinstance(container, list) else container.update(
                    content
                )


class Start:
    """The state in which every program begins."""

    def __init__(self):
        self.saved = [Saved(owner) for owner in namespaces()]
        self.modules = set(sys.modules)
        self.path, self.hook, self.folder = sys.path[:], sys.excepthook, os.getcwd()
        self.loggers = [(each, each.level, each.handlers[:]) for each in loggers()]
        self.handlers = {s: signal.getsignal(s) for s in signal.valid_signals() if s != STACKS}
        self.filters = warnings.filters[:]
        self.random = random.getstate(), numpy.random.get_state(), torch.get_rng_state()

    def restore(self):
        """Restore it; return whether the process can run another program."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        for saved in self.saved:
            saved.restore()
        for name in set(sys.modules) - self.modules:
            # The next program may have another module of the same name.
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(sys.path[0]):
                del sys.modules[name]
        sys.path[:], sys.excepthook = self.path, self.hook
        os.chdir(self.folder)
        for logger, level, handlers in self.loggers:
            logger.setLevel(level)
            logger.handlers[:] = handlers
        for number, handler in self.handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        warnings.filters[:] = self.filters
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_grad_enabled(True)
        for restore, state in zip(
            (random.setstate, numpy.random.set_state, torch.set_rng_state), self.random, strict=True
        ):
            restore(state)
        for saved in self.saved:
            for value in saved.values.values():
                # What functions have kept of earlier calls.
                if type(value) is functools._lru_cache_wrapper:
                    value.cache_clear()
        gc.collect()
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        return threading.active_count() == 1 and not children


def loggers():
    known = logging.root.manager.loggerDict.values()
    return [logging.root, *(each for each in known if isinstance(each, logging.Logger))]


# --- a rank -------------------------------------------------------------------------------------


def enter(request):
    """Take the log, environment, folder and words of a program."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in (nothing, 0), (log, 1), (log, 2):
        os.dup2(source, target)
        if target != 1:
            os.close(source)
    os.environ.clear()
    os.environ.update(request["environment"])
    if request.get("folder"):
        os.chdir(request["folder"])
    program = request["program"]
    sys.argv = [program, *request["arguments"]]
    sys.path[0] = os.path.dirname(program)


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


def work(start, requests, replies):
    """Run programs until one leaves something behind."""
    atexit._clear()  # this process ends by os._exit
    for number, line in enumerate(requests, 1):
        request = json.loads(line)
        enter(request)
        code = exit_code_of(request["program"])
        clean = False
        if code == 0:
            try:
                clean = start.restore()
            except Exception:
                traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        again = clean and number < PROGRAMS_PER_PROCESS
        replies.write(json.dumps([code, again]) + "\n")
        replies.flush()
        if not again:
            os._exit(code & 0xFF)


# --- the server ---------------------------------------------------------------------------------


@dataclass
class Process:
    """A forked process: its pid, and the pipes of one that came from the pool."""

    pid: int
    requests: IO[str] | None = None
    replies: IO[str] | None = None

    def close(self):
        for pipe in (self.requests, self.replies):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Pool:
    """All forked processes, by pid, and those of the pool that wait for a program."""

    def __init__(self, start):
        self.state = start
        self.idle: list[Process] = []
        self.running: dict[int, Process] = {}

    def start(self, request):
        process = self.fork_own(request) if request["own"] else self.take()
        self.running[process.pid] = process
        if process.requests is not None:
            process.requests.write(json.dumps(request) + "\n")
            process.requests.flush()
        return process.pid

    def take(self):
        """Return a process that waits, or a new one."""
        while self.idle:
            process = self.idle.pop()
            if os.waitpid(process.pid, os.WNOHANG) == (0, 0):
                return process
            process.close()  # it was killed just after its program
        (request_out, request_in), (reply_out, reply_in) = os.pipe(), os.pipe()
        if (pid := os.fork()) == 0:
            self.leave()
            os.close(request_in)
            os.close(reply_out)
            work(self.state, os.fdopen(request_out), os.fdopen(reply_in, "w"))
            os._exit(0)
        os.close(request_out)
        os.close(reply_in)
        return Process(pid, os.fdopen(request_in, "w"), os.fdopen(reply_out))

    def fork_own(self, request):
        if (pid := os.fork()) == 0:
            self.leave()
            enter(request)
            # Beyond this server's frames, the end is that of `python PROGRAM`.
            runpy.run_path(request["program"], run_name="__main__")
            sys.exit()
        return Process(pid)

    def leave(self):
        """In a fork: let go of what is the server's."""
        os.setsid()
        for process in (*self.idle, *self.running.values()):
            process.close()
        faulthandler.register(STACKS, file=2, all_threads=True, chain=False)

    def poll(self, pid):
        """Return the exit code of a process's program, or None while it runs."""
        process = self.running[pid]
        code, again = None, False
        if process.replies and select.select([process.replies], [], [], 0)[0]:
            line = process.replies.readline()  # empty: it was killed
            code, again = json.loads(line) if line else (None, False)
        if not again:
            ended, status = os.waitpid(pid, 0 if code is not None else os.WNOHANG)
            if not ended:
                return None
            code = os.waitstatus_to_exitcode(status) if code is None else code
            process.close()
        del self.running[pid]
        if again:
            self.idle.append(process)
        return code


def serve(pool):
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        answer = pool.poll(request["poll"]) if "poll" in request else pool.start(request)
        print(json.dumps(answer), flush=True)
    for process in pool.idle:
        process.close()
        os.waitpid(process.pid, 0)


if __name__ == "__main__":
    for library in LIBRARIES:
        importlib.import_module(library)
    tqdm.tqdm.monitor_interval = 0  # without a thread
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: a fork would lose all but one"
    pool = Pool(Start())
    gc.collect()
    gc.freeze()  # forks need not look through what is common to all
    serve(pool)
