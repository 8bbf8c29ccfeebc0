# SPDX-License-Identifier: Apache-2.0
"""A rank that sends and goes on or ends, and one that receives late or loses its queue."""

import gc
import sys
import time

import torch
from common import leave
from torch import distributed

from wavemare.engine import init_distributed
from wavemare.engine.pipe.message import MessageLayout
from wavemare.engine.pipe.p2p import RecvQueue, SendQueue
from wavemare.pipeline.plan.plan import Kind

BYTES = 2**26  # more than sockets hold

if __name__ == "__main__":
    init_distributed()
    rank = distributed.get_rank()
    group = distributed.new_group([0, 1])
    case = sys.argv[2]
    result, ends = None, case == "end"
    if rank == 0:
        queue = SendQueue(1, group, 2)
        if case == "loses":
            distributed.barrier()
        queue.send(torch.full((BYTES,), 7, dtype=torch.uint8))
        if case == "loses":
            queue.flush()
        elif not ends:
            del queue
            gc.collect()
    else:
        time.sleep(1)
        queue = RecvQueue(0, group, torch.device("cpu"))
        receive = (Kind.RECV_GRAD, 0, 0)
        queue.post(receive, MessageLayout(0, ((BYTES,),), (torch.uint8,)))
        if case == "loses":
            del queue
            gc.collect()
            distributed.barrier()
        else:
            queue.wait()
            result = bool((queue.arrived[receive][2] == 7).all())
    leave(result, part=not ends)
