# SPDX-License-Identifier: Apache-2.0
"""One rank is lost: it raises before a call, or is killed or stopped in the middle of one.

With ``late`` it is silent: one rank waits for it, and another one, since seconds before, for that.

FOLDER TRANSPORT HOW VICTIM: the others leave what they noticed.
"""

import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from common import World, leave, sparse_comm

from wavemare.errors import CommError

TIMEOUT_S = 8.0
NUMEL = 4 << 20
HOW = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def _wait_in_a_chain(comm, victim):
    first, second = (rank for rank in range(3) if rank != victim)
    time.sleep(3.0 if comm.rank == second else 0.0)
    exchange = comm.transport.begin()
    exchange.receive(second if comm.rank == first else victim, torch.empty(8))
    exchange.wait()


def _is_answer(each, world):
    return type(each) is torch.Tensor and each.dtype == torch.uint8 and each.numel() == world.size


def main():
    kind, how, victim = sys.argv[2], sys.argv[3], int(sys.argv[4])
    world = World(kind)
    folder = Path(sys.argv[1])
    pids = world.gather(os.getpid())
    flat = torch.ones(NUMEL)
    with sparse_comm(world, mode="pushpull") as patient:  # kernels may have to be compiled
        patient.allreduce_(flat)
    comm = sparse_comm(world, mode="pushpull", timeout_s=TIMEOUT_S)
    world.meet()
    if world.rank == victim:
        if how == "raise":
            raise ValueError("this rank's own fault, before the call")
        if how == "late":
            time.sleep(600)
        # While the bucket travels.
        threading.Timer(0.05, os.kill, (os.getpid(), HOW[how])).start()
        while True:
            comm.allreduce_(flat)
    noticed = None
    try:
        if how == "late":
            _wait_in_a_chain(comm, victim)
        while True:
            comm.allreduce_(flat)
    except CommError as error:
        noticed = error
    # The library may still write into the bytes in which each peer was asked to answer.
    kept = [each for each in gc.get_objects() if _is_answer(each, world)]
    leave(world, {"value": noticed.value, "error": str(noticed), "kept": len(kept)})
    # All the others must have noticed, before this one's end ends the job.
    deadline = time.monotonic() + 600
    while len(list(folder.glob("rank_*.json"))) < world.size - 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    # To close what is broken must not hang either.
    comm.close()
    if kind == "torch" and how in ("stop", "late") and world.rank == (victim + 1) % world.size:
        os.kill(pids[victim], signal.SIGKILL)
    raise noticed


main()
