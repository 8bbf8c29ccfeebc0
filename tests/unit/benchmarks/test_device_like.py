# SPDX-License-Identifier: Apache-2.0
"""Models whose passes sleep: what they hand out, when, and what links are then."""

import pytest
import torch
from torch import nn

from benchmarks import device_like
from benchmarks.device_like import Part, SleepingOptimizer, put_to_sleep
from benchmarks.request import Waits
from benchmarks.sparse.request import WORKLOAD_NAMES, SparseRequest
from benchmarks.sparse.workloads import WORKLOADS, Model, batch_of_step


@pytest.fixture
def log(monkeypatch):
    """Note the waits instead of sleeping."""
    found = []
    monkeypatch.setattr(device_like, "sleep", found.append)
    return found


def model():
    torch.manual_seed(0)
    net = nn.ModuleList([nn.Embedding(10, 2), nn.Linear(3, 4), nn.Linear(4, 9), nn.Embedding(6, 2)])
    parts = [Part(net[0], "words"), Part(net[1]), Part(net[2]), Part(net[3], "classes")]
    put_to_sleep(net, parts, Waits(61.0, 61.0, 122.0), factor=3.0)
    return net


BATCH = {"words": torch.tensor([1, 7, 1]), "classes": torch.tensor([5])}


def test_parts_share_the_passes_by_their_weights(log):
    net = model()
    loss = net(**BATCH).loss
    assert log == [16.0, 45.0]  # 16 and 45 of 61 weights; embeddings take no time
    log.clear()
    loss.backward()
    assert log == [135.0, 48.0]


def test_gradients_come_when_the_backward_pass_of_their_part_ends(log):
    net = model()
    order = []
    for name, weight in net.named_parameters():
        weight.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
        weight.register_post_accumulate_grad_hook(lambda _: order.append(len(log)))
    loss = net(**BATCH).loss
    log.clear()
    loss.backward()
    passes = dict(zip(order[::2], order[1::2], strict=True))
    # The classes first, then the layers from the last one to the first one, and the words.
    names = list(passes)
    assert (names[0], names[-1]) == ("3.weight", "0.weight")
    assert [passes[f"{number}.weight"] for number in (3, 2, 1, 0)] == [0, 1, 2, 2]


def test_every_weight_has_a_gradient_and_a_table_only_in_its_rows(log):
    net = model()
    net(**BATCH).loss.backward()
    for layer in (net[1], net[2]):
        assert all((weight.grad == 3).all() for weight in layer.parameters())
    words = torch.zeros(10, 2)
    words[1], words[7] = 6.0, 3.0  # word 1 is there twice
    assert torch.equal(net[0].weight.grad, words)
    assert net[3].weight.grad.nonzero()[:, 0].unique().tolist() == [5]


def test_an_optimizer_that_sleeps_keeps_weights_and_shows_gradients(log):
    net = model()
    before = {name: weight.clone() for name, weight in net.state_dict().items()}
    optimizer = SleepingOptimizer(net.parameters())
    net(**BATCH).loss.backward()
    optimizer.step()
    optimizer.kept = []
    optimizer.step()
    (kept,) = optimizer.kept
    assert all(map(torch.equal, kept, [weight.grad for weight in net.parameters()]))
    assert all(torch.equal(weight, before[name]) for name, weight in net.state_dict().items())


@pytest.mark.parametrize("name", WORKLOAD_NAMES)
def test_messages_take_the_time_of_the_paper(name):
    workload = WORKLOADS[name]
    net = Model(workload, Waits(0.0, 0.0, 0.0), rank=0)
    sizes = [weight.numel() for weight in net.parameters()]
    assert sum(sizes) == workload.numel
    # A ring of many ranks sends each gradient twice, in 4 bytes.
    seconds = 2 * 4 * 8 * sum(sizes) / (workload.mbit(0.5) * 1e6)
    assert seconds / 0.5 == pytest.approx(workload.messages)
    assert SparseRequest(step=True, compute="sleep", workload=name).step_block == sizes[0] / len(
        net.tables[0].weight
    )


def test_ranks_and_steps_have_other_rows_and_gradients():
    workload = WORKLOADS["lstm"]
    first, second = (batch_of_step(workload, 0, rank) for rank in (0, 1))
    again = batch_of_step(workload, 0, 0)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["ids0"], second["ids0"])
    # OmniReduce's LSTM: 5.5 % of the gradient are not zero.
    share = sum(ids.unique().numel() for ids in first.values()) / 100_000
    assert 0.03 < share < 0.06
