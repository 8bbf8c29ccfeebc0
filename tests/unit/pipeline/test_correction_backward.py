# SPDX-License-Identifier: Apache-2.0
"""Backward passes of stale micro-batches against those of whole copies of the old model.

An exact correction must give, bit by bit, what a copy from before the steps gives. With the
estimate the twin is that copy too, but the estimate is written over its weights between its forward
and its backward pass.
"""

import copy
import gc
from collections import deque
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, GPT2Config
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.pytorch_utils import Conv1D

from support.refusals import refuses
from wavemare.errors import ModelError
from wavemare.pipeline.staleness.correction import make_correction

AGE = 2
WIDTH = 8


class Wrapped(nn.Module):
    """Calls a function with the parameters and modules given by name, and an input."""

    def __init__(self, function, **members):
        super().__init__()
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, x):
        return self.function(self, x)


def weight(*shape):
    return nn.Parameter(torch.randn(shape))


def functional_views(m, x):
    query, key, value = (x @ m.fused.t()).chunk(3, -1)
    mixed = query @ m.fused[:WIDTH].t() + key @ m.fused.chunk(3)[1] + value * m.fused[-1]
    tail = functional.linear(mixed, m.fused[1 : WIDTH + 1], m.fused[:, 3][:WIDTH])
    return torch.einsum("bti,iok->bto", tail, m.fused.view(WIDTH, 3, WIDTH)[:, :2])


def fused_attention(m, x):
    query, key, value = functional.linear(x, m.fused).chunk(3, -1)
    heads = [t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (query, key, value)]
    mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
    return mixed.transpose(1, 2).flatten(2) * m.gain


def gpt2_block(attention):
    config = GPT2Config(
        n_embd=WIDTH, n_head=2, attn_pdrop=0.0, resid_pdrop=0.0, attn_implementation=attention
    )
    return GPT2Block(config, layer_idx=0)


def bert_layer(attention):
    config = BertConfig(
        hidden_size=WIDTH,
        num_attention_heads=2,
        intermediate_size=3 * WIDTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation=attention,
    )
    return BertLayer(config)


def attention_layer(m, x):
    return m.layer(x, x, x, need_weights=False)[0]


def lstm(m, x):
    return m.layer(x)[0]


def image(m, x):
    return m.norm(m.convolution(x.unsqueeze(1))).flatten(1)


MODULES = {
    "linear": lambda: nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH)),
    "norms": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH), nn.PReLU()),
    "embedding": lambda: Wrapped(
        lambda m, x: m.head(m.table((x.detach() > 0).long()) * x.unsqueeze(-1)),
        table=nn.Embedding(2, WIDTH),
        head=nn.Linear(WIDTH, 3),
    ),
    "tied embedding": lambda: Wrapped(
        lambda m, x: functional.linear(m.table((x.detach() > 0).long()) * x[..., None], m.w),
        table=(table := nn.Embedding(2, WIDTH)),
        w=table.weight,
    ),
    "addmm": lambda: nn.Sequential(Conv1D(5, WIDTH), nn.GELU(), Conv1D(WIDTH, 5)),
    "product": lambda: Wrapped(lambda m, x: x * m.w * m.w + x / m.v, w=weight(WIDTH), v=weight(1)),
    "views": lambda: Wrapped(functional_views, fused=weight(3 * WIDTH, WIDTH)),
    "attention": lambda: Wrapped(fused_attention, fused=weight(3 * WIDTH, WIDTH), gain=weight(1)),
    "torch's attention": lambda: Wrapped(
        attention_layer, layer=nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    ),
    "convolution": lambda: Wrapped(image, convolution=nn.Conv2d(1, 4, 3), norm=nn.GroupNorm(2, 4)),
    "channels last": lambda: Wrapped(
        image, convolution=nn.Conv2d(1, 4, 3), norm=nn.BatchNorm2d(4)
    ).to(memory_format=torch.channels_last),
    "recurrent": lambda: Wrapped(lstm, layer=nn.LSTM(WIDTH, 3, batch_first=True)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 3)),
    "GPT-2": lambda: gpt2_block("sdpa"),
    "GPT-2, eager": lambda: gpt2_block("eager"),
    "BERT": lambda: bert_layer("sdpa"),
    "BERT, eager": lambda: bert_layer("eager"),
}
modes = pytest.mark.parametrize("mode", ["exact", "ema"])
kinds = pytest.mark.parametrize(
    "kind", [MODULES["linear"], MODULES["views"]], ids=["linear", "views"]
)


def made(kind, dtype=torch.float32):
    torch.manual_seed(5)
    return kind().to(dtype)


def drawn(number, dtype=torch.float32):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(2, 6, WIDTH, generator=generator).to(dtype).requires_grad_()


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True)


def adamw(params):
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1, foreach=True)


def call(module, x):
    out = module(x)
    return out[0] if isinstance(out, tuple) else out


def gradients(module, x, out):
    """Return the gradients of the input and of the trained weights, given one of the output."""
    for p in module.parameters():
        p.grad = None
    x.grad = None
    generator = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=generator).to(out.dtype))
    return [x.grad, *(p.grad for p in module.parameters() if p.requires_grad)]


def twin_gradients(twin, x, weights=None):
    """Return a whole model's gradients; other weights are written over its own in between."""
    x = x.detach().clone().requires_grad_()
    out = call(twin, x)
    if weights is not None:
        for p, written in zip(twin.parameters(), weights, strict=True):
            p.data.copy_(written)
    return gradients(twin, x, out)


def equal(left, right):
    """Whether all are the same bits; None stands for itself."""
    return all(
        a is b is None or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(left, right, strict=True)
    )


def step(correction, module, optimizer, number, around=nullcontext):
    generator = torch.Generator().manual_seed(100 + number)
    for p in module.parameters():
        if p.requires_grad:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    correction.before_step()
    with around():
        optimizer.step()
    correction.after_step()


def pipelined(
    module, mode, make_optimizer=sgd, around=nullcontext, forward=call, twin=twin_gradients
):
    """Yield a stale micro-batch's gradients and the twin's, with some micro-batches under way."""
    params = list(module.parameters())
    dtype = params[0].dtype
    optimizer = make_optimizer([p for p in params if p.requires_grad])
    correction = make_correction(mode, params, AGE)
    under_way = deque()
    for number in range(AGE + 2):
        x, old = drawn(number, dtype), copy.deepcopy(module)
        with correction.forward(1):
            under_way.append((x, forward(module, x), old))
        step(correction, module, optimizer, number, around)
        if len(under_way) == AGE:
            x, out, old = under_way.popleft()
            newest = [p.detach().clone() for p in params]
            correction.correct(AGE)
            estimate = [p.detach().clone() for p in params] if mode == "ema" else None
            found = gradients(module, x, out)
            correction.restore()
            assert equal(params, newest)
            yield found, twin(old, x, estimate)


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@modes
@pytest.mark.parametrize("kind", MODULES.values(), ids=MODULES.keys())
def test_gradients_are_those_of_a_whole_old_model(kind, mode, make_optimizer):
    module = made(kind)
    count = 0
    for found, wanted in pipelined(module, mode, make_optimizer):
        assert equal(found, wanted)
        count += 1
    assert count == 3
    # There was something to correct.
    for found, wanted in pipelined(module, "off", make_optimizer, forward=in_hooks):
        assert not equal(found, wanted)


def in_hooks(module, x):
    """Go forward without the check for changes in place, as a pipeline without correction."""
    with saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
        return call(module, x)


@modes
@pytest.mark.parametrize("name", ["linear", "norms", "attention", "convolution", "GPT-2"])
def test_frozen_parameters_are_left_alone(name, mode):
    module = made(MODULES[name])
    for p in list(module.parameters())[1::2]:
        p.requires_grad_(False)
    frozen = [p.detach().clone() for p in module.parameters() if not p.requires_grad]
    for found, wanted in pipelined(module, mode):
        assert equal(found, wanted)
    assert equal([p for p in module.parameters() if not p.requires_grad], frozen)


def flatten(module, offset, dtype=torch.float32):
    """Move the parameters side by side into one buffer, a little apart from its beginning."""
    params = list(module.parameters())
    flat = torch.zeros(offset + sum(p.numel() for p in params), dtype=dtype)
    for p in params:
        view = flat[offset : offset + p.numel()].view(p.shape)
        view.copy_(p.data)
        p.data = view
        offset += p.numel()
    return flat


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 3])
@modes
@pytest.mark.parametrize("name", ["linear", "views", "GPT-2", "BERT"])
def test_parameters_in_one_flat_buffer(name, mode, offset, dtype):
    module = made(MODULES[name], dtype)
    flatten(module, offset, dtype)
    storages = {p.untyped_storage().data_ptr() for p in module.parameters()}
    assert len(storages) == 1
    for found, wanted in pipelined(module, mode):
        for got, expected in zip(found, wanted, strict=True):
            # Matrix products may depend on the alignment of the memory.
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert {p.untyped_storage().data_ptr() for p in module.parameters()} == storages


@modes
@pytest.mark.parametrize("name", ["linear", "views", "GPT-2"])
def test_parameters_that_move_between_steps(name, mode):
    module = made(MODULES[name])
    buffers = []

    def make_moving(params):
        optimizer = sgd(params)
        optimizer.register_step_post_hook(
            lambda *_: buffers.append(flatten(module, 16 * (len(buffers) + 1)))
        )
        return optimizer

    for found, wanted in pipelined(module, mode, make_moving):
        assert equal(found, wanted)
    assert len(buffers) == AGE + 2
    assert next(module.parameters()).untyped_storage().data_ptr() == buffers[-1].data_ptr()


def test_another_memory_format_is_refused():
    module = nn.Conv2d(3, 2, 3)
    correction = make_correction("exact", module.parameters(), 1)
    module.to(memory_format=torch.channels_last)
    correction.before_step()
    correction.after_step()
    with refuses(ModelError, "parameters", (2, 3, 3, 3)):
        correction.correct(1)
    correction.before_step()  # Nothing was put in place.


# --- recomputation, other hooks, autocast ---------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True])
@modes
@pytest.mark.parametrize("name", ["linear", "views", "GPT-2", "BERT"])
def test_recomputation_takes_the_corrected_weights(name, mode, use_reentrant):
    def forward(module, x):
        return checkpoint(call, module, x, use_reentrant=use_reentrant)

    def twin(old, x, estimate):
        # Both the recomputed activations and the backward pass are the corrected weights'.
        for p, written in zip(old.parameters(), estimate or [], strict=estimate is not None):
            p.data.copy_(written)
        return twin_gradients(old, x)

    for found, wanted in pipelined(made(MODULES[name]), mode, forward=forward, twin=twin):
        assert equal(found, wanted)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, "exact") for name in ("linear", "norms", "views", "GPT-2", "BERT")),
        # Matrix products keep cast copies of the old weights: the estimate has no effect on them.
        ("linear", "ema"),
    ],
)
def test_autocast_gives_the_old_models_gradients(name, mode):
    def in_autocast(module, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return call(module, x)

    def twin(old, x, _):
        x = x.detach().clone().requires_grad_()
        return gradients(old, x, in_autocast(old, x))

    for found, wanted in pipelined(made(MODULES[name]), mode, forward=in_autocast, twin=twin):
        assert equal(found, wanted)


# --- fresh micro-batches, memory ------------------------------------------------------------------


@modes
@kinds
def test_a_graph_holds_no_version_of_the_weights(kind, mode):
    module = made(kind)
    correction = make_correction(mode, module.parameters(), AGE)
    watched = []
    with correction.forward(1):
        out = call(module, drawn(0))
    for number in range(AGE):
        watched += [StorageWeakRef(p.untyped_storage()) for p in module.parameters()]
        step(correction, module, sgd(module.parameters()), number)
        for p in module.parameters():
            p.data = p.data.clone()
    assert out.grad_fn is not None
    assert all(storage.expired() for storage in watched)


@modes
@pytest.mark.parametrize("name", ["linear", "GPT-2", "attention"])
def test_a_graph_that_never_goes_backward_is_freed(name, mode):
    module = made(MODULES[name])
    correction = make_correction(mode, module.parameters(), AGE)
    outputs = []

    def watch(_, __, out):
        outputs.append(
            StorageWeakRef((out[0] if isinstance(out, tuple) else out).untyped_storage())
        )

    for layer in module.modules():
        layer.register_forward_hook(watch)
    with correction.forward(1):
        out = call(module, drawn(0)).softmax(-1).tanh()
    outputs.append(StorageWeakRef(out.untyped_storage()))
    del out
    gc.collect()
    assert all(storage.expired() for storage in outputs)
