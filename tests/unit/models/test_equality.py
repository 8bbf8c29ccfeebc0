# SPDX-License-Identifier: Apache-2.0
"""A pipeline of one stage computes what its model computes, to the bit."""

import copy
from itertools import pairwise

import deepspeed
import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

from wavemare.models import to_pipeline
from wavemare.models.packed import kernel_bounds
from wavemare.parallel.tensor.split import split_model


def gradients_of(loss, parameters):
    for parameter in parameters:
        parameter.grad = None
    loss.backward()
    return [None if p.grad is None else p.grad.clone() for p in parameters]


def compare(model, module, batch, *, training, **options):
    """Compare logits, loss and all gradients, from the same random state."""
    parameters = list(model.parameters())
    if model.config.model_type != "bert":
        options["use_cache"] = False
    model.train(training)
    torch.manual_seed(11)
    expected = model(**batch, **options)
    expected_gradients = gradients_of(expected.loss, parameters)
    inputs, labels = module.split_batch(batch)
    module.train(training)
    torch.manual_seed(11)
    logits = module(inputs)
    loss = module.loss_fn(logits, labels)
    assert torch.equal(logits, expected.logits)
    assert torch.equal(loss, expected.loss)
    for ours, theirs in zip(gradients_of(loss, parameters), expected_gradients, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_logits_loss_and_gradients_are_equal(model_name, padded, training, make_model, make_batch):
    model = make_model(model_name)
    module = to_pipeline(model, num_stages=1)
    assert module.family in ("gpt2", "bert", "decoder")
    compare(model, module, make_batch(model, padded=padded), training=training)


def test_equal_with_eager_attention(model_name, make_model, make_batch):
    model = make_model(model_name, attn_implementation="eager")
    compare(model, to_pipeline(model, num_stages=1), make_batch(model), training=False)


@pytest.mark.parametrize("splits", [False, True])
def test_a_kernel_gets_no_mask_and_is_not_run_by_proofs(splits, make_model, make_batch):
    masks = []

    def kernel(*arguments, **options):  # of FlashAttention: rows without padding need no mask
        masks.append(arguments[4])
        return sdpa_attention_forward(*arguments, **options)

    AttentionInterface.register("kernel", kernel)
    AttentionMaskInterface.register("kernel", flash_attention_mask)
    model = make_model("llama", attn_implementation="kernel").eval()
    batch = make_batch(model, padded=False)
    expected = make_model("llama").eval()(**batch).logits
    if splits:
        split_model(model, torch.distributed.group.WORLD)
    else:
        module = to_pipeline(model, num_stages=1)
    assert masks == []
    del batch["labels"]
    logits = model(**batch).logits if splits else module(tuple(batch.values()))
    assert torch.equal(logits, expected)
    assert masks == [None] * 3


def test_equal_with_position_ids(model_name, make_model, make_batch):
    model = make_model(model_name)
    batch = make_batch(model, "position_ids")
    names = [name for name in batch if name != "labels"]
    compare(model, to_pipeline(model, num_stages=1, inputs=names), batch, training=False)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_positions_that_restart_separate_packed_texts(name, make_model, make_batch):
    model = make_model(name)
    batch = make_batch(model, padded=False)
    del batch["attention_mask"]
    batch["position_ids"] = torch.tensor([[*range(6), *range(5)], [*range(3), *range(8)]])
    module = to_pipeline(model, num_stages=1, inputs=["input_ids", "position_ids"])
    compare(model, module, batch, training=False)
    changed = batch["input_ids"].clone()
    changed[0, :6] = 3  # the first text of the row must not reach the second
    logits = module(module.split_batch({**batch, "input_ids": changed})[0])
    expected = module(module.split_batch(batch)[0])
    assert torch.equal(logits[0, 6:], expected[0, 6:])
    assert not torch.equal(logits[0, :6], expected[0, :6])
    alone = model(batch["input_ids"][1:, :3]).logits[0]
    torch.testing.assert_close(expected[1, :3], alone, rtol=1e-5, atol=1e-5)


def by_rows(module, query, key, value, mask, **options):
    """Attend as FlashAttention's kernel of variable length does: each row of a sample alone."""
    assert mask is None
    bounds = options["cu_seq_lens_q"].tolist()
    assert max(b - a for a, b in pairwise(bounds)) == options["max_length_q"]
    flat = [torch.cat(tuple(states), dim=1)[None] for states in (query, key, value)]
    parts, window = [], options.pop("sliding_window", None) or len(flat[0][0, 0])
    for start, stop in pairwise(bounds):
        back = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        near = ((back >= 0) & (back < window))[None, None]
        states = (each[:, :, start:stop] for each in flat)
        parts.append(sdpa_attention_forward(module, *states, near, **options)[0])
    result = torch.cat(parts, dim=1)
    return result.view(query.shape[0], -1, *result.shape[2:]), None


LENGTHS = [[30, 7, 3], [1, 25, 14]]


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flash_by_rows"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "olmo3", "gpt_neox"])
def test_packed_rows_compute_what_each_computes_alone(name, attention, make_model, make_batch):
    """With masks for blocks, and with a kernel that is told where rows begin; two samples.

    In the pipeline and in the model, which a mask of blocks is given where it can use it.
    """
    AttentionInterface.register("flash_by_rows", by_rows)
    AttentionMaskInterface.register("flash_by_rows", flash_attention_mask)
    model = make_model(name).eval()
    model.config._attn_implementation = attention  # transformers looks for a flash kernel's package
    batch = make_batch(model, padded=False, tokens=40)
    positions = [[i for n in lengths for i in range(n)] for lengths in LENGTHS]
    batch["position_ids"] = torch.tensor(positions)
    batch["labels"] = batch["labels"].masked_fill(batch["position_ids"] == 0, -100)
    del batch["attention_mask"]
    module = to_pipeline(model, num_stages=1, inputs=["input_ids", "position_ids"]).eval()
    inputs, labels = module.split_batch(batch)
    packed = module(inputs)
    bounds = kernel_bounds(model.config, batch["position_ids"], None)
    whole = model(**batch, **bounds, use_cache=False).logits
    torch.testing.assert_close(whole, packed, rtol=1e-5, atol=1e-5)
    samples = zip(batch["input_ids"], LENGTHS, strict=True)
    rows = [row for sample, lengths in samples for row in sample.split(lengths)]
    model.config._attn_implementation = "sdpa"
    alone = [model(row[None], use_cache=False).logits[0] for row in rows]
    torch.testing.assert_close(packed.flatten(0, 1), torch.cat(alone), rtol=1e-5, atol=1e-5)
    loss = sum(
        torch.nn.functional.cross_entropy(logits[:-1], row[1:], reduction="sum")
        for logits, row in zip(alone, rows, strict=True)
        if len(row) > 1
    ) / sum(len(row) - 1 for row in rows)
    torch.testing.assert_close(module.loss_fn(packed, labels), loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox"])
def test_a_bare_tensor_travels_where_only_ids_are_declared(name, make_model, make_batch):
    model = make_model(name)
    module = to_pipeline(model, num_stages=1, inputs=["input_ids"])
    batch = make_batch(model, padded=False)
    inputs, _ = module.split_batch(batch)
    assert isinstance(inputs, torch.Tensor)
    activations = inputs
    for layer in module.forward_funcs:
        activations = layer(activations)
        assert isinstance(activations, torch.Tensor)
    compare(model, module, batch, training=True)


def test_a_proof_leaves_no_mask_behind(make_model, make_batch):
    model = make_model("olmo3")
    module = to_pipeline(model, num_stages=1, inputs=["input_ids"])
    # Of the shape of its last batch, with a narrowed window.
    compare(model, module, make_batch(model, padded=False, tokens=5), training=False)


def test_a_mask_of_ones_changes_no_bit(model_name, make_model, make_batch):
    model = make_model(model_name).eval()
    names = ["input_ids", "token_type_ids"] if model_name.startswith("bert") else ["input_ids"]
    masked = to_pipeline(model, num_stages=1, inputs=[*names, "attention_mask"])
    bare = to_pipeline(model, num_stages=1, inputs=names)
    batch = make_batch(model, padded=False)
    assert torch.equal(masked(masked.split_batch(batch)[0]), bare(bare.split_batch(batch)[0]))


def test_equal_in_bfloat16(model_name, make_model, make_batch):
    model = make_model(model_name).to(torch.bfloat16).eval()
    module = to_pipeline(model, num_stages=1)
    batch = make_batch(model)
    with torch.no_grad():
        assert torch.equal(module(module.split_batch(batch)[0]), model(**batch).logits)


def test_casting_the_module_leaves_the_rotary_frequencies_alone(make_model, make_batch):
    model = make_model("llama").eval()
    exact = copy.deepcopy(model).to(torch.bfloat16)
    exact.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    module = to_pipeline(model, num_stages=1).bfloat16()
    batch = make_batch(model)
    with torch.no_grad():
        assert torch.equal(module(module.split_batch(batch)[0]), exact(**batch).logits)


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("frozen", [False, True])
def test_activation_checkpoints_change_no_bit(
    name, interval, reentrant, frozen, make_model, make_batch
):
    model = make_model(name)
    model.get_input_embeddings().requires_grad_(not frozen)
    module = to_pipeline(model, num_stages=1, activation_checkpoint_interval=interval)
    if not reentrant:
        module.activation_checkpoint_func = deepspeed.checkpointing.non_reentrant_checkpoint
    module._precompute_checkpointable_values()
    assert any(module.is_checkpointable_results)
    compare(model, module, make_batch(model), training=True)


@pytest.mark.parametrize(
    ("num_labels", "problem_type", "labels"),
    [
        (1, "regression", torch.tensor([0.5, -1.0])),
        (1, None, torch.tensor([0.5, -1.0])),
        (3, "regression", torch.tensor([[0.5, 1, 2], [-1.0, 0, 3]])),
        (3, "single_label_classification", torch.tensor([2, 1])),
        (3, None, torch.tensor([2, 1])),
        (3, "multi_label_classification", torch.tensor([[0.0, 1, 1], [1, 0, 0]])),
        (3, None, torch.tensor([[0.0, 1, 1], [1, 0, 0]])),
    ],
)
def test_classification_losses(num_labels, problem_type, labels, make_model, make_batch):
    model = make_model("bert-cls", num_labels=num_labels, problem_type=problem_type)
    module = to_pipeline(model, num_stages=1)
    assert model.config.problem_type == problem_type  # the proof must not decide it
    batch = {**make_batch(model), "labels": labels}
    compare(model, module, batch, training=False)


def test_a_loss_of_the_callers_own(make_model, make_batch):
    model = make_model("gpt2").eval()
    module = to_pipeline(model, num_stages=1, loss_fn=lambda logits, labels: logits.sum())
    inputs, labels = module.split_batch(make_batch(model))
    logits = module(inputs)
    assert torch.equal(module.loss_fn(logits, labels), logits.sum())


@pytest.mark.parametrize("model_name", ["gpt2", "llama"])
@pytest.mark.parametrize("late", [False, True])
def test_a_loss_function_of_the_models_own(model_name, late, make_model, make_batch):
    """Also one that the model gets when it has been cut."""
    model = make_model(model_name)

    def smoothed(logits, labels, vocab_size, num_items_in_batch=None, **options):
        flat = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return torch.nn.functional.cross_entropy(*flat, label_smoothing=0.3)

    module = to_pipeline(model, num_stages=1) if late else None
    model.loss_function = smoothed
    module = module or to_pipeline(model, num_stages=1)
    compare(model, module, make_batch(model), training=False)
