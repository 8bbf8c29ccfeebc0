# SPDX-License-Identifier: Apache-2.0
"""Messages of replicas with local steps, against a slow twin of all of them."""

import sys
from itertools import product
from pathlib import Path

import numpy as np
import torch
from common import digest

from wavemare.comm.transport import open_transport
from wavemare.engine.local_steps.wire import Header, ReplicaLink

sys.path.append(str(Path(__file__).parents[2]))
from support import message_twin as twin

BITS = [8, 4, 2]
SIZES = [0, 1, 128, 75 * 128 + 100]


def replicas(world, checks, sizes):
    for ranks in sizes:
        group, place, count = world.groups_of(ranks)
        transport = open_transport(group, choice=world.kind, timeout_s=600)
        link = ReplicaLink(transport, timeout_s=600, device=torch.device("cpu"))
        told = []
        for bits, numel in product(BITS, SIZES):
            name = count, bits, numel
            slow = twin.Messages(count, numel, bits)
            own = link.own_range(numel)
            residuals = torch.zeros(numel), torch.zeros(own.stop - own.start)
            for turn in range(3):
                values = [twin.unlike_numbers(numel, [turn, rank]) for rank in range(count)]
                header = Header(turn, 0, numel, bits)
                before = link.bytes_sent
                message = link.send_coded(header, torch.from_numpy(values[place]), residuals)
                mean = message.wait()
                checks(np.array_equal(mean.numpy(), slow.mean(values)), *name, turn, "differs")
                # A header of five numbers and a note goes to each of the others.
                expected = 48 * (count - 1) + twin.bytes_sent(numel, count, place, bits)
                sent = link.bytes_sent - before
                checks(sent == expected, *name, "sent", sent, "bytes, not", expected)
                told.append(digest(mean))
            checks(np.array_equal(residuals[0].numpy(), slow.waiting[place]), *name, "waiting")
            checks(np.array_equal(residuals[1].numpy(), slow.owed[own]), *name, "owed")
        group_told = world.gather((world.rank - place, told))
        mine = [other for first, other in group_told if first == world.rank - place]
        checks(all(other == mine[0] for other in mine), "replicas differ", count)
        link.close()
