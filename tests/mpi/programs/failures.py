# SPDX-License-Identifier: Apache-2.0
"""One rank is lost: it raises before a call, or is killed or stopped in the middle of one.

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
        # While the bucket travels.
        threading.Timer(0.05, os.kill, (os.getpid(), HOW[how])).start()
        while True:
            comm.allreduce_(flat)
    noticed = None
    try:
        while True:
            comm.allreduce_(flat)
    except CommError as error:
        noticed = error
    # The library may still write into the byte in which each peer was asked to answer.
    kept = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.nbytes == 1]
    leave(world, {"value": noticed.value, "error": str(noticed), "kept": len(kept)})
    # All the others must have noticed, before this one's end ends the job.
    deadline = time.monotonic() + 600
    while len(list(folder.glob("rank_*.json"))) < world.size - 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    # To close what is broken must not hang either.
    comm.close()
    if kind == "torch" and how == "stop" and world.rank == (victim + 1) % world.size:
        os.kill(pids[victim], signal.SIGKILL)
    raise noticed


main()
