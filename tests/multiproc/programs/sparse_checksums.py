# SPDX-License-Identifier: Apache-2.0
"""Sparse collectives whose messages carry checksums, and of which one changes on its way.

Arguments: folder, and a JSON object of [mode, number of the message that changes, or null] by name.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from common import leave

from wavemare.comm.sparse import SparseComm
from wavemare.comm.transport.checksummed import ChecksummedTransport
from wavemare.comm.transport.torch_transport import TorchTransport
from wavemare.engine import init_distributed
from wavemare.errors import CommError, MessageError

BLOCK, BLOCKS, ROWS, DIM = 64, 40, 30, 16
SENDER = 0


def collect(comm, mode):
    """Sum a bucket of which each rank has some blocks, or rows of a table."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    if mode == "rows":
        ids = torch.randint(0, ROWS, (20,), generator=generator)
        ids, rows = comm.allreduce_rows_(
            ids, torch.randn(20, DIM, generator=generator), ROWS
        ).wait()
        return [ids.tolist(), rows.view(torch.int32).tolist()]
    flat = torch.randn(BLOCKS, BLOCK, generator=generator)
    flat *= torch.rand(BLOCKS, 1, generator=generator) < 0.5
    return comm.allreduce_(flat.view(-1), key="weights").wait().view(torch.int32).tolist()


class Spy(TorchTransport):
    """Notes the sizes of the messages that it sends, and changes a bit of one."""

    def __init__(self, timeout_s):
        super().__init__(timeout_s=timeout_s)
        self.message, self.sizes, self.sent = None, [], []

    def begin(self):
        exchange = super().begin()
        send = exchange.send

        def sending(peer, tensor):
            if tensor.numel():
                if len(self.sizes) == self.message and self.rank == SENDER:
                    tensor = tensor.detach().clone()
                    tensor.view(-1).view(torch.uint8)[-1] ^= 1
                self.sizes.append(tensor.nbytes)
            send(peer, tensor)
            self.sent.append(tensor)

        exchange.send = sending
        return exchange


def run(mode, checksums, message, timeout_s=60.0):
    """Return the sums, sizes of the messages, and what went wrong if a bit of one changes."""
    spy = Spy(timeout_s)
    try:
        comm = SparseComm(
            ChecksummedTransport(spy) if checksums else spy,
            mode="ordered" if mode == "rows" else mode,
            block=BLOCK,
            deterministic=mode not in ("dense", "packed", "agsparse", "sparcml"),
        )
        spy.message, spy.sizes = message, []  # of the call alone
        sums = collect(comm, mode)
        bytes_up = comm.transport.bytes_up
        comm.close()
    except MessageError as error:
        return {"error": str(error), "notes": error.__notes__, "code": error.exit_code}
    except CommError as error:
        return {"lost": str(error)}
    return {"sums": sums, "sizes": spy.sizes, "bytes_up": bytes_up}


if __name__ == "__main__":
    init_distributed()
    found = {}
    for name, (mode, message) in json.loads(sys.argv[2]).items():
        if message is None:
            found[name] = [run(mode, on, None) for on in (False, True)]
        else:
            # The other rank waits for what will not come, but not for long.
            found[name] = run(mode, True, message, timeout_s=3.0)
            dist.barrier()
    leave(found, part=False)
    os._exit(0)  # threads of what was given up may be left
