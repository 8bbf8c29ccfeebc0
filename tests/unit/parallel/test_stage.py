# SPDX-License-Identifier: Apache-2.0
"""Heads of the stages of a split model."""

import torch
from tensor_models import batch, build

from wavemare.models.activations import split_batch
from wavemare.models.families import SplitTiedHead, family_of, split_chain, split_loss
from wavemare.models.layers import Head
from wavemare.models.proof import run_chain
from wavemare.parallel.tensor.layers import VocabParallelHead
from wavemare.parallel.tensor.split import split_model


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
    model = split_model(build("gpt2-101"), alone).eval()
    family = family_of(model)
    chain, loss = split_chain(family.chain(model, family.default)), family.loss(model)
    inputs, _ = split_batch(batch(model, 0), family.default)
    logits = run_chain(chain, inputs)
    assert logits.shape[-1] == 104
    given = batch(model, 0)
    given.pop("labels")
    assert torch.equal(split_loss(model, loss).gather(logits), model(**given).logits)
