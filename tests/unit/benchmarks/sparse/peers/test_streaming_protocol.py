# SPDX-License-Identifier: Apache-2.0
"""The streaming protocol without a network: messages come in any order that a network allows."""

import random
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.sparse.peers.streaming_protocol import Aggregator, Lanes, MessageKind, Worker


class Network:
    """Ranks that hold one number per block, and messages that wait in a queue for each pair."""

    def __init__(self, lanes, values, seed):
        self.lanes = lanes
        self.values = np.array(values, dtype=np.float32)
        self.random = random.Random(seed)
        ranks = range(lanes.num_ranks)
        self.workers = [Worker(lanes, self.values[r] != 0) for r in ranks]
        self.aggregators = [Aggregator(lanes, r) for r in ranks]
        self.up, self.down = ([[] for _ in ranks] for _ in range(2))  # blocks of each message
        self.queues = {(a, b): deque() for a in ranks for b in ranks}
        self.contributions = [{} for _ in ranks]
        self.most_unanswered = 0

    def run(self):
        for rank, worker in enumerate(self.workers):
            for message in worker.start(self.random.randrange(10)):
                self.send(rank, self.lanes.owner(message.slot), message, self.values[rank])
        while waiting := [pair for pair, queue in self.queues.items() if queue]:
            pair = self.random.choice(waiting)
            self.deliver(*pair, *self.queues[pair].popleft())
        return self.values

    def send(self, source, target, message, values):
        if message.kind == MessageKind.UP:
            self.up[source].append(message.blocks.size)
        elif target == source:
            self.down[source].append(message.blocks.size)
        self.queues[source, target].append((message, values[message.blocks].copy()))
        replies = [m.slot for m, _ in self.queues[source, target] if m.kind == MessageKind.DOWN]
        self.most_unanswered = max([self.most_unanswered, *map(replies.count, replies)])

    def deliver(self, source, target, message, values):
        if message.kind == MessageKind.DOWN:
            self.values[target][message.blocks] = values
            answer = self.workers[target].answer(message)
            if answer is not None:
                self.send(target, source, answer, self.values[target])
            return
        contributions = self.contributions[target].setdefault(message.slot, {})
        assert source not in contributions
        contributions[source] = values
        reply = self.aggregators[target].receive(source, message)
        if reply is not None:
            waiting = [m for (a, _), queue in self.queues.items() if a == target for m, _ in queue]
            under_way = any(m.kind == MessageKind.DOWN and m.slot == message.slot for m in waiting)
            assert not (reply.all_answered and under_way)
            sums = np.zeros(self.values.shape[1], dtype=np.float32)
            for worker, places in enumerate(reply.sources):
                here = places >= 0
                if here.any():
                    sums[reply.message.blocks[here]] += contributions[worker][places[here]]
            contributions.clear()
            for peer in range(self.lanes.num_ranks):
                self.send(target, peer, reply.message, sums)

    @property
    def done(self):
        return all(part.done for part in (*self.workers, *self.aggregators))


@st.composite
def networks(draw):
    ranks = draw(st.integers(1, 6))
    blocks = draw(st.integers(0, 70))
    lanes = Lanes(
        blocks,
        ranks,
        max_slots=draw(st.integers(1, 12)),
        width=draw(st.integers(1, 9)),
        answer_interval=draw(st.integers(1, 9)),
    )
    densities = draw(st.lists(st.sampled_from([0, 0.02, 0.3, 1]), min_size=ranks, max_size=ranks))
    seed = draw(st.integers(0, 2**32 - 1))
    generator = np.random.default_rng(seed)
    values = generator.standard_normal((ranks, blocks)) * 10.0 ** generator.integers(-8, 9, blocks)
    # The kernel that takes the mask leaves no -0.0.
    values = np.where(generator.random(values.shape) < np.array(densities)[:, None], values, 0)
    return Network(lanes, values, seed)


def sequences(lanes, masks):
    """Return for each slot the blocks of its lanes: the union, and the first whatever it is."""
    union = masks.any(axis=0)
    return [
        [
            [b for b in range(first, lanes.num_blocks, lanes.count) if b == first or union[b]]
            for first in lanes.first_blocks(slot).tolist()
        ]
        for slot in range(lanes.num_slots)
    ]


@settings(max_examples=100)
@given(networks())
def test_all_ranks_get_the_ordered_sum_and_every_message_is_received(network):
    wanted = np.zeros(network.lanes.num_blocks, dtype=np.float32)
    for row in network.values.copy():
        wanted = wanted + row
    for result in network.run():
        assert np.array_equal(result.view(np.int32), wanted.view(np.int32))
    assert network.done
    # No more replies of a slot are under way.
    assert network.most_unanswered <= network.lanes.answer_interval


@settings(max_examples=100)
@given(networks())
def test_what_is_sent_is_what_the_masks_say(network):
    lanes, masks = network.lanes, network.values != 0
    network.run()
    slots = sequences(lanes, masks)
    for rank, (up, down) in enumerate(zip(network.up, network.down, strict=True)):
        owned = [slot for number, slot in enumerate(slots) if lanes.owner(number) == rank]
        first = np.arange(lanes.num_blocks) < lanes.count
        assert sum(up) == (masks[rank] | first).sum()
        assert sum(down) == sum(len(lane) for slot in owned for lane in slot)
        assert len(down) == sum(max(map(len, slot)) for slot in owned)
        # Lanes of a slot go on together: round t has block t of each lane that has so many.
        rounds = [
            [[lane[t] for lane in slot if t < len(lane)] for t in range(max(map(len, slot)))]
            for slot in slots
        ]
        speaks = [[t == 0 or masks[rank][bs].any() for t, bs in enumerate(r)] for r in rounds]
        assert len(up) - up.count(0) == sum(map(sum, speaks))
        silent = [t for r in speaks for t, speaks in enumerate(r) if t and not speaks]
        assert up.count(0) == sum(t % lanes.answer_interval == 0 for t in silent)


def test_the_bound_on_replies_is_reached_by_a_silent_worker():
    # Rank 1's messages are always delivered last.
    values = np.ones((2, 40), dtype=np.float32)
    values[1] = 0
    network = Network(Lanes(40, 2, max_slots=1, width=1, answer_interval=5), values, 0)
    network.random.choice = lambda pairs: min(pairs, key=lambda pair: pair[1])
    network.run()
    assert network.done
    assert network.most_unanswered == 5


@pytest.mark.parametrize(
    ("blocks", "slots", "width", "count"), [(10, 2, 3, 2), (4, 2, 3, 2), (3, 2, 3, 1), (0, 2, 3, 0)]
)
def test_lanes_beyond_the_bucket_have_no_slot(blocks, slots, width, count):
    lanes = Lanes(blocks, 2, slots, width)
    assert lanes.num_slots == count
    firsts = [block for slot in range(count) for block in lanes.first_blocks(slot).tolist()]
    assert firsts == list(range(min(blocks, slots * width)))
