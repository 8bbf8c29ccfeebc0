# SPDX-License-Identifier: Apache-2.0
"""Stages of a split model by segments: the bits of the layers called one after the other."""

import pytest
import torch
from tensor_models import batch, build
from torch import nn

from wavemare.engine.waves.executor import WaveExecutor
from wavemare.engine.waves.segments import no_shared_parameters
from wavemare.models.activations import split_batch
from wavemare.models.families import SplitTiedHead, family_of, split_chain, split_loss
from wavemare.models.layers import Head
from wavemare.models.proof import run_chain
from wavemare.models.segments import stage_segments
from wavemare.parallel.tensor.split import split_model
from wavemare.parallel.tensor.vocabulary import VocabParallelHead
from wavemare.pipeline.wave.schedule import backward_pass, forward_pass, pass_pair

MICRO_BATCHES = 3


def prepare(name, group):
    model = split_model(build(name, residual=0.1, attention=0.1), group).train()
    family = family_of(model)
    names = family.default
    chain = split_chain(family.chain(model, names))
    data = [split_batch(batch(model, seed), names) for seed in range(MICRO_BATCHES)]
    return model, chain, split_loss(model, family.loss(model)), data


def gradients(model):
    found = {name: value.grad for name, value in model.named_parameters()}
    model.zero_grad()
    return found


def by_layers(model, chain, loss, data):
    losses = []
    for activations, labels in data:
        result = loss(run_chain(chain, activations), labels)
        result.backward()
        losses.append(result.item())
    return losses, gradients(model)


class Stage:
    def __init__(self, layers, group, loss, *, first):
        self.segments = stage_segments(layers, group, first=first, loss=loss)
        module = nn.ModuleList(layers)
        self.executor = WaveExecutor(self.segments, module, no_shared_parameters(self.segments))
        self.count = len(self.segments.names)

    def run(self, plan, *batches):
        return [loss.item() for loss in self.executor.run(plan, iter(batches))]


def by_stages(model, chain, loss, data, cut, group):
    """Two stages; the first one runs its forward passes two ahead, so that pairs come."""
    first = Stage(chain[:cut], group, None, first=True)
    second = Stage(chain[cut:], group, loss, first=False)
    losses = []

    def forward(number):
        return first.run(forward_pass(first.count, number), (carry_of(number), None))

    def carry_of(number):
        activations, _ = data[number]
        return (activations,) if isinstance(activations, torch.Tensor) else activations

    sent = {}
    for number in range(2):
        forward(number)
        sent[number] = first.executor.outputs(number)
    losses += second.run(forward_pass(second.count, 0), (sent[0], data[0][1]))
    for number in range(MICRO_BATCHES):
        following = number + 1
        if following < MICRO_BATCHES:
            sums = second.segments.sums_output, second.segments.sums_gradient
            pair = pass_pair(*sums, backward=number, forward=following)
            losses += second.run(pair, (sent[following], data[following][1]))
        else:
            second.run(backward_pass(second.count, number))
        returned = second.executor.input_gradients(number)
        first.executor.take_gradients(number, returned)
        ahead = number + 2
        if ahead < MICRO_BATCHES:
            sums = first.segments.sums_output, first.segments.sums_gradient
            pair = pass_pair(*sums, backward=number, forward=ahead)
            first.run(pair, (carry_of(ahead), None))
            sent[ahead] = first.executor.outputs(ahead)
        else:
            first.run(backward_pass(first.count, number))
    return losses, gradients(model)


@pytest.mark.parametrize("name", ["gpt2", "gpt2-untied", "bert-mlm", "bert-cls"])
def test_segments_of_two_stages_in_pairs_give_the_bits_of_the_layers(name, alone):
    model, chain, loss, data = prepare(name, alone)
    for layer in chain:
        for module in layer.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # stages draw in another order than whole passes
    expected_losses, expected = by_layers(model, chain, loss, data)
    for cut in range(1, len(chain)):
        losses, found = by_stages(model, chain, loss, data, cut, alone)
        assert losses == expected_losses
        for weight, value in expected.items():
            if isinstance(chain[-1], SplitTiedHead) and value.shape == (96, 32):
                # Here both stages add to one gradient, in another order than whole passes do.
                assert torch.allclose(found[weight], value, rtol=1e-5, atol=1e-7), weight
            else:
                assert torch.equal(found[weight], value), weight


def test_an_untied_head_has_its_own_rows_and_their_marks(alone):
    model = split_model(build("gpt2-101"), alone)
    *_, head = split_chain(family_of(model).chain(model, ("input_ids",)))
    assert isinstance(head, SplitTiedHead)
    own = head.untied()
    assert isinstance(own, Head)
    assert isinstance(own.module, VocabParallelHead)
    weight, tied = own.module.weight, model.lm_head.weight
    assert weight is not tied
    assert torch.equal(weight, tied)
    assert (weight.tensor_model_parallel, weight.partition_dim) == (True, 0)
    assert weight.whole_numel == tied.whole_numel == 101 * 32
    hidden = torch.randn(2, 5, 32)
    assert torch.equal(own(hidden), head(hidden))


def test_gathered_logits_are_those_of_the_model(alone):
    model, chain, loss, data = prepare("gpt2-101", alone)
    model.eval()
    logits = run_chain(chain, data[0][0])
    assert logits.shape[-1] == 104
    given = batch(model, 0)
    given.pop("labels")
    assert torch.equal(loss.gather(logits), model(**given).logits)
