# SPDX-License-Identifier: Apache-2.0
"""Starting ranks that measure: on this machine, or on hosts of a laboratory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wavemare.bench.network import Laboratory
from wavemare.bench.options import MpiRequest, Request
from wavemare.comm.mpi_library import describe_mpi
from wavemare.engine.launch.environment import free_port
from wavemare.errors import LaunchError

__all__ = ["exchange", "measure", "measure_on_hosts", "read_answer"]

_RANK_ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
"""Of ranks that share cores."""
_TIMEOUT_S = 4 * 3600.0
"""How long ranks may measure."""
_PROGRAM = (sys.executable, "-m")
_MPI_PROGRAM = (*_PROGRAM, "mpi4py", "-m")


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
    if request.mbit is not None:
        with Laboratory(request.ranks, request.mbit) as laboratory:
            return measure_on_hosts(laboratory, request, worker, launcher="mpirun")
    with exchange(request) as (options, answered):
        code = _run_here([*_MPI_PROGRAM, worker, *options], request.ranks)
        return read_answer(answered, code, request.ranks)


def measure_on_hosts(
    laboratory: Laboratory,
    request: MpiRequest,
    worker: str,
    *,
    launcher: str = "torch",
    ranks_per_host: int = 1,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run ranks on the hosts of a laboratory to their end and return what they measured.

    Args:
        laboratory: Open.
        request: What to measure.
        worker: As for `measure`.
        launcher: As for `Laboratory.start_ranks`, like what follows.
        ranks_per_host: Number of processes on each host.
        environment: Variables beside those of all ranks.

    Raises:
        LaunchError: A rank failed (it has said why).
    """
    program = _MPI_PROGRAM if launcher == "mpirun" else _PROGRAM
    with exchange(request) as (options, answered):
        code = laboratory.run_ranks(
            [*program, worker, *options],
            launcher=launcher,
            ranks_per_host=ranks_per_host,
            timeout_s=_TIMEOUT_S,
            environment={**_RANK_ENVIRONMENT, **(environment or {})},
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
    launch = [program, *options, "-n", str(ranks), *command]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        **_RANK_ENVIRONMENT,
    }
    return subprocess.run(launch, env=environment, check=False).returncode
