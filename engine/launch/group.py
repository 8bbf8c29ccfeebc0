# SPDX-License-Identifier: Apache-2.0
"""Joining the processes that a launcher started, and ending with an exit code that it sees."""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from wavemare.comm.waits import failing, waiting
from wavemare.engine.launch.environment import (
    JOB_STARTED,
    MAX_RESTARTS,
    RANK_VARIABLES,
    RESTART_COUNT,
    SIZE_VARIABLES,
    TORCH_VARIABLES,
    check_environment,
    launcher_rank,
    torch_variables,
)
from wavemare.errors import LaunchError

# The default of deepspeed.initialize, which cannot be distinguished from the user's choice.
_DEFAULT_PORT = 29500

_CLOCK_SLACK_S = 1.0
"""By how much the clock of a file system may be behind."""
# How gloo, NCCL and TCPStore report a lost peer.
_PEER_LOSS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "remote process exited",
    "socket closed",
    "failed to recv, got 0 bytes",
)
_MADE: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def environment_rank() -> int:
    """Return the global rank that the launcher gave to this process, or 0."""
    return _first_number(RANK_VARIABLES, 0)


def environment_world_size() -> int:
    """Return the number of processes that the launcher started, or 1."""
    return _first_number(SIZE_VARIABLES, 1)


def _first_number(names: tuple[str, ...], default: int) -> int:
    texts = (os.environ.get(name, "") for name in names)
    return next((int(text) for text in texts if text.isascii() and text.isdecimal()), default)


def gather(value: Any, group: Any = None) -> list[Any]:
    """Return the values of all ranks, by a collective."""
    from torch import distributed

    values = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(values, value, group=group)
    return values


def peer_loss(error: BaseException) -> str | None:
    """Return the words by which an error tells of a lost peer; None if it is another one."""
    if not isinstance(error, RuntimeError | ConnectionError):
        return None
    return next((phrase for phrase in _PEER_LOSS if phrase in str(error).lower()), None)


def group_for(tensor: Any, group: Any) -> Any:
    """Return the group that sends a tensor: for CPU tensors one of gloo, where NCCL alone is there.

    Split models are checked before the engine moves them to a GPU. All ranks of a group call it.
    """
    from torch import distributed

    if tensor.device.type != "cpu" or "cpu" in distributed.get_backend_config(group):
        return group
    return group_of(distributed.get_process_group_ranks(group), "gloo")


def group_of(ranks: Sequence[int], backend: str | None = None) -> Any:
    """Return the process group of some global ranks; they alone call this.

    Args:
        ranks: In ascending order.
        backend: That of the default group if omitted.
    """
    from torch import distributed

    # One for each list of ranks, as long as the default group lives: with local synchronization
    # a later one might get the name, and so the addresses, of one that is gone.
    made = _MADE.setdefault(distributed.group.WORLD, {})
    key = tuple(ranks), backend
    if key not in made:
        made[key] = distributed.new_group(
            list(ranks), backend=backend, use_local_synchronization=True
        )
    return made[key]


def meet(store: Any, key: str, size: int) -> None:
    """Wait until so many ranks have called this; no time limit of a group or store ends it."""
    store.add(key, 1)
    with waiting("the store of the process group"):
        while store.add(key, 0) < size:
            time.sleep(_POLL_SECONDS)


def compiled_ops_enabled() -> bool:
    """Whether DeepSpeed may compile its C++ parts on a CPU (``WAVEMARE_COMPILED_OPS=1``).

    They are off by default: the first start would compile for minutes, and a build that is
    killed leaves a lock on which every later start waits for ever.
    """
    return os.environ.get("WAVEMARE_COMPILED_OPS", "0") == "1"


def ensure_launched() -> None:
    """Check that a launcher started this process.

    Raises:
        LaunchError: Neither torch's nor MPI's nor Slurm's variables are set, or one is invalid.
    """
    check_environment(os.environ)
    missing = [name for name in TORCH_VARIABLES if name not in os.environ]
    if missing and launcher_rank(os.environ) is None:
        raise LaunchError(
            "launcher",
            None,
            f"this process was started without a launcher ({', '.join(missing)} not set)",
            "Start it with 'wavemare train ...', 'deepspeed --num_gpus N SCRIPT', "
            "'torchrun --nproc-per-node N SCRIPT', 'mpirun -n N python -m mpi4py SCRIPT' or "
            "'srun python SCRIPT'",
        )


def leave_out_shared_memory() -> None:
    """Keep DeepSpeed from compiling its all-reduce by shared memory, which gloo can do without."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu" and not compiled_ops_enabled():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def init_distributed(distributed_port: int | None = None) -> None:
    """Initialize ``deepspeed.comm`` once, under any launcher; nothing is compiled on a CPU.

    The variables of ``mpirun`` and ``srun`` become torch's (``RANK``, ``MASTER_ADDR``, ...).

    Args:
        distributed_port: TCP port of rank 0, used only where no launcher named one.

    Raises:
        LaunchError: No launcher started this process, or the processes cannot find each other.
    """
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator

    from wavemare.engine.observe.restarts import reached

    # DeepSpeed calls collectives by names that torch is replacing: nothing that a user can mend.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
    reached("imports")
    if comm.is_initialized():
        return
    ensure_launched()
    leave_out_shared_memory()
    given = launcher_rank(os.environ)
    if given is not None and not all(name in os.environ for name in TORCH_VARIABLES):
        port = None if distributed_port == _DEFAULT_PORT else distributed_port
        os.environ.update(torch_variables(os.environ, given, port))
    backend = get_accelerator().communication_backend_name()
    if may_restart() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        init_attempt(backend)
    comm.init_distributed(dist_backend=backend)


def may_restart() -> bool:
    """Whether the ranks are started again after a failure (``--max-restarts``)."""
    return int(os.environ.get(MAX_RESTARTS, "0")) > 0


def job_started() -> float:
    """Return when a job that may restart began (Unix time); older checkpoints are another job's."""
    import psutil

    # torchrun does not say it, but it is the parent of its ranks.
    started = os.environ.get(JOB_STARTED) or psutil.Process(os.getppid()).create_time()
    return float(started) - _CLOCK_SLACK_S


def init_attempt(backend: str) -> None:
    """Initialize ``torch.distributed`` in an attempt under ``torchrun --max-restarts``.

    The agent keeps one store for all attempts. Without a prefix, ranks would read the addresses of
    dead ranks there (https://github.com/pytorch/pytorch/issues/135712).

    Args:
        backend: Such as ``gloo``.

    Raises:
        LaunchError: Several agents share the store, and may count attempts differently.
    """
    from deepspeed.constants import default_pg_timeout as timeout
    from torch.distributed.distributed_c10d import PrefixStore, init_process_group
    from torch.distributed.rendezvous import rendezvous

    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
        raise LaunchError(
            "--max-restarts",
            os.environ[MAX_RESTARTS],
            "on several hosts restarted ranks may read the addresses of dead ranks in torchrun's "
            "store",
            "Export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and give torchrun --rdzv-backend c10d",
        )
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    store = PrefixStore(f"attempt-{os.environ[RESTART_COUNT]}", store)
    init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


# deepspeed --launcher mpich starts each rank by this script, which always exits with 0.
_MPICH_HELPER = "deepspeed/launcher/launcher_helper.py"
_COLLECTIVES_SECONDS = 60.0
# Together longer than 5 ms, after which Python passes the interpreter to a waiting thread.
_CHECKS = 4
_CHECK_SECONDS = 0.003
_POLL_SECONDS = 0.02


def exit_now(code: int) -> NoReturn:
    """End the process without the interpreter's shutdown.

    With a process group or MPI alive, shutdown runs destructors that wait for the peers (gloo and
    NCCL join their threads, MPI_Finalize is collective), while the peers wait for this rank. Here
    the operating system closes the sockets, which the peers notice.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    end_mpich_helper()
    os._exit(code)


def wait_for_gloo() -> None:
    """Wait before the interpreter shuts down until gloo's threads hold no Python objects.

    After a collective, gloo's thread needs the interpreter to release its tensor. During shutdown
    that aborts the process ("terminate called without an active exception", pytorch#179291), and a
    successful job would fail. Pending collectives get up to a minute first, as the destructor of
    their process group would wait for them, too.
    """
    if failing.is_set():
        return
    until = time.monotonic() + _COLLECTIVES_SECONDS
    while _gloo_threads() and _collectives_pending() and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
    still = 0
    while still < _CHECKS and (threads := _gloo_threads()) and time.monotonic() < until:
        time.sleep(_CHECK_SECONDS)  # lets them have the interpreter
        still = 0 if any(_is_awake(thread) for thread in threads) else still + 1


def _gloo_threads() -> list[Path]:
    threads = Path("/proc/self/task").glob("*")
    return [thread for thread in threads if _read(thread / "comm").startswith("pt_gloo")]


def _is_awake(thread: Path) -> bool:
    """Whether a thread runs or is ready to; a thread that waits for peers or work sleeps."""
    return _read(thread / "stat").rpartition(") ")[2].startswith("R")


def _collectives_pending() -> bool:
    """Whether torch's flight recorder, of the last 2,000 collectives, has one that is not done.

    A recorder that is switched off (``TORCH_FR_BUFFER_SIZE=0``) has none.
    """
    c10d = sys.modules.get("torch._C._distributed_c10d")
    if c10d is None or not hasattr(c10d, "_dump_fr_trace_json"):
        return False
    entries = json.loads(c10d._dump_fr_trace_json(True, True)).get("entries", ())
    return any(
        entry["profiling_name"].startswith("gloo:") and not (entry["is_p2p"] or entry["retired"])
        for entry in entries
    )


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux, or the thread has ended
        return ""


def end_mpich_helper() -> None:
    """End DeepSpeed's helper for MPICH, which would report success, by a signal."""
    parent = os.getppid()
    words = _read(Path(f"/proc/{parent}/cmdline")).split("\0")
    if any(word.endswith(_MPICH_HELPER) for word in words):
        os.kill(parent, signal.SIGTERM)


atexit.register(wait_for_gloo)
