# SPDX-License-Identifier: Apache-2.0
"""The MPI library and its launcher."""

from __future__ import annotations

from collections.abc import Iterator

from wavemare.cli.checks.finding import Finding
from wavemare.comm.mpi_library import MpiInfo, describe_mpi

__all__ = ["check_mpi"]

_CUDA = {True: "CUDA-aware", False: "not CUDA-aware", None: "CUDA support unknown"}


def check_mpi(info: MpiInfo | None = None) -> Iterator[Finding]:
    """Check that mpi4py finds a library, and that ``mpirun`` belongs to it.

    Args:
        info: What is known; by default it is found out.
    """
    info = info or describe_mpi()
    if info.flavour is None:
        yield Finding(
            "MPI",
            "ok",
            f"none ({info.problem}); optional",
            "For mpirun: pip install 'wavemare[mpi]', or use the cluster's own MPI",
        )
        return
    threads = f"threads: {info.thread_level or 'unknown'}"
    value = f"{info.flavour} {info.version}, {threads}, {_CUDA[info.cuda_aware]}"
    if info.problem is not None:
        remedy = "Reinstall MPI, and check that one flavour alone is installed"
        yield Finding("MPI", "warn", f"{value}; {info.problem}", remedy)
    else:
        yield Finding("MPI", "ok", value)
    if not info.launcher_matches:
        yield Finding(
            "mpirun",
            "fail",
            f"{info.launcher} is {info.launcher_flavour}'s, but mpi4py loads {info.flavour}",
            f"Put {info.flavour}'s mpirun first in PATH, or set MPI4PY_LIBMPI to the library "
            f"of {info.launcher_flavour}",
        )
