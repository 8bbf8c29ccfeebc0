# SPDX-License-Identifier: Apache-2.0
"""The runner of all benchmarks: start ranks, here or on emulated hosts, and read their result.

A rank is ``python -m benchmarks.run MODULE:REQUEST ASKED ANSWERED``: ASKED is the file of the
request, and rank 0 writes the result to the file ANSWERED.
"""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.elastic.utils.distributed import get_free_port

from benchmarks.cluster import EmulatedCluster, RankGroup
from benchmarks.cluster.ranks import TIMEOUT_CODE
from benchmarks.request import Request
from wavemare.comm.mpi_library import describe_mpi
from wavemare.errors import LaunchError
from wavemare.failure import run_main
from wavemare.files import atomic_write_text

_RANK = "benchmarks.run"
_ROOT = str(Path(__file__).parents[1])  # of the checkout, where ranks find this package
_TIMEOUT_S = 4 * 3600.0
_FAILED = "failed-"
"""Begins the names of files, beside the answer, in which ranks that fail leave their errors."""


def run_ranks(
    request: Request,
    *,
    cluster: EmulatedCluster | None = None,
    ranks_per_host: int = 1,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> dict[str, Any]:
    """Run the ranks of a request to their end and return their result, with the machine.

    Args:
        request: What to measure.
        cluster: Open; None to start the ranks on this machine, where they share its memory.
        ranks_per_host: Number of processes on each host of the cluster.
        environment: More variables of the ranks.
        timeout_s: Seconds after which ranks that this function starts one by one are killed.

    Raises:
        LaunchError: The ranks cannot be started, or one failed (its message is above).
    """
    with tempfile.TemporaryDirectory(prefix="wavemare-bench-") as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "result.json")
        asked.write_text(request.model_dump_json(), encoding="utf-8")
        program = [sys.executable, "-m", *(["mpi4py", "-m"] if request.by_mpi else []), _RANK]
        kind = f"{type(request).__module__}:{type(request).__qualname__}"
        command = [*program, kind, str(asked), str(answered)]
        variables = {**_variables(request), **(environment or {})}
        if cluster is not None:
            code = cluster.run_ranks(
                command,
                launcher="mpirun" if request.by_mpi else "torch",
                ranks_per_host=ranks_per_host,
                timeout_s=timeout_s,
                environment=variables,
            )
        elif request.by_mpi:
            code = _run_mpi(command, request.num_ranks, variables)
        else:
            code = _run_each(command, request.num_ranks, variables, timeout_s)
        if code or not answered.exists():
            failed = sorted(Path(folder).glob(f"{_FAILED}*"), key=lambda file: file.stat().st_mtime)
            reason = failed[0].read_text(encoding="utf-8") if failed else _ended(code, timeout_s)
            raise LaunchError("ranks", request.num_ranks, reason, "Look at their output above")
        return json.loads(answered.read_text(encoding="utf-8"))


def _variables(request: Request) -> dict[str, str]:
    import torch

    path = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))
    if not request.on_cpu and torch.cuda.is_available():
        return {"PYTHONPATH": path}
    return {"PYTHONPATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def _ended(code: int, timeout_s: float) -> str:
    if code == TIMEOUT_CODE:
        return f"the ranks did not end within {timeout_s:.0f} seconds"
    return f"the ranks ended with code {code}"


def _run_each(
    command: list[str], ranks: int, variables: Mapping[str, str], timeout_s: float
) -> int:
    """Start each rank by itself, with the variables of ``torchrun``."""
    import torch

    shared = {**os.environ, **_meeting(ranks), **variables}
    on_gpu = shared.get("DS_ACCELERATOR") != "cpu" and torch.cuda.is_available()
    # NCCL refuses two ranks of one host on one GPU: with too few GPUs there are several hosts.
    local = min(ranks, torch.cuda.device_count()) if on_gpu else ranks
    shared["LOCAL_WORLD_SIZE"] = str(local)
    processes = [
        subprocess.Popen(
            command,
            env={
                **shared,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % local),
                "NCCL_HOSTID": str(rank // local),
            },
            start_new_session=True,  # this process handles Ctrl-C, and ends the ranks
        )
        for rank in range(ranks)
    ]
    group = RankGroup(processes, hosts=[], logs=Path(), ranks=ranks, echo=False)
    return group.wait(timeout_s)


def describe_error(error: BaseException) -> str:
    """Return an error's kind and the first line of its message."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}".rstrip(": ")


def _run_mpi(command: list[str], ranks: int, variables: Mapping[str, str]) -> int:
    mpi = describe_mpi()
    options = []
    if mpi.launcher_flavour == "Open MPI":
        options = ["--oversubscribe", "--bind-to", "none", "--allow-run-as-root"]
    launch = [mpi.mpirun(), *options, "-n", str(ranks), *command]
    environment = {**os.environ, **_meeting(ranks), **variables}
    return subprocess.run(launch, env=environment, check=False).returncode


def _meeting(ranks: int) -> dict[str, str]:
    port = str(get_free_port())
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}


def main() -> None:
    """Be a rank: join the group, measure, and write the result if this is rank 0."""
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    from wavemare.engine.launch.group import environment_rank, init_distributed
    from wavemare.observe import quiet_libraries
    from wavemare.observe.run import describe_machine

    kind, asked, answered = sys.argv[1:]
    request: Request = pkgutil.resolve_name(kind).model_validate_json(Path(asked).read_text())
    quiet_libraries()
    request.prepare()
    if "RANK" not in os.environ:  # MPICH and Open MPI have variables of their own
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(environment_rank())
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    try:
        init_distributed()
        quiet_libraries()
        result = pkgutil.resolve_name(request.measured_by)(request)
    except Exception as error:
        rank = os.environ["RANK"]
        left = Path(answered).with_name(f"{_FAILED}{rank}")
        atomic_write_text(left, f"rank {rank} failed: {describe_error(error)}")
        raise
    if dist.get_rank() == 0:
        text = json.dumps({"machine": describe_machine(), **result})
        atomic_write_text(Path(answered), text)
    dist.barrier()
    dist.destroy_process_group()  # gloo's threads must not outlive the interpreter


if __name__ == "__main__":
    run_main(main)
