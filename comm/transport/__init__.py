# SPDX-License-Identifier: Apache-2.0
"""Networks that the collectives may use, chosen by what the launch offers.

In: tensors and the ranks to send them to. Out: tensors of other ranks. Read `base.py` first.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any, Literal

import torch
import torch.distributed as dist

from wavemare.comm.transport.base import Exchange, Transport
from wavemare.comm.transport.staging import StagedTransport
from wavemare.comm.transport.torch_transport import TorchTransport, backend_of
from wavemare.errors import CommError, ConfigError

__all__ = ["Exchange", "StagedTransport", "Transport", "open_transport"]

Choice = Literal["auto", "mpi", "torch"]
Staging = Literal["auto", "direct", "pinned"]

_MPI_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")


def open_transport(
    group: Any = None,
    *,
    choice: Choice = "auto",
    staging: Staging = "auto",
    timeout_s: float = 300.0,
    device: torch.device | None = None,
) -> Transport:
    """Open a transport; collective over the group.

    Args:
        group: A `Transport` (returned as it is, whatever the rest says), an MPI communicator, a
            torch process group, or None for all ranks.
        choice: ``mpi`` or ``torch``; ``auto`` takes torch where its backend for the device is NCCL,
            MPI where an MPI launcher started the ranks and all of them take part, else torch.
        staging: How an accelerator's tensors travel over MPI: ``pinned`` copies packed blocks
            through the host's pinned memory, as always over gloo, ``direct`` hands MPI the device's
            memory, ``auto`` does that if the MPI of all ranks is CUDA-aware.
        timeout_s: Seconds after which a silent peer counts as lost.
        device: Where buckets will be; a GPU if there is one and this is omitted.

    Raises:
        CommError: The chosen transport is not available.
        ConfigError: The group does not fit the chosen transport.
    """
    if isinstance(group, Transport):
        return group
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and isinstance(group, mpi.Comm):
        if choice == "torch":
            reason = "an MPI communicator was given"
            raise ConfigError("transport", choice, reason, "Use auto, or give no group")
        inner = _open_mpi(group, staging, timeout_s)
    elif choice == "mpi" or (choice == "auto" and _has_all_ranks(group) and _mpi_serves(device)):
        communicator, is_ours = _same_ranks(group)
        try:
            inner = _open_mpi(communicator, staging, timeout_s)  # has one of its own
        finally:
            if is_ours:
                communicator.Free()
    elif dist.is_initialized():
        inner = TorchTransport(group, timeout_s, device)
    else:
        raise CommError(
            "transport",
            choice,
            "torch.distributed is not initialized, and no MPI launcher started this process",
            "Call torch.distributed.init_process_group, or start it with 'mpirun -n N python "
            "-m mpi4py SCRIPT'",
        )
    # Without an accelerator there is nothing to stage.
    plain = inner.name == "nccl" or not torch.cuda.is_available()
    return inner if plain else StagedTransport(inner)


def _has_all_ranks(group: Any) -> bool:
    # MPI needs all ranks; for a smaller group this is unknown.
    return group is None or len(dist.get_process_group_ranks(group)) == dist.get_world_size()


def _mpi_serves(device: torch.device) -> bool:
    if not any(name in os.environ for name in _MPI_VARIABLES):
        return False
    if not dist.is_initialized():
        return True
    if backend_of(None, device) == "nccl":
        return False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return False
    return MPI.COMM_WORLD.Get_size() == dist.get_world_size()


def _same_ranks(group: Any) -> tuple[Any, bool]:
    """Return a communicator of the group's ranks, and whether to free it; collective."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = f"mpi4py finds no MPI library ({str(error).splitlines()[0]})"
        raise CommError("transport", "mpi", reason, "Install one: pip install mpich") from error
    world = MPI.COMM_WORLD
    if not dist.is_initialized():
        return world, False
    if (dist.get_rank(), dist.get_world_size()) != (world.Get_rank(), world.Get_size()):
        raise CommError(
            "transport",
            "mpi",
            f"this is rank {dist.get_rank()} of {dist.get_world_size()} for torch.distributed and "
            f"rank {world.Get_rank()} of {world.Get_size()} for MPI",
            "Start all ranks with one mpirun, or use transport torch",
        )
    if group is None or group is dist.group.WORLD:
        return world, False
    members = dist.get_process_group_ranks(group)
    return world.Split(min(members), members.index(dist.get_rank())), True


def _open_mpi(communicator: Any, staging: Staging, timeout_s: float) -> Transport:
    from wavemare.comm.transport.mpi_transport import MpiTransport

    return MpiTransport(communicator, timeout_s, takes_device=_cuda_aware(staging))


def _cuda_aware(staging: Staging) -> bool:
    """Whether this rank's MPI takes GPU buffers, by its own word."""
    if staging != "auto" or not torch.cuda.is_available():
        return staging == "direct"
    from mpi4py import MPI

    # A look-up in mpi4py's module also finds what the MPI that it is linked with exports.
    query = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return query is not None and bool(query())
