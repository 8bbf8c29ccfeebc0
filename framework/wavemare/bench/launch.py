# SPDX-License-Identifier: Apache-2.0
"""Starting ranks that measure: on this machine, or on hosts of a laboratory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wavemare.bench.network import Laboratory
from wavemare.bench.options import MpiRequest, Request
from wavemare.comm.mpi import describe_mpi
from wavemare.engine.job_environment import free_port
from wavemare.errors import LaunchError

__all__ = ["RANK_ENVIRONMENT", "TIMEOUT_S", "exchange", "measure", "read_answer"]

RANK_ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
"""Of ranks that share cores."""
TIMEOUT_S = 4 * 3600.0
"""How long ranks may measure."""


@contextmanager
def exchange(request: Request) -> Iterator[tuple[list[str], Path]]:
    """Write a request to a file that is gone afterwards, like the answer.

    Args:
        request: What to measure.

    Yields:
        Options for a rank's module, and the file (JSON) that its result will be in.
    """
    with tempfile.TemporaryDirectory(prefix="wavemare-bench-") as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "result.json")
        asked.write_text(request.to_json(), encoding="utf-8")
        yield ["--request", str(asked), "--result", str(answered)], answered


def measure(request: MpiRequest, worker: str) -> dict[str, Any]:
    """Run ranks under MPI to their end and return what they measured.

    Args:
        request: What to measure.
        worker: The module that each rank runs; it calls `wavemare.bench.answer.answer`.

    Raises:
        LaunchError: There is no MPI here, no laboratory, or a rank failed (it has said why).
    """
    with exchange(request) as (options, answered):
        command = [sys.executable, "-m", "mpi4py", "-m", worker, *options]
        if request.mbit is None:
            code = _run_here(command, request.ranks)
        else:
            with Laboratory(request.ranks, request.mbit) as laboratory:
                code = laboratory.run_ranks(
                    command,
                    launcher="mpirun",
                    timeout_s=TIMEOUT_S,
                    environment=RANK_ENVIRONMENT,
                )
        return read_answer(answered, code, request.ranks)


def read_answer(answered: Path, code: int, ranks: int) -> dict[str, Any]:
    """Return what ranks that have ended left.

    Args:
        answered: The file, as `exchange` has named it.
        code: With which they ended.
        ranks: Number of processes.

    Raises:
        LaunchError: A rank failed (it has said why).
    """
    if code or not answered.exists():
        reason = f"the ranks ended with code {code}"
        raise LaunchError("ranks", ranks, reason, "Look at their output above")
    result: dict[str, Any] = json.loads(answered.read_text(encoding="utf-8"))
    return result


def _run_here(command: list[str], ranks: int) -> int:
    mpi = describe_mpi()
    program = mpi.mpirun()
    options = []
    if mpi.launcher_flavour == "Open MPI":
        options = ["--oversubscribe", "--bind-to", "none", "--allow-run-as-root"]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        **RANK_ENVIRONMENT,
    }
    launch = [program, *options, "-n", str(ranks), *command]
    return subprocess.run(launch, env=environment, check=False).returncode
