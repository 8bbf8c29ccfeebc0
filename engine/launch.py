"""Joining the group of processes that a launcher started."""

from __future__ import annotations

import os

from wavemare.errors import LaunchError

__all__ = [
    "compiled_ops_enabled",
    "ensure_launched",
    "environment_rank",
    "environment_world_size",
    "init_distributed",
]

_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_SIZE_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
_TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# One variable that each MPI flavour sets for its processes; DeepSpeed then asks mpi4py.
_MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")


def environment_rank() -> int:
    """Return the global rank that the launcher gave to this process, or 0."""
    return _first_number(_RANK_VARIABLES, 0)


def environment_world_size() -> int:
    """Return the number of processes that the launcher started, or 1."""
    return _first_number(_SIZE_VARIABLES, 1)


def _first_number(names: tuple[str, ...], default: int) -> int:
    texts = (os.environ.get(name, "") for name in names)
    return next((int(text) for text in texts if text.isdigit()), default)


def compiled_ops_enabled() -> bool:
    """Whether DeepSpeed may compile its C++ parts on a CPU (``WAVEMARE_COMPILED_OPS=1``).

    They are off by default: the first start would compile for minutes, and a build that is
    killed leaves a lock on which every later start waits for ever.
    """
    return os.environ.get("WAVEMARE_COMPILED_OPS", "0") == "1"


def ensure_launched() -> None:
    """Check that a launcher started this process.

    Raises:
        LaunchError: Neither torch's nor an MPI's variables are set.
    """
    missing = [name for name in _TORCH_VARIABLES if name not in os.environ]
    if missing and not any(name in os.environ for name in _MPI_VARIABLES):
        raise LaunchError(
            "launcher",
            None,
            f"this process was started without a launcher ({', '.join(missing)} not set)",
            "Start it with 'wavemare train ...', 'deepspeed --num_gpus N SCRIPT', "
            "'torchrun --nproc-per-node N SCRIPT' or 'mpirun -n N python -m mpi4py SCRIPT'",
        )


def init_distributed(distributed_port: int | None = None) -> None:
    """Initialize ``deepspeed.comm`` once, without compiling anything on a CPU.

    Args:
        distributed_port: TCP port of rank 0, used only where no launcher named one.

    Raises:
        LaunchError: No launcher started this process.
    """
    import deepspeed
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator

    if comm.is_initialized():
        return
    ensure_launched()
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu" and not compiled_ops_enabled():
        # Shared-memory all-reduce is an optimization of DeepSpeed that gloo can do without.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    port = {} if distributed_port is None else {"distributed_port": distributed_port}
    comm.init_distributed(dist_backend=accelerator.communication_backend_name(), **port)
