# SPDX-License-Identifier: Apache-2.0
"""Send 20 MB between ranks by gloo or MPI, and leave the best of three times."""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

NUMBERS = 5_000_000  # of 4 bytes
ROUNDS = 3


def best_of(barrier, exchange):
    seconds = []
    for _ in range(ROUNDS):
        barrier()
        start = time.perf_counter()
        exchange()
        seconds.append(time.perf_counter() - start)
    barrier()
    return min(seconds)


def exchange_by_gloo(sent, received, to, source):
    import torch
    from torch import distributed

    def exchange():
        work = distributed.irecv(torch.from_numpy(received), source)
        distributed.isend(torch.from_numpy(sent), to).wait()
        work.wait()

    distributed.init_process_group("gloo")
    seconds = best_of(distributed.barrier, exchange)
    distributed.destroy_process_group()
    return seconds


def exchange_by_mpi(sent, received, to, source):
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    assert world.Get_rank() == int(os.environ["RANK"])
    assert world.Get_size() == int(os.environ["WORLD_SIZE"])
    return best_of(world.Barrier, lambda: world.Sendrecv(sent, to, recvbuf=received, source=source))


WAYS = {"gloo": exchange_by_gloo, "mpi": exchange_by_mpi}


if __name__ == "__main__":
    folder, exchange = Path(sys.argv[1]), WAYS[sys.argv[2]]
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sent, received = np.full(NUMBERS, rank, np.float32), np.full(NUMBERS, -1, np.float32)
    source = (rank - 1) % ranks
    seconds = exchange(sent, received, (rank + 1) % ranks, source)
    assert (received == source).all()
    result = {"seconds": seconds, "host": os.uname().nodename}
    (folder / f"rank_{rank}.json").write_text(json.dumps(result))
