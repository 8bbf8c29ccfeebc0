# SPDX-License-Identifier: Apache-2.0
"""Messages of replicas with local steps, against a slow twin of all of them."""

import sys
from pathlib import Path

import numpy as np
import torch
from common import digest

from wavemare.comm.transport import open_transport
from wavemare.engine.local_steps.wire import Header, ReplicaLink

sys.path.append(str(Path(__file__).parents[2]))
from support import message_twin as twin

CODES = [(8, 0), (4, 0), (2, 0), (32, 64), (2, 64)]
SIZES = [0, 1, 4096, 9 * 4096 + 100]


def numbers(numel, turn, rank):
    values = np.random.default_rng([turn, rank]).standard_normal(numel).astype(np.float32)
    values[: numel // 3] *= np.float32(1e-3)
    values[numel // 3 : numel // 2] = 0
    return values


def replicas(world, checks, sizes):
    for ranks in sizes:
        group, place, count = world.groups_of(ranks)
        transport = open_transport(group, choice=world.kind, timeout_s=600)
        link = ReplicaLink(transport, timeout_s=600, device=torch.device("cpu"))
        told = []
        for (bits, top_k), numel in ((code, numel) for code in CODES for numel in SIZES):
            name = count, bits, top_k, numel
            slow = twin.Messages(count, numel, bits, top_k)
            own = link.own_range(numel)
            residuals = torch.zeros(numel), torch.zeros(own.stop - own.start)
            for turn in range(3):
                values = [numbers(numel, turn, rank) for rank in range(count)]
                header = Header(turn, 0, numel, bits, top_k=top_k)
                before = link.bytes_sent
                message = link.send_coded(header, torch.from_numpy(values[place]), residuals)
                mean = message.wait()
                checks(np.array_equal(mean.numpy(), slow.mean(values)), *name, turn, "differs")
                # A header of six numbers and a note goes to each of the others.
                expected = 56 * (count - 1) + twin.bytes_sent(numel, count, place, bits, top_k)
                sent = link.bytes_sent - before
                checks(sent == expected, *name, "sent", sent, "bytes, not", expected)
                told.append(digest(mean))
            checks(np.array_equal(residuals[0].numpy(), slow.waiting[place]), *name, "waiting")
            checks(np.array_equal(residuals[1].numpy(), slow.owed[own]), *name, "owed")
        group_told = world.gather((world.rank - place, told))
        mine = [other for first, other in group_told if first == world.rank - place]
        checks(all(other == mine[0] for other in mine), "replicas differ", count)
        link.close()
