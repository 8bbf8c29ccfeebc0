# SPDX-License-Identifier: Apache-2.0
"""Split backward passes: the whole pass's bits, its hooks, and nothing left behind."""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from support.refusals import refuses
from wavemare.engine.pipe.split_backward import SplitBackward
from wavemare.errors import ModelError, PlanError
from wavemare.parallel.tensor.layers import ParallelLinear

VOCABULARY, LENGTH = 61, 16
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
DROPOUTS = ("embd_pdrop", "attn_pdrop", "resid_pdrop", "attention_dropout")
DROPOUTS += ("hidden_dropout_prob", "attention_probs_dropout_prob")
MODELS = {
    "gpt2": ("GPT2LMHeadModel", {}),
    "gpt2-untied": ("GPT2LMHeadModel", {"tie_word_embeddings": False}),
    "llama": ("LlamaForCausalLM", {"num_key_value_heads": 2}),
    "bert": ("BertForMaskedLM", {}),
    "albert": ("AlbertForMaskedLM", {"embedding_size": 16}),
}
# The tied heads of GPT-2, BERT and ALBERT are left whole; a layer of ALBERT runs twice.
DEFERRED = {"gpt2": 8, "gpt2-untied": 9, "llama": 15, "bert": 13, "albert": 8}
WHOLE, SPLIT = "F0 F1 B0 F2 B1 B2", "F0 F1 I0 F2 I1 W0 I2 W1 W2"


def build(name, dropout=0.0, dtype=torch.float32, **changes):
    transformers.set_seed(3)
    kind, own = MODELS[name]
    model = getattr(transformers, kind)
    settings = SIZES | dict.fromkeys(DROPOUTS, dropout) | own | changes
    return model(model.config_class(**settings)).to(dtype).train()


def batch(number):
    ids = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(number))
    return {"input_ids": ids, "labels": ids}


def run(model, order, splitter=None):
    """Run the passes of an order; return how often each weight's hook ran in I, B and W."""
    fired, losses = {kind: Counter() for kind in "FBIW"}, {}
    names = {weight: name for name, weight in model.named_parameters()}
    # As DeepSpeed's hooks: these run even where a node gets no gradient.
    nodes = {
        n: weight.expand_as(weight).grad_fn.next_functions[0][0] for weight, n in names.items()
    }
    hooks = [
        node.register_hook(lambda *_, name=name: fired[kind].update([name]))
        for name, node in nodes.items()
    ]
    transformers.set_seed(5)
    for kind, number in order.split():
        if kind == "F":
            losses[number] = model(**batch(int(number))).loss
        elif kind == "B":
            losses.pop(number).backward()
        elif kind == "I":
            with splitter.input_pass(number):
                losses.pop(number).backward()
        else:
            splitter.backward_weight(number)
    for hook in hooks:
        hook.remove()
    return fired


def grads(model):
    return {name: weight.grad for name, weight in model.named_parameters()}


def assert_same_bits(model, expected):
    assert grads(model).keys() == grads(expected).keys()
    for name, grad in grads(expected).items():
        assert torch.equal(grads(model)[name], grad), name


def check(name, dropout=0.0, dtype=torch.float32, checkpointing=None):
    split, whole = build(name, dropout, dtype), build(name, dropout, dtype)
    if checkpointing:
        for model in (split, whole):
            model.gradient_checkpointing_enable(checkpointing)
    run(whole, WHOLE)
    splitter = SplitBackward(split)
    with splitter.step():
        fired = run(split, SPLIT, splitter)
    assert_same_bits(split, whole)
    assert fired["I"] + fired["W"] == Counter({each: 3 for each in grads(split)})
    assert fired["W"] == Counter({each: 3 for each in fired["W"]})
    assert len(fired["W"]) == DEFERRED[name]


def test_weight_gradients_may_be_computed_inside_another_backward_pass():
    split, whole = build("llama"), build("llama")
    run(whole, "F0 B0")
    splitter = SplitBackward(split)
    with splitter.step():
        run(split, "F0 I0", splitter)
        with torch.no_grad():  # as autograd calls a function's backward pass
            splitter.backward_weight("0")
    assert_same_bits(split, whole)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_three_micro_batches_get_the_bits_and_hooks_of_whole_passes(name, dtype, dropout):
    check(name, dropout, dtype)


@pytest.mark.parametrize("direct", [False, True])
def test_the_hooks_of_a_weight_see_and_change_the_gradients_of_whole_passes(direct):
    def hooked(model):
        seen, kept = [], []
        for name, weight in model.named_parameters():
            weight.register_hook(lambda grad, name=name: seen.append((name, grad.clone())))
            weight.register_hook(lambda grad: grad * 0.5)
            weight.register_hook(lambda grad: kept.append((grad, grad.clone())))
            weight.register_post_accumulate_grad_hook(
                lambda weight, name=name: seen.append((name, weight.grad.clone()))
            )
            removing = []
            removing.append(weight.register_hook(lambda grad, r=removing: r[0].remove()))
        return seen, kept

    split, whole = (
        build("gpt2", tie_word_embeddings=False),
        build("gpt2", tie_word_embeddings=False),
    )
    (expected, _), (seen, kept) = hooked(whole), hooked(split)
    run(whole, WHOLE)
    splitter = SplitBackward(split, direct=direct)
    with splitter.step():
        run(split, SPLIT, splitter)
    assert_same_bits(split, whole)
    for name in grads(whole):  # hooks of unlike weights come in another order
        pairs = zip(of(seen, name), of(expected, name), strict=True)
        assert all(torch.equal(found, wanted) for found, wanted in pairs), name
    assert all(torch.equal(*pair) for pair in kept)  # W changes none that a hook has kept


def of(pairs, wanted):
    return [value for name, value in pairs if name == wanted]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"albert"}))
def test_checkpointed_layers_split_too(name, reentrant):
    check(name, 0.1, checkpointing={"use_reentrant": reentrant})


class Subclass(nn.Linear):
    pass


def linear(change=lambda layer: None):
    layer = nn.Linear(4, 4)
    change(layer)
    return layer


def own_forward(layer):
    layer.forward = lambda x: nn.functional.linear(x, layer.weight, layer.bias) * 2


class Calls(nn.Module):
    """A layer that is called in a way of its own."""

    def __init__(self, call):
        super().__init__()
        self.layer, self.call = nn.Linear(4, 4), call

    def forward(self, x):
        return self.call(self.layer, x)


class Part(ParallelLinear):
    """The layers of tensor parallelism without their collectives."""

    def __init__(self, *shape, adds_bias_last):
        parameters = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(3))
        super().__init__(*parameters, None, transposed=shape == (4, 3))
        self.adds_bias_last = adds_bias_last

    def forward(self, x):
        if self.adds_bias_last:
            return self.local_product(x, None) + self.bias
        return self.local_product(x, self.bias)


def autocast(layer, x):
    with torch.autocast("cpu", torch.bfloat16):
        return layer(x)


def tied():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first, second)


LEFT_WHOLE = {
    "norm": lambda: nn.LayerNorm(4),
    "subclass": lambda: Subclass(4, 4),
    "frozen": lambda: linear(lambda layer: layer.weight.requires_grad_(False)),
    "forward of its own": lambda: linear(own_forward),
    "tied": tied,
    "not contiguous": lambda: Calls(lambda layer, x: layer(x.expand(2, *x.shape).mT.mT[..., :4])),
    "by name": lambda: Calls(lambda layer, x: layer(input=x)),
    "constant input": lambda: Calls(lambda layer, x: layer(torch.ones_like(x)) + x),
    "one dimension": lambda: Calls(lambda layer, x: layer(x.flatten()[:4])),
}
SPLITS = {
    "linear": linear,
    "no bias": lambda: nn.Linear(4, 3, bias=False),
    "frozen bias": lambda: linear(lambda layer: layer.bias.requires_grad_(False)),
    "conv1d": lambda: Conv1D(3, 4),
    "columns": lambda: Part(3, 4, adds_bias_last=False),
    "columns, transposed": lambda: Part(4, 3, adds_bias_last=False),
    "rows": lambda: Part(3, 4, adds_bias_last=True),
    "rows, transposed": lambda: Part(4, 3, adds_bias_last=True),
    "autocast": lambda: Calls(autocast),
    "called three times": lambda: Calls(lambda layer, x: layer(layer(layer(x).relu_()))),
}


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (2, 1, 3, 4)])
@pytest.mark.parametrize("case", [*LEFT_WHOLE, *SPLITS])
def test_a_layer_splits_or_is_left_whole(case, shape):
    torch.manual_seed(0)
    chunk = (LEFT_WHOLE | SPLITS)[case]()
    x = torch.randn(shape, requires_grad=True)
    leaves = [x, *(weight for weight in chunk.parameters() if weight.requires_grad)]
    outputs = chunk(x)
    grad = torch.randn_like(outputs)
    expected = torch.autograd.grad(outputs, leaves, grad)
    splitter = SplitBackward(chunk)
    with splitter.step():
        outputs = chunk(x)
        with splitter.input_pass(0):
            outputs.backward(grad)
        deferred = [leaf for leaf in leaves if leaf.grad is None]
        splitter.backward_weight(0)
    assert len(deferred) == (case in SPLITS)
    for leaf, bits in zip(leaves, expected, strict=True):
        assert torch.equal(leaf.grad, bits)


def test_a_failed_step_leaves_nothing_to_the_next():
    split, whole = build("llama"), build("llama")
    splitter = SplitBackward(split)
    with refuses(PlanError, "micro_batch", "0"), splitter.step():
        run(split, "F0 F1 I0 I1 W0 W0", splitter)
    assert splitter.kept_bytes == {}
    split.zero_grad()
    with splitter.step():
        run(split, SPLIT, splitter)
    run(whole, WHOLE)
    assert_same_bits(split, whole)


def test_kept_bytes_are_those_of_inputs_and_gradients_of_the_linear_layers():
    model = build("gpt2")
    splitter = SplitBackward(model)
    with splitter.step():
        run(model, "F0 F1 I0 I1", splitter)
        # Widths of a block's inputs: 1 + 1 + 1 + 4; of gradients of outputs: 3 + 1 + 4 + 1.
        block = 16 * 2 * LENGTH * SIZES["hidden_size"] * 4
        assert splitter.kept_bytes == {"0": 2 * block, "1": 2 * block}
        run(model, "W0", splitter)
        assert splitter.kept_bytes == {"1": 2 * block}
        run(model, "W1", splitter)
        assert splitter.kept_bytes == {}


def test_wrong_orders_are_refused():
    model = build("gpt2")
    splitter = SplitBackward(model)
    with refuses(PlanError, "micro_batch", "0"), splitter.step():
        run(model, "F0 I0", splitter)
    with refuses(PlanError, "module", "transformer.h.1.mlp.c_proj"), splitter.step():
        run(model, "F0 B0", splitter)


@pytest.mark.parametrize("changed", ["input", "gradient"])
def test_a_change_in_place_between_the_parts_is_refused(changed):
    layer = nn.Linear(4, 4)
    x, grad = torch.randn(2, 4, requires_grad=True), torch.ones(2, 4)
    splitter = SplitBackward(layer)
    with splitter.step():
        with splitter.input_pass(0):
            layer(x).backward(grad)
        with torch.no_grad():
            (x if changed == "input" else grad).add_(1)
        with refuses(ModelError, "module", ""):
            splitter.backward_weight(0)


@pytest.mark.parametrize("how", ["in place", "wrapped", "all", "later"])
def test_a_compiled_layer_is_left_whole(how):
    torch.manual_seed(0)
    layer, other = nn.Linear(4, 4), nn.Linear(4, 4)
    model: nn.Module = nn.Sequential(layer, other)
    x, leaves = torch.randn(2, 4), list(model.parameters())
    expected = torch.autograd.grad(model(x.requires_grad_()).sum(), leaves)
    if how == "in place":
        layer.compile(backend="eager")
    elif how == "wrapped":
        model[0] = torch.compile(layer, backend="eager")
    elif how == "all":
        model.compile(backend="eager")
    splitter = SplitBackward(model)
    if how == "later":
        layer.compile(backend="eager")
    with splitter.step():
        with splitter.input_pass(0):
            model(x).sum().backward()
        assert layer.weight.grad is not None
        assert (other.weight.grad is None) == (how != "all")
        splitter.backward_weight(0)
    for leaf, bits in zip(leaves, expected, strict=True):
        assert torch.equal(leaf.grad, bits)


@pytest.mark.parametrize("direct", [False, True])
def test_layers_split_under_autocast_to_the_bits_of_whole_passes(direct):
    def passes(model, order, splitter=None):
        with torch.autocast("cpu", torch.bfloat16):
            losses = {number: model(**batch(number)).loss for number in range(2)}
        for kind, number in order:
            with splitter.input_pass(number) if kind == "I" else nullcontext():
                if kind != "W":
                    losses[number].backward()
            if kind == "W":
                splitter.backward_weight(number)

    split, whole = build("llama"), build("llama")
    passes(whole, [("B", 0), ("B", 1)])
    splitter = SplitBackward(split, direct=direct)
    with splitter.step():
        passes(split, [("I", 0), ("I", 1), ("W", 0), ("W", 1)], splitter)
    assert_same_bits(split, whole)
