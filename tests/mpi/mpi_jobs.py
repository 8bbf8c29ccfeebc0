# SPDX-License-Identifier: Apache-2.0
"""The MPI that tests start jobs with, and the shared memory of jobs that were killed."""

import contextlib
import functools
import os
import re
from pathlib import Path

import psutil
import pytest

from wavemare.comm.mpi_library import describe_mpi

OWNER = "PYTEST_CURRENT_TEST"
mpi = functools.cache(describe_mpi)  # it starts processes


def needed_mpi(flavour=None):
    """Return what is known of MPI; skip the test where it or its launcher is missing."""
    info = mpi()
    if info.launcher is None or info.flavour is None or not info.launcher_matches:
        pytest.skip(f"needs MPI and its mpirun (the extra 'mpi'): {info.problem or info}")
    if flavour not in (None, info.flavour):
        pytest.skip(f"needs {flavour}; the MPI here is {info.flavour}")
    return info


def segments():
    """Return the shared memory of MPICH's jobs; only ranks that end by themselves remove it."""
    return set(Path("/dev/shm").glob("mpich_shm_*"))


def remove_left(before):
    """Remove what a job of this test left that was killed: what no other process has open."""
    new = segments() - before
    if not new:
        return
    test, used = os.environ[OWNER].rpartition(" ")[0], set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(OWNER, "").rpartition(" ")[0] != test:
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                used.update(re.findall(r"/dev/shm/\S+", maps))
    for file in new:
        if str(file) not in used:
            file.unlink(missing_ok=True)
