# SPDX-License-Identifier: Apache-2.0
"""A message of more than 2 GiB between two ranks, and a byte of each of its parts."""

import sys

import torch
from common import World, run_proofs

from wavemare.comm.transport import open_transport

NUM_BYTES = (2 << 30) + 12_345


def large(world, checks):
    transport = open_transport(choice=world.kind, timeout_s=200)
    pattern = torch.arange(251, dtype=torch.uint8)
    repeats = NUM_BYTES // 251 + 1
    if world.rank == 0:
        exchange = transport.begin()
        exchange.send(1, pattern.repeat(repeats)[:NUM_BYTES])
        exchange.wait()
        checks(transport.bytes_up == NUM_BYTES, "bytes", transport.bytes_up)
    else:
        arrived = torch.zeros(NUM_BYTES, dtype=torch.uint8)
        exchange = transport.begin()
        exchange.receive(0, arrived)
        exchange.wait()
        checks(transport.bytes_down == NUM_BYTES, "bytes", transport.bytes_down)
        checks(torch.equal(arrived, pattern.repeat(repeats)[:NUM_BYTES]), "content")
    transport.close()


run_proofs(World(sys.argv[2]), {"large": large})
