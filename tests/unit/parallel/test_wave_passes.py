# SPDX-License-Identifier: Apache-2.0
"""Passes that take turns: gradients of plain accumulation, memory of one wave, the plan's order."""

import gc
import weakref
from functools import partial

import pytest
import torch
from tensor_models import batch, build
from torch import nn
from torch.utils.checkpoint import checkpoint

from wavemare.engine.waves.passes import Pass, PassRunner
from wavemare.engine.waves.wavelet import WaveProbe
from wavemare.parallel.tensor.layers import copy_to_group, reduce_from_group
from wavemare.parallel.tensor.split import split_model
from wavemare.pipeline.plan.plan import COMPUTE, Action, Kind
from wavemare.pipeline.wave import schedule
from wavemare.pipeline.wave.gain import costs_of_segments

CPU = torch.device("cpu")


def forward(call, number, given):
    return Pass(Kind.FORWARD, number, partial(call, given))


def backward(number, loss):
    return Pass(Kind.BACKWARD, number, loss.backward)


def accumulate(runner, call, batches):
    losses = []
    for number, given in enumerate(batches):
        loss = runner.alone(forward(call, number, given))
        runner.alone(backward(number, loss))
        losses.append(loss.detach())
    return losses


def tick_tock(runner, call, batches):
    losses = [runner.alone(forward(call, 0, batches[0]))]
    for number, given in enumerate(batches[1:], 1):
        _, loss = runner.pair(backward(number - 1, losses[-1]), forward(call, number, given))
        losses[-1] = losses[-1].detach()
        losses.append(loss)
    runner.alone(backward(len(losses) - 1, losses[-1]))
    return [loss.detach() for loss in losses]


def in_phase(runner, call, batches):
    for first in range(0, len(batches), 2):
        numbers = first, first + 1
        losses = runner.pair(*(forward(call, n, batches[n]) for n in numbers))
        runner.pair(*map(backward, numbers, losses))


@pytest.mark.parametrize(
    ("name", "micro_batches", "dtype", "checkpoints"),
    [
        ("gpt2-101", 4, torch.float32, None),
        ("gpt2-101", 3, torch.bfloat16, {"use_reentrant": True}),
        ("bert-mlm-101", 2, torch.float32, {"use_reentrant": False}),
        ("bert-cls", 4, torch.bfloat16, None),
    ],
)
def test_losses_gradients_and_random_numbers_are_those_of_accumulation(
    name, micro_batches, dtype, checkpoints, alone
):
    """With dropout: what is computed again draws the numbers of its own forward pass."""
    results = []
    runner = PassRunner(CPU)
    for step in (accumulate, tick_tock):
        model = split_model(build(name, residual=0.1, attention=0.1).to(dtype), alone).train()
        if checkpoints:
            model.gradient_checkpointing_enable(checkpoints)
        batches = [batch(model, seed) for seed in range(micro_batches)]
        torch.manual_seed(3)
        losses = step(runner, lambda given, model=model: model(**given).loss, batches)
        gradients = {key: value.grad for key, value in model.named_parameters()}
        results.append((losses, gradients, torch.get_rng_state()))
    (expected_losses, expected, state), (losses, found, own_state) = results
    assert losses == expected_losses
    assert torch.equal(own_state, state)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


class LiveBytes:
    """Counts what autograd keeps at any time, each storage once, weights left aside."""

    class Kept:
        def __init__(self, tensor):
            self.tensor = tensor.detach()  # an output itself would hold what holds this

    def __init__(self, module):
        self.weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self.counts = {}
        self.now = self.most = 0

    def hooks(self):
        return torch.autograd.graph.saved_tensors_hooks(self.pack, lambda kept: kept.tensor)

    def pack(self, tensor):
        kept = self.Kept(tensor)
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if key not in self.weights:
            self.counts[key] = self.counts.get(key, 0) + 1
            if self.counts[key] == 1:
                self.now += size
                self.most = max(self.most, self.now)
            weakref.finalize(kept, self.free, key, size)
        return kept

    def free(self, key, size):
        self.counts[key] -= 1
        if not self.counts[key]:
            del self.counts[key]
            self.now -= size


class Stack(nn.Module):
    """A model of one's own: MLP blocks that sum over a group, and drop elements behind that."""

    def __init__(self, layers, group, width=1, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.group = group
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16 * width), nn.Tanh(), nn.Linear(16 * width, 16))
            for _ in range(layers)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, value):
        for block in self.blocks:
            if self.dropout.p:
                value = checkpoint(self.part, block, value, use_reentrant=False)
            else:
                value = self.part(block, value)
        return value.square().mean()

    def part(self, block, value):
        return self.dropout(reduce_from_group(block(copy_to_group(value, self.group)), self.group))


def test_a_model_of_ones_own_needs_our_collectives_alone(alone):
    ours, stock = (Stack(4, alone, dropout=0.2) for _ in range(2))
    batches = [torch.randn(8, 16) for _ in range(3)]
    torch.manual_seed(1)
    expected = accumulate(PassRunner(CPU), stock, batches)
    torch.manual_seed(1)
    runner = PassRunner(CPU)
    assert tick_tock(runner, ours, batches) == expected
    # Of the first block's input no gradient is summed; in the backward pass blocks sum again.
    assert runner.collectives == 3 * (4 + 3 + 4)
    for value, other in zip(ours.parameters(), stock.parameters(), strict=True):
        assert torch.equal(value.grad, other.grad)


@pytest.mark.long
@pytest.mark.parametrize("layers", [2, 12])
def test_the_peak_is_that_of_one_wave(layers, alone):
    model = Stack(layers, alone, width=64)
    batches = [torch.randn(64, 16) for _ in range(4)]

    def peak(step):
        live = LiveBytes(model)

        def call(given):
            with live.hooks():
                return model(given)

        step(PassRunner(CPU), call, batches)
        gc.collect()
        assert live.now == 0
        return live.most

    one = peak(accumulate)
    assert 0.99 <= peak(tick_tock) / one <= 1.02
    assert peak(in_phase) / one == pytest.approx(2, abs=0.03)


class Notes:
    def __init__(self):
        self.actions = []

    def now(self):
        return 0.0

    def note(self, action, start_s, end_s):
        self.actions.append(action)


def test_parts_of_passes_run_in_the_order_of_the_plan(alone):
    """The segments of the plan end where the backward pass has a collective."""
    layers, micro_batches = 3, 4
    model, runner = Stack(layers, alone), PassRunner(CPU)
    runner.recorder = notes = Notes()
    inputs = [torch.randn(2, 16, requires_grad=True) for _ in range(micro_batches)]
    tick_tock(runner, model, inputs)
    segments = layers + 1
    head = segments - 1
    found = [
        (kind, part if kind is Kind.FORWARD else head - part, number)
        for kind, part, number, *_ in notes.actions
        if kind in COMPUTE
    ]
    sums = {
        "sums_output": [True] * layers + [False],
        "sums_gradient": [False] + [True] * layers,
    }
    (plan,) = schedule.tick_tock(segments, micro_batches, **sums).ranks
    expected = [(a.kind, a.stage, a.micro_batch) for a in plan if a.kind in COMPUTE]
    assert found == expected


@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_an_error_ends_both_passes_and_the_next_ones_run(fails, alone):
    model, runner = Stack(6, alone), PassRunner(CPU)
    loss = runner.alone(forward(model, 0, torch.randn(4, 16)))
    if fails == "forward":
        model.blocks[2].register_forward_hook(lambda *_: 1 / 0)
    else:
        model.blocks[3][0].weight.register_hook(lambda gradient: 1 / 0)
    live, batch = LiveBytes(model), torch.randn(4, 16)
    with pytest.raises(ZeroDivisionError), live.hooks():
        runner.pair(backward(0, loss), forward(model, 1, batch))
    assert model.blocks[0][0].weight.grad is None
    assert runner.collectives < 6 + 5 + 5
    gc.collect()
    assert live.now == 0
    model = Stack(2, alone)
    assert len(tick_tock(runner, model, [torch.randn(rows, 16) for rows in (4, 7, 2)])) == 3


def test_without_a_collective_the_passes_follow_each_other():
    runner, order = PassRunner(CPU), []
    passes = (Pass(kind, 0, partial(order.append, kind)) for kind in (Kind.BACKWARD, Kind.FORWARD))
    runner.pair(*passes)
    assert order == [Kind.BACKWARD, Kind.FORWARD]
    assert runner.collectives == 0


PARTS = {
    **{(Kind.FORWARD, part): 1.0 + part for part in range(5)},
    **{(Kind.SUM_OUTPUT, part): 0.1 * (1 + part) for part in range(4)},
    **{(Kind.BACKWARD, part): 10.0 + part for part in range(3)},
    **{(Kind.SUM_GRADIENT, part): 0.5 + part for part in range(2)},
}


def test_segments_end_where_a_backward_pass_has_a_collective():
    costs, count = costs_of_segments(PARTS)
    assert count == 3
    assert costs.forward_s == (1.0, 2.0, pytest.approx(3 + 4 + 5 + 0.3 + 0.4))
    assert costs.sum_output_s == (0.1, 0.2, 0.0)
    assert costs.backward_s == (12.0, 11.0, 10.0)
    assert costs.sum_gradient_s == (0.0, 1.5, 0.5)
    # Without collectives a forward pass runs behind nothing.
    once = {
        place: s for place, s in PARTS.items() if place[0] not in (Kind.FORWARD, Kind.SUM_OUTPUT)
    }
    costs, count = costs_of_segments({**once, (Kind.FORWARD, 0): 4.0})
    assert (count, costs.forward_s, costs.sum_output_s) == (3, (0.0, 0.0, 4.0), (0.0, 0.0, 0.0))


@pytest.mark.parametrize("sum_s", [0.0, 0.5])
def test_waves_are_on_where_collectives_take_time(sum_s, alone):
    probe = WaveProbe(CPU)
    for kind, seconds, count in (
        (Kind.FORWARD, 1.0, 5),
        (Kind.BACKWARD, 2.0, 5),
        (Kind.SUM_OUTPUT, sum_s, 4),
        (Kind.SUM_GRADIENT, sum_s, 4),
    ):
        for part in range(count):
            probe.note(Action(kind, part, 0), 1.0, 1.0 + seconds)
    assert probe.decide(8).on == (sum_s > 0)
