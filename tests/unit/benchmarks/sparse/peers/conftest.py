# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads of one process, whose messages are copied through queues."""

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from benchmarks.sparse.peers.base import AnySource
from wavemare.comm.transport.base import as_bytes


class Mail:
    """Messages that wait, by receiver; each pair of ranks keeps its order."""

    def __init__(self, size):
        self.waiting = [deque() for _ in range(size)]
        self.changed = threading.Condition()

    def put(self, source, target, content):
        with self.changed:
            self.waiting[target].append((source, content))
            self.changed.notify_all()

    def take(self, target, source=None):
        """Return the next message (source, content) of a source, or of any."""

        def find():
            own = self.waiting[target]
            return next((m for m in own if source in (None, m[0])), None)

        with self.changed:
            assert self.changed.wait_for(find, timeout=300), f"{target} waits for {source}"
            found = find()
            self.waiting[target].remove(found)
            return found


class Threads(AnySource):
    """One rank.

    Args:
        rank: Of all threads.
        members: The ranks of the group.
        mails: The `Mail` of each group.
    """

    name, timeout_s, host, world_ranks = "threads", 60.0, "here", ()

    def __init__(self, rank, members, mails):
        self.world, self.world_ranks, self.mails = rank, members, mails
        self.rank, self.size = members.index(rank), len(members)
        self.mail = mails.setdefault(members, Mail(self.size))

    def begin(self):
        return Exchange(self)

    def receive_any(self, tensor):
        source, content = self.mail.take(self.rank)
        tensor.view(-1).view(torch.uint8)[: content.numel()].copy_(content)
        return source

    def reduces(self, dtype):
        return True

    def _all_reduce(self, flat):
        table = flat.new_empty(self.size, flat.numel())
        self.all_gather(flat, table)
        flat.copy_(table.sum(dim=0))

    def split(self, colour):
        table = torch.empty(self.size, 1, dtype=torch.int64)
        self.all_gather(torch.tensor([colour]), table)
        chosen = (table[:, 0] == colour).nonzero().flatten().tolist()
        return Threads(self.world, tuple(self.world_ranks[rank] for rank in chosen), self.mails)

    def close(self):
        pass


class Exchange:
    def __init__(self, transport):
        self.transport, self.receives = transport, []

    def send(self, peer, tensor):
        if tensor.numel():
            content = torch.from_numpy(as_bytes(tensor).copy())
            self.transport.bytes_up += content.numel()
            self.transport.mail.put(self.transport.rank, peer, content)

    def receive(self, peer, tensor):
        if tensor.numel():
            self.receives.append((peer, tensor))

    def start(self):
        pass

    def wait(self):
        for peer, tensor in self.receives:
            _, content = self.transport.mail.take(self.transport.rank, peer)
            tensor.view(-1).view(torch.uint8).copy_(content)
            self.transport.bytes_down += content.numel()


@pytest.fixture
def on_ranks():
    """Run a function of a transport on each rank; return the results by rank."""

    def run(ranks, function):
        everyone, mails = tuple(range(ranks)), {}
        with ThreadPoolExecutor(ranks) as pool:
            return list(pool.map(lambda rank: function(Threads(rank, everyone, mails)), everyone))

    return run
