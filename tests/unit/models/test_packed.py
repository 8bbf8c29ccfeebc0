# SPDX-License-Identifier: Apache-2.0
"""Attention of packed rows, one by one, against masks made by hand and rows that are alone."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from wavemare.models import to_pipeline
from wavemare.models.packed import RowMask, follows, row_mask, whole_arguments

CPU = torch.device("cpu")
ROWS = [[60, 1, 64, 59, 40, 32], [64, 64, 64, 64]]
TOKENS = 256
LAYERS = 3


def positions_of(rows):
    return torch.tensor([[i for length in lengths for i in range(length)] for lengths in rows])


def slow_mask(rows, window):
    """Look at each pair of tokens."""
    size = sum(rows[0])
    mask = torch.zeros(len(rows), 1, size, size, dtype=torch.bool)
    for sample, lengths in enumerate(rows):
        number = [row for row, length in enumerate(lengths) for _ in range(length)]
        for here in range(size):
            for there in range(here + 1):
                near = window is None or here - there < window
                mask[sample, 0, here, there] = near and number[here] == number[there]
    return mask


def attention(mask, dropout=0.0):
    """Return the attention of random states by a mask, and its gradients."""
    generator = torch.Generator().manual_seed(3)
    leaves = [torch.randn(2, 4, 20, 8, generator=generator).requires_grad_() for _ in range(3)]
    torch.manual_seed(4)
    found = scaled_dot_product_attention(*leaves, attn_mask=mask, dropout_p=dropout, scale=0.5)
    found.square().sum().backward()
    return [found.detach(), *(each.grad for each in leaves)]


SHORT = [[7, 1, 12], [20]]


@pytest.mark.parametrize("window", [None, 5, 12])
def test_rows_are_attended_to_as_a_mask_of_blocks_says(window):
    slow, mask = slow_mask(SHORT, window), RowMask(SHORT, CPU, window)
    for ours, expected in zip(attention(mask), attention(slow), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    for ours, expected in zip(attention(mask, 0.5), attention(slow, 0.5), strict=True):
        assert torch.equal(ours, expected)


def test_to_all_other_functions_it_is_a_boolean_tensor():
    slow, mask = slow_mask(SHORT, None), RowMask(SHORT, CPU)
    assert (mask.shape, mask.dtype, mask.device) == (slow.shape, slow.dtype, CPU)
    assert torch.equal(mask[..., :9], slow[..., :9])
    assert torch.equal(torch.where(mask, 1.5, -2.0), torch.where(slow, 1.5, -2.0))
    assert torch.equal(mask & ~slow, torch.zeros_like(slow))
    assert type(mask.float()) is torch.Tensor
    assert type(mask.clone()) is torch.Tensor
    kept = mask.detach()  # by activation checkpoints
    for ours, expected in zip(attention(kept), attention(mask), strict=True):
        assert torch.equal(ours, expected)


class Pairs(TorchDispatchMode):
    """Counts the pairs of tokens that attention is computed of."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "_scaled_dot_product" in str(function) and "backward" not in str(function):
            query, key = args[:2]
            self.count += query.shape[0] * query.shape[2] * key.shape[2]
        return function(*args, **(kwargs or {}))


BY_ROWS = LAYERS * sum(length**2 for lengths in ROWS for length in lengths)
WHOLE = LAYERS * len(ROWS) * TOKENS**2
# In the pipeline, and in the whole model, which takes one mask for layers of all kinds.
PAIRS = {
    "gpt2": (BY_ROWS, BY_ROWS),
    "llama": (BY_ROWS, BY_ROWS),
    "qwen3": (BY_ROWS, WHOLE),
    "olmo3": (BY_ROWS, BY_ROWS),
    "gpt_neox": (BY_ROWS, BY_ROWS),
    "mistral": (BY_ROWS, BY_ROWS),
}


@pytest.fixture
def model_of(make_model):
    def make(name):
        if name != "mistral":
            return make_model(name).eval()
        sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
        transformers.set_seed(3)
        config = transformers.MistralConfig(
            **sizes,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=9,
        )
        return transformers.MistralForCausalLM(config).eval()

    return make


def gradients(loss, model):
    model.zero_grad()
    loss.backward()
    return [weight.grad.clone() for weight in model.parameters()]


@pytest.mark.parametrize("name", PAIRS)
def test_long_samples_cost_their_rows_alone(name, model_of, make_batch):
    """They compute what rows compute one by one, with their gradients."""
    model = model_of(name)
    batch = make_batch(model, padded=False, tokens=TOKENS)
    batch["position_ids"] = positions_of(ROWS)
    labels = batch.pop("labels").masked_fill(batch["position_ids"] == 0, -100)
    del batch["attention_mask"]
    module = to_pipeline(model, num_stages=1, inputs=["input_ids", "position_ids"]).eval()
    inputs, _ = module.split_batch({**batch, "labels": labels})
    counted = Pairs(), Pairs()
    with counted[0]:
        staged = module(inputs)
    ours = gradients(module.loss_fn(staged, labels), model)
    more = whole_arguments(model, batch, CPU)
    with counted[1]:
        whole = model(**batch, **more, labels=labels, use_cache=False)
    theirs = gradients(whole.loss, model)
    assert (counted[0].count, counted[1].count) == PAIRS[name]
    samples = zip(batch["input_ids"], ROWS, strict=True)
    rows = [row for sample, lengths in samples for row in sample.split(lengths)]
    alone = [model(row[None], use_cache=False).logits[0] for row in rows]
    expected = torch.cat(alone)
    torch.testing.assert_close(staged.flatten(0, 1), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole.logits.flatten(0, 1), expected, rtol=1e-5, atol=1e-5)
    total = sum(
        torch.nn.functional.cross_entropy(logits[:-1], row[1:], reduction="sum")
        for logits, row in zip(alone, rows, strict=True)
        if len(row) > 1
    )
    slow = gradients(total / (labels != -100).sum(), model)
    for a, b, c in zip(ours, theirs, slow, strict=True):
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(b, c, rtol=1e-4, atol=1e-5)


def test_where_rows_are_not_attended_to_alone():
    config = SimpleNamespace(_attn_implementation="sdpa")
    packed = positions_of(ROWS)
    assert isinstance(row_mask(config, packed, CPU), RowMask)
    for other, positions, device in (
        (SimpleNamespace(_attn_implementation="eager"), packed, CPU),
        (config, packed, torch.device("cuda")),
        (config, torch.arange(TOKENS).repeat(2, 1), CPU),  # no sample has several rows
        (config, positions_of([[9, 7]]), CPU),  # calls would cost more than they save
        (config, torch.arange(2).repeat(TOKENS // 2)[None], CPU),
    ):
        assert row_mask(other, positions, device) is None


def test_models_that_may_do_more_with_a_mask_make_their_own(model_of):
    batch = {"position_ids": positions_of(ROWS)}
    model = model_of("llama")
    assert whole_arguments(model, batch, CPU).keys() == {"attention_mask"}
    given = {**batch, "attention_mask": torch.ones_like(batch["position_ids"])}
    assert whole_arguments(model, given, CPU) == {}
    assert whole_arguments(torch.nn.Linear(2, 2), batch, CPU) == {}
    model.config.output_router_logits = True
    assert whole_arguments(model, batch, CPU) == {}
    model.config.output_router_logits = False
    model.model.layers[1].compile(backend="eager")
    assert whole_arguments(model, batch, CPU) == {}


def test_entries_that_say_of_rows_what_positions_say():
    """As TRL gives them beside packed rows."""
    positions = positions_of([[3, 1, 4]])
    bounds = torch.tensor([0, 3, 4, 8], dtype=torch.int32)
    entries = {"cu_seq_lens_q": bounds, "max_length_k": 4}
    entries["seq_idx"] = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2]], dtype=torch.int32)
    for name, value in entries.items():
        assert follows(name, value, positions)
        assert not follows(name, value, None)
        assert not follows(name, value + 1, positions)
        assert not follows("other", value, positions)
    assert not follows("cu_seq_lens_q", bounds[:-1], positions)
