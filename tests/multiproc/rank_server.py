# SPDX-License-Identifier: Apache-2.0
"""Fork ranks from one process that has imported the large libraries.

The imports take longer than most programs of several ranks: here they are paid once. The server
runs nothing of what it imports and has no thread besides its own, so a fork of it is as good as a
new interpreter. Requests and replies are lines of JSON on the standard streams:
``{"program", "arguments", "environment", "log"}`` is answered by a pid, ``{"poll": pid}`` by an
exit code or null.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import sys
from typing import Any

LIBRARIES = [
    "deepspeed",
    "deepspeed.runtime.zero.muon.original_muon",  # compiles, for which torch imports much
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "wavemare.api",
    "wavemare.comm.sparse",
    "wavemare.engine",
    "wavemare.models",
    "wavemare.pipeline",
]


def serve() -> dict[str, Any] | None:
    """Answer requests until there are no more: None. A forked child returns its request."""
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                return request
        print(json.dumps(answer), flush=True)
    return None


def become(request: dict[str, Any]) -> None:
    """Go on as ``python PROGRAM ARGUMENTS`` would, in a session of its own."""
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in (nothing, 0), (log, 1), (log, 2):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(request["environment"])
    program = request["program"]
    sys.argv = [program, *request["arguments"]]
    sys.path[0] = os.path.dirname(program)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    for library in LIBRARIES:
        importlib.import_module(library)
    gc.freeze()  # forks need not look through what is common to all
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: a fork would lose all but one"
    if (request := serve()) is not None:
        become(request)
