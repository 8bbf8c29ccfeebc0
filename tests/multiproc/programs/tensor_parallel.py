# SPDX-License-Identifier: Apache-2.0
"""Models split by tensors over all ranks beside the whole ones.

The second argument is a JSON object of models by case; every rank leaves what it saw as JSON.
"""

import copy
import functools
import hashlib
import json
import sys
import types
from typing import Any

import peft
import torch
from common import DEVICE, leave
from tensor_models import batch, build, distance, gradients, own_part
from torch import distributed as dist
from torch.utils._pytree import tree_leaves
from transformers.modeling_outputs import CausalLMOutput

from wavemare.engine import init_distributed
from wavemare.errors import ModelError
from wavemare.models import whole_state_dict
from wavemare.parallel.tensor.hooks import hooks_of_parts
from wavemare.parallel.tensor.layers import (
    VocabularyShare,
    copy_to_group,
    reduce_from_group,
    vocab_parallel_cross_entropy,
)
from wavemare.parallel.tensor.load import load_split
from wavemare.parallel.tensor.partition import is_copied, partition_of
from wavemare.parallel.tensor.split import split_model


def equal(names):
    return {name: equality(name) for name in names}


def eager(names):
    return {name: equality(name, "eager") for name in names}


def half(names):
    return {name: equality(name, dtype=torch.bfloat16) for name in names}


def fused(names):
    return {name: equality(name, change=read_head) for name in names}


def read_head(model):
    """Let a model compute its loss from its head's weight, as TRL's trainers do."""
    original = model.forward

    @functools.wraps(type(model).forward)
    def forward(self, *args, fused_lm_head=False, labels=None, **kwargs):
        if not fused_lm_head:
            return original(*args, **kwargs, labels=labels)
        hidden = self.base_model(*args, **kwargs).last_hidden_state
        head = self.get_output_embeddings()
        logits = torch.nn.functional.linear(hidden, head.weight, head.bias)
        return CausalLMOutput(loss=self.loss_function(logits, labels, logits.shape[-1]))

    model.forward = types.MethodType(forward, model)


def own_losses(names):
    return {name: equality(name, change=penalize) for name in names}


def thawed(names):
    """Freeze models before they are split, and train them afterwards."""
    return {
        name: equality(name, change=lambda model: model.requires_grad_(False)) for name in names
    }


def penalize(model):
    """Let a model add to its loss what depends on the logits of all tokens."""
    original = model.forward

    def forward(self, *args, labels=None, **kwargs):
        output = original(*args, labels=labels, **kwargs)
        if labels is not None:
            output.loss = output.loss + output.logits.float().logsumexp(-1).square().mean()
        return output

    model.forward = types.MethodType(forward, model)


def attended(names):
    return {name: equality(name, change=attend) for name in names}


def attend(model):
    """Let a model add to its loss what depends on the attention of each of its heads."""
    model.set_attn_implementation("eager")
    original = model.forward

    def forward(self, *args, labels=None, **kwargs):
        output = original(*args, labels=labels, output_attentions=True, **kwargs)
        if labels is not None:
            heads = torch.arange(1.0, model.config.num_attention_heads + 1, device=DEVICE)
            heads = heads[:, None, None]
            terms = [(each.square() * heads).sum(-1).mean() for each in output.attentions]
            output.loss = output.loss + sum(terms)
        return output

    model.forward = types.MethodType(forward, model)


def equality(name, attention=None, dtype=torch.float32, change=None):
    """Of a split model and the whole one, which may attend by another implementation."""
    group = dist.group.WORLD
    whole = build(name).to(DEVICE, dtype)
    extra = {}
    if change is not None:
        change(whole)
        extra = {"fused_lm_head": True} if change is read_head else {}
    other = copy.deepcopy(whole) if change is None else build(name).to(DEVICE, dtype)
    if change is not None:
        change(other)
    model = split_model(other, group)
    if attention is not None:
        whole.set_attn_implementation(attention)
    merged = whole_state_dict(model)
    for each in (whole, model):
        each.requires_grad_(True)
    for seed in (13, 14):  # two micro-batches: what has accumulated must not be summed again
        given = batch(whole, seed)
        output = whole(**given, **extra)
        output.loss.backward()
        loss = model(**given, **extra).loss
        loss.backward()
    expected_loss = output.loss.item()
    output = output if scores(output) is not None else whole(**given)
    expected = own_part(gradients(whole), model, dist.get_rank(), dist.get_world_size())
    own = gradients(model)
    targets = ("labels", "start_positions", "end_positions")
    without_labels = {key: value for key, value in given.items() if key not in targets}
    return {
        "loss": loss.item(),
        "loss_difference": abs(loss.item() - expected_loss),
        "gradient_difference": distance(own, expected),
        "gradient_size": max(float(value.abs().max()) for value in own.values() if value.numel()),
        "logits_difference": float((scores(model(**without_labels)) - scores(output)).abs().max()),
        "merged": None if merged is None else same_bytes(merged, whole.state_dict()),
        "replicated": digest_of_gradients(model, is_replicated),
        "copied": digest_of_gradients(model, is_copied),
        "elements": sum(value.numel() for value in model.parameters()),
        "whole_elements": sum(value.numel() for value in whole.parameters()),
    }


def scores(output):
    """Return the logits, those of the first and of the last token of an answer for questions."""
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits])
    return output.logits


def ignored(names):
    """Return the losses of the split and of the whole model without the labels that are 7."""
    result = {}
    for name in names:
        whole = build(name).to(DEVICE)
        model = split_model(copy.deepcopy(whole), dist.group.WORLD)
        given = batch(whole)
        given["labels"] = given["labels"].masked_fill(given["labels"] < 40, 7)
        losses = [each(**given, ignore_index=7).loss.item() for each in (model, whole)]
        result[name] = [*losses, whole(**given).loss.item()]
    return result


def same_bytes(these, those):
    return list(these) == list(those) and all(
        these[name].float().numpy().tobytes() == value.float().cpu().numpy().tobytes()
        for name, value in those.items()
    )


def digest_of_gradients(model, chosen):
    """Of weights that several ranks hold: they must be the same to the bit."""
    digest = None
    for value in model.parameters():
        if chosen(value) and value.grad is not None:
            digest = digest or hashlib.sha256()
            digest.update(value.grad.float().cpu().numpy().tobytes())
    return digest and digest.hexdigest()


def is_replicated(value):
    return partition_of(value) is None


def functions(names):
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    result: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        value = torch.tensor([1.0, rank + 1.0], dtype=dtype, requires_grad=True)
        weight = torch.tensor([rank + 1.0, 2.0], dtype=dtype)
        copied_value = copy_to_group(value, group)
        (copied_value * weight).sum().backward()
        other = torch.tensor([1.0, rank + 1.0], dtype=dtype, requires_grad=True)
        total = reduce_from_group(other, group)
        (total * 3).sum().backward()
        assert total.dtype == value.grad.dtype == dtype
        result[str(dtype)] = {
            "copied": copied_value.tolist(),
            "copied_gradient": value.grad.tolist(),
            "total": total.tolist(),
            "total_gradient": other.grad.tolist(),
        }
    for tokens in (64, 50, 12):
        share = VocabularyShare(tokens, rank, ranks)
        result[str(tokens)] = [cross_entropy(share, scale) for scale in (1.0, 200.0)]
    result["refused"] = refused()
    result["penalty"] = penalty(group)
    return result


def penalty(group):
    """Difference from one process of the gradients of a loss with a gradient in it."""
    torch.manual_seed(4)
    whole = {name: torch.randn(shape) for name, shape in (("up", (4, 6)), ("down", (6, 4)))}
    value, rank, ranks = torch.randn(3, 4), dist.get_rank(), dist.get_world_size()

    def gradients(up, down, ranks_of_it):
        given = value.clone().requires_grad_()
        weights = [up.clone().requires_grad_(), down.clone().requires_grad_()]
        wide = copy_to_group(given, group) if ranks_of_it else given
        narrow = torch.tanh(wide @ weights[0]) @ weights[1]
        loss = (reduce_from_group(narrow, group) if ranks_of_it else narrow).square().sum()
        (slope,) = torch.autograd.grad(loss, given, create_graph=True)
        (loss + slope.square().sum()).backward()
        return [given.grad, *(weight.grad for weight in weights)]

    expected = gradients(whole["up"], whole["down"], ranks_of_it=False)
    expected[1], expected[2] = expected[1].chunk(ranks, 1)[rank], expected[2].chunk(ranks)[rank]
    up, down = whole["up"].chunk(ranks, 1)[rank], whole["down"].chunk(ranks)[rank]
    got = gradients(up, down, ranks_of_it=True)
    return max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, expected, strict=True)
    )


def refused():
    """What is said of ranks with other weights, of a plan that leaves out norms of heads, and of
    a model that only the first rank can split.
    """
    unlike = build("gpt2")
    with torch.no_grad():
        unlike.transformer.h[1].ln_1.weight[0] += dist.get_rank()
    incomplete = build("qwen3")
    plan = incomplete.config.base_model_tp_plan
    named = {name: style for name, style in plan.items() if "q_norm" not in name}
    incomplete.config.base_model_tp_plan = named
    said = []
    lonely = build("gpt2").to("meta" if dist.get_rank() == 0 else "cpu")
    for model in (unlike, incomplete, lonely):
        kinds = [type(module) for module in model.modules()]
        try:
            split_model(model, dist.group.WORLD)
        except ModelError as error:
            said.append(str(error))
        assert [type(module) for module in model.modules()] == kinds
    return said


def cross_entropy(share, scale):
    """Differences from torch's function in fp64 of loss (relative) and gradient; in bf16, too."""
    torch.manual_seed(3)
    whole = (torch.randn(2, 5, share.tokens) * scale).requires_grad_()
    labels = torch.randint(0, share.tokens, (2, 5))
    labels[0, 3], labels[1, 0], labels[1, 1] = -100, 0, share.tokens - 1
    twin = whole.detach().double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(twin.flatten(0, 1), labels.flatten())
    expected.backward()
    part = share.part(twin.grad.movedim(-1, 0)).movedim(0, -1)
    own = share.padded(share.part(whole.detach().movedim(-1, 0))).movedim(0, -1)
    differences = []
    for dtype in (torch.float32, torch.bfloat16):
        logits = own.to(dtype, copy=True).requires_grad_()
        loss = vocab_parallel_cross_entropy(logits, labels, share, dist.group.WORLD)
        loss.backward()
        assert loss.dtype == torch.float32
        assert not logits.grad[..., share.held :].any()
        differences.append(abs(loss.item() - expected.item()) / max(1.0, expected.item()))
        got = logits.grad[..., : share.held].double()
        differences.append(float((got - part).abs().max()) if share.held else 0.0)
    return differences


def dropout(names):
    return {name: drop(name) for name in names}


def drop(name):
    group = dist.group.WORLD
    whole = build(name, residual=0.1).train()
    given = batch(whole)
    torch.manual_seed(21)
    expected = whole(**given).loss.item()
    model = split_model(whole, group)
    torch.manual_seed(21)
    residual_alone = model(**given).loss.item()

    model = build(name, residual=0.1, attention=0.1)
    torch.manual_seed(100 + dist.get_rank())  # apart: splitting puts them into one state
    model = split_model(model, group).train()
    model.config.use_cache = False  # as with checkpoints
    seen = watch(model)
    first = train(model, given, seed=None)
    seen = {key: list(values) for key, values in seen.items()}
    again = train(model, given, seed=5)
    repeated = train(model, given, seed=5)
    model.gradient_checkpointing_enable()
    checkpointed = train(model, given, seed=5)
    model.gradient_checkpointing_disable()
    torch.manual_seed(5)
    fresh = model.eval()(**given).loss.item()
    return {
        "residual_alone": abs(residual_alone - expected),
        "residual_stream": seen["residual"],
        "attention": seen["attention"],
        "first_loss": first[0],
        "loss": again[0],
        "evaluated": fresh,
        "repeated": distance(repeated[1], again[1]),
        "checkpointed": distance(checkpointed[1], again[1]),
        "replicated": digest_of_gradients(model, is_replicated),
        "copied": digest_of_gradients(model, is_copied),
        "state": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
    }


def watch(model):
    """Digests of what each block gives out, and of what each split attention drops."""
    seen: dict[str, list[str]] = {"residual": [], "attention": []}

    def residual(module, inputs, output):
        seen["residual"].append(hashlib.sha256(output.detach().numpy().tobytes()).hexdigest())

    def attention(module, inputs):
        # Drawn after the region's own hook, so inside it; put back, so that nothing changes.
        state = torch.get_rng_state()
        seen["attention"].append(str(torch.rand(4).tolist()))
        torch.set_rng_state(state)

    base = model.base_model
    kinds = {"gpt2": ("h", "attn"), "bert": ("encoder.layer", "attention.self")}
    layers, attention_name = kinds.get(model.config.model_type, ("layers", "self_attn"))
    for block in base.get_submodule(layers):
        block.register_forward_hook(residual)
        inner = block.get_submodule(attention_name)
        inner.register_forward_pre_hook(attention)
    return seen


def train(model, given, seed):
    model.zero_grad()
    if seed is not None:
        torch.manual_seed(seed)
    loss = model(**given).loss
    loss.backward()
    return loss.item(), {name: value.clone() for name, value in gradients(model).items()}


def loaded(names):
    """Whether what each rank reads from files is what it gets of a whole model."""
    result = {}
    for name in names:
        # The proof is as exact in 16 bits, and changes none of them.
        half = build(name).bfloat16()
        before = {key: value.clone() for key, value in half.state_dict().items()}
        merged = whole_state_dict(split_model(half, dist.group.WORLD))
        assert merged is None or all(torch.equal(merged[key], before[key]) for key in before)
        whole = build(name)
        folder = f"{sys.argv[1]}/{name}"
        if dist.get_rank() == 0:
            whole.save_pretrained(folder, max_shard_size="50KB")
        dist.barrier()
        model = load_split(folder, dist.group.WORLD)
        expected = split_model(whole, dist.group.WORLD).state_dict(keep_vars=True)
        own = model.state_dict(keep_vars=True)
        given = batch(model)
        loss, same = model(**given).loss, whole(**given).loss
        loss.backward()
        same.backward()
        result[name] = {
            "weights": all(torch.equal(own[key], value) for key, value in expected.items()),
            "ties": [own[a] is own[b] for a in own for b in own]
            == [expected[a] is expected[b] for a in own for b in own],
            "loss": loss.item() == same.item(),
            "gradients": distance(gradients(model), gradients(whole)),
        }
    return result


def hooks(names):
    """Hooks that see other tensors in a split model than in the whole one, and those refused."""
    result = {}
    for name in names:
        whole = build(name.removeprefix("lora-")).to(DEVICE)
        if name.startswith("lora-"):
            chosen = {"target_modules": ["q_proj", "o_proj"], "init_lora_weights": False}
            whole = peft.get_peft_model(whole, peft.LoraConfig(r=4, **chosen))
        model = split_model(copy.deepcopy(whole), dist.group.WORLD)
        found, called = set(), set()
        for kind in HOOKS:
            own, expected = (seen_by_hooks(each, kind) for each in (model, whole))
            # Not called are dropout that a kernel does, and backward hooks before trained weights.
            called |= {f"{name}: {kind}" for name in own}
            found |= {f"{name}: {kind}" for name in own if unlike(own[name], expected[name])}
        names_of = {module: name for name, module in model.named_modules()}
        refused = {
            f"{names_of[module]}: {method.removeprefix('register_').removesuffix('_hook')}"
            for module, methods in hooks_of_parts(model).items()
            for method in methods
        }
        result[name] = {"unlike": sorted(found), "refused": sorted(refused & called)}
    return result


HOOKS = ("forward_pre", "forward", "full_backward", "full_backward_pre")


def seen_by_hooks(model, kind):
    """Return the tensors that hooks of all modules but the model itself see in one pass."""
    seen, handles = {}, []

    def note(name, module, *given):
        # Hooks of outputs get inputs, too.
        given = given[-1:] if kind == "forward" else given
        floats = [t for t in tree_leaves(given) if torch.is_tensor(t) and t.is_floating_point()]
        seen.setdefault(name, [tensor.detach().clone() for tensor in floats])

    options = {"with_kwargs": True} if kind == "forward_pre" else {}
    for name, module in model.named_modules():
        if name not in {"", "base_model.model"}:  # whose outputs gather their logits when read
            register = getattr(module, f"register_{kind}_hook")
            handles.append(register(functools.partial(note, name), **options))
    model(**batch(model)).loss.backward()
    for handle in handles:
        handle.remove()
    return seen


def unlike(these, those):
    if [tensor.shape for tensor in these] != [tensor.shape for tensor in those]:
        return True
    pairs = zip(these, those, strict=True)
    return any(float((a - b).abs().max()) > 1e-3 * float(b.abs().max()) + 1e-6 for a, b in pairs)


CASES = {
    "hooks": hooks,
    "loaded": loaded,
    "equal": equal,
    "functions": functions,
    "dropout": dropout,
}
CASES |= {"eager": eager, "half": half, "fused": fused, "ignored": ignored}
CASES |= {"own_losses": own_losses, "thawed": thawed, "hooks": hooks, "attended": attended}

if __name__ == "__main__":
    init_distributed()
    cases = json.loads(sys.argv[2])
    leave({case: CASES[case](names) for case, names in cases.items()})
