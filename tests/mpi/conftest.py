# SPDX-License-Identifier: Apache-2.0
"""Starting a program by the ``mpirun`` of the interpreter's MPI, or over torch."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # of mpi_jobs
from mpi_jobs import needed_mpi, remove_left, segments

PROGRAMS = Path(__file__).parent / "programs"


@dataclass(frozen=True)
class Job:
    """What a job left.

    Attributes:
        code: The launcher's exit code; the largest of the ranks' where they have no launcher.
        output: Of all ranks.
        folder: Where the ranks' results are.
    """

    code: int
    output: str
    folder: Path

    def results(self):
        """Return the results of the ranks that left one."""
        files = sorted(self.folder.glob("rank_*.json"))
        return {
            int(file.stem.removeprefix("rank_")): json.loads(file.read_text()) for file in files
        }

    def check(self):
        assert self.code == 0, f"exit code {self.code}\n{self.output[-6000:]}"
        return self


@pytest.fixture
def start(launch, tmp_path):
    """Run a file of ``tests/mpi/programs`` as several ranks, over MPI or torch.

    The program gets a folder and the name of the transport as its first arguments. Over ``mpi``
    mpi4py runs it, so that an exception of one rank ends all; ``mpirun`` is without that.
    """

    def run(program, kind, *arguments, ranks, options=()):
        words = [str(PROGRAMS / program), str(tmp_path), kind, *map(str, arguments)]
        if kind == "torch":
            done = launch(words[0], *words[2:], ranks=ranks)
            return Job(max(done.codes, key=abs), "\n".join(done.outputs), tmp_path)
        if kind == "mpi":
            words = ["-m", "mpi4py", *words]
        code, output = _run_by_mpirun(words, ranks, options, tmp_path / "mpirun.log")
        return Job(code, output, tmp_path)

    return run


@pytest.fixture
def prove(start):
    """Run proofs in one start of all ranks, and check what each rank found."""

    def run(kind, sizes, *names, ranks):
        job = start("proofs.py", kind, sizes, *names, ranks=ranks)
        found = job.results()
        assert sorted(found) == list(range(ranks)), job.output[-6000:]
        for rank, proofs in found.items():
            assert list(proofs) == list(names), f"rank {rank} stopped: {job.output[-6000:]}"
            failures = {name: proof["failures"][:5] for name, proof in proofs.items()}
            assert not any(failures.values()), f"rank {rank}: {failures}"
            assert all(proof["count"] > 0 for proof in proofs.values())
        job.check()

    return run


def _run_by_mpirun(words, ranks, options, log):
    info, before = needed_mpi(), segments()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if info.flavour == "Open MPI":
        options = [*options, "--oversubscribe", "--bind-to", "none"]
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [str(info.launcher), *options, "-n", str(ranks), sys.executable, *words]
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            code = process.wait(600)
        except subprocess.TimeoutExpired:
            code = -signal.SIGALRM
            process.terminate()  # mpirun ends the ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code:
        remove_left(before)
    output = log.read_text(errors="replace")
    return code, output + ("\ntook too long" if code == -signal.SIGALRM else "")
