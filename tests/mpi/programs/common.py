# SPDX-License-Identifier: Apache-2.0
"""What the programs share: a world of ranks over MPI or torch, groups of it, and results."""

import hashlib
import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch

from wavemare.comm.cost import Constants
from wavemare.comm.sparse import SparseComm

torch.set_num_threads(1)


class World:
    """The ranks of a program, by other means than the transports under test.

    Args:
        kind: ``mpi`` or ``torch``.
    """

    def __init__(self, kind):
        self.kind = kind
        if kind == "mpi":
            from mpi4py import MPI

            self.comm = MPI.COMM_WORLD
            self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        else:
            from torch import distributed

            distributed.init_process_group("gloo", timeout=timedelta(seconds=600))
            self.rank, self.size = distributed.get_rank(), distributed.get_world_size()

    def groups_of(self, ranks):
        """Cut the world into groups of so many ranks (the last may be smaller).

        Returns:
            This rank's group, as `SparseComm` takes it, its place in it, and its size.
        """
        first = self.rank // ranks * ranks
        count = min(ranks, self.size - first)
        if ranks == self.size:
            return None, self.rank, self.size
        if self.kind == "mpi":
            return self.comm.Split(first, self.rank), self.rank - first, count
        from torch import distributed

        group = None
        for start in range(0, self.size, ranks):
            members = list(range(start, min(start + ranks, self.size)))
            made = distributed.new_group(members)
            group = made if start == first else group
        return group, self.rank - first, count

    def gather(self, value):
        """Return each rank's value."""
        if self.kind == "mpi":
            self.meet()
            return self.comm.allgather(value)
        from torch import distributed

        table = [None] * self.size
        distributed.all_gather_object(table, value)
        return table

    def meet(self):
        """Wait for all ranks, without keeping a core busy."""
        if self.kind == "mpi":
            request = self.comm.Ibarrier()
            while not request.Test():
                time.sleep(0.002)
        else:
            from torch import distributed

            distributed.barrier()


def sparse_comm(world, group=None, **settings):
    """Return a communicator of the world's kind that measures nothing at its start."""
    settings = {"constants": Constants(), "timeout_s": 600, **settings}
    return SparseComm(group, transport=world.kind, **settings)


class Checks:
    """Counts what held, and notes what did not."""

    def __init__(self):
        self.count = 0
        self.failures = []

    def __call__(self, holds, *what):
        self.count += 1
        if not holds:
            self.failures.append(" ".join(map(str, what)))
        return holds

    def refuses(self, errors, function, *what, says=""):
        """Check that a call raises one of some errors, with some words in it."""
        try:
            function()
        except errors as error:
            self(says in str(error), *what, "says", error)
        except Exception as error:
            self(False, *what, "raised", repr(error))
        else:
            self(False, *what, "did not raise")


def digest(tensor):
    raw = tensor.detach().contiguous().view(-1)
    held = raw.view(torch.uint8).numpy().tobytes() if raw.numel() else b""
    return hashlib.sha256(held).hexdigest()[:16]


def leave(world, result):
    folder = Path(sys.argv[1])
    (folder / f"rank_{world.rank}.json").write_text(json.dumps(result))


def run_proofs(world, proofs):
    """Run functions of (world, checks) and leave what they found, by name."""
    found = {}
    for name, proof in proofs.items():
        checks = Checks()
        started = time.monotonic()
        try:
            proof(world, checks)
        except Exception:
            # The other ranks may wait for this one: what follows would mean nothing.
            print(f"{name} broke:\n{traceback.format_exc()}", flush=True)
            os._exit(3)
        world.meet()
        seconds = time.monotonic() - started
        found[name] = {"count": checks.count, "failures": checks.failures, "seconds": seconds}
        print(f"{name}: {checks.count} checks, {seconds:.1f} s", *checks.failures[:5], flush=True)
        leave(world, found)
