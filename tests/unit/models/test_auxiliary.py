# SPDX-License-Identifier: Apache-2.0
"""The auxiliary loss of a mixture of experts, summed up layer by layer, is transformers' own."""

import deepspeed
import pytest
import torch
import transformers

from wavemare.models import to_pipeline
from wavemare.models.proof import run_chain


@pytest.fixture
def make_moe():
    """Build a tiny mixture of experts; its second layer of qwen's has none."""

    def make(kind, **changes):
        transformers.set_seed(3)
        sizes = {
            "vocab_size": 96,
            "hidden_size": 32,
            "intermediate_size": 32,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_local_experts" if kind == "mixtral" else "num_experts": 4,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [1],
            "router_aux_loss_coef": 0.1,
            "initializer_range": 0.2,
            "pad_token_id": 0,
            "output_router_logits": True,
            **changes,
        }
        config = transformers.AutoConfig.for_model(kind, **sizes)
        return transformers.AutoModelForCausalLM.from_config(config)

    return make


def gradients_of(model, batches, backward):
    model.zero_grad()
    losses = [backward(batch) for batch in batches]
    return losses, [p.grad.clone() for p in model.parameters()]


def check_bits(model, module, batches, layers=None):
    """Compare with the model's own passes; as two stages the first of which has some layers."""

    def original(batch):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        return loss

    def in_stages(batch):
        inputs, labels = module.split_batch(batch)
        sent = run_chain(module.forward_funcs[:layers], inputs)
        received = tuple(t.detach().requires_grad_(t.is_floating_point()) for t in sent)
        loss = module.loss_fn(run_chain(module.forward_funcs[layers:], received), labels)
        loss.backward()
        pairs = [(t, r.grad) for t, r in zip(sent, received, strict=True) if r.requires_grad]
        torch.autograd.backward([t for t, _ in pairs], [grad for _, grad in pairs])
        return loss

    def at_once(batch):
        inputs, labels = module.split_batch(batch)
        loss = module.loss_fn(module(inputs), labels)
        loss.backward()
        return loss

    expected = gradients_of(model, batches, original)
    for ours, theirs in zip(
        gradients_of(model, batches, in_stages if layers else at_once), expected, strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_two_stages_have_the_loss_and_gradients_of_the_model(kind, padded, make_moe, make_batch):
    """Bit for bit, after two micro-batches, wherever the cut is."""
    model = make_moe(kind)
    module = to_pipeline(model, num_stages=1)
    batches = [make_batch(model, padded=padded, tokens=tokens) for tokens in (11, 7)]
    for layers in (1, 2, 3, 5):
        check_bits(model, module, batches, layers)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoints_change_no_bit(reentrant, make_moe, make_batch):
    model = make_moe("qwen3_moe")
    module = to_pipeline(model, num_stages=1, activation_checkpoint_interval=2)
    if not reentrant:
        module.activation_checkpoint_func = deepspeed.checkpointing.non_reentrant_checkpoint
    module._precompute_checkpointable_values()
    check_bits(model, module, [make_batch(model), make_batch(model, tokens=7)])


def test_a_loss_of_the_callers_own_is_added_to_it(make_moe, make_batch):
    model = make_moe("mixtral")
    options = {"num_stages": 1, "partition": "time", "inputs": ["input_ids"]}
    module = to_pipeline(model, loss_fn=lambda logits, labels: logits.sum(), **options)
    batch = make_batch(model, padded=False)
    inputs, labels = module.split_batch(batch)
    expected = model(**batch)
    loss = module.loss_fn(module(inputs), labels)
    assert torch.equal(loss, expected.logits.sum() + 0.1 * expected.aux_loss)


def test_a_coefficient_that_changes_in_training_counts(make_moe, make_batch):
    model = make_moe("mixtral")
    module = to_pipeline(model, num_stages=1)
    model.router_aux_loss_coef = 5.0
    check_bits(model, module, [make_batch(model)], 2)
