# SPDX-License-Identifier: Apache-2.0
"""``benchmarks local-steps-loss``: replicas with local steps as the rows of stacked weights.

One backward pass is that of all replicas. Exchanges are those of training, by the same functions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.nn import functional

from benchmarks.local_steps.loss_request import LossRequest, Variant, named
from benchmarks.local_steps.measure import Batch, batches
from wavemare.engine.local_steps.steps import outer_step
from wavemare.engine.local_steps.wire import decode_ranges, encode_mean, encode_ranges, ranges_of
from wavemare.observe import Screen
from wavemare.pipeline.optim.soap_muon import Muon

_RISE, _LAST = 0.05, 0.1
"""The share of the steps in which the rate rises, and of the rate that is left at the end."""
_CLIP = 1.0
_DECAY = 0.1
_BETAS = (0.9, 0.99)
_EVAL_BATCHES = 64


class StackedGpt:
    """GPTs of one shape, each with weights of its own.

    Args:
        request: Has the sizes.
        count: Of the models.
        seed: Of the weights, which all models have.
    """

    def __init__(self, request: LossRequest, count: int, seed: int) -> None:
        self._request, self.count = request, count
        width, generator = request.hidden, torch.Generator().manual_seed(seed)
        shapes: dict[str, tuple[int, ...]] = {"embed": (request.vocabulary, width)}
        shapes["place"] = (request.sequence, width)
        for layer in range(request.layers):
            for name, columns in (("qkv", 3 * width), ("out", width), ("up", 4 * width)):
                shapes[f"{layer}.{name}"] = (width, columns)
            shapes[f"{layer}.down"] = (4 * width, width)
            shapes |= {f"{layer}.norm1": (width,), f"{layer}.norm2": (width,)}
        shapes |= {"norm": (width,), "head": (width, request.vocabulary)}
        self.weights = {}
        for name, shape in shapes.items():
            scale = 0.02 if name in ("embed", "place") else shape[0] ** -0.5
            drawn = torch.randn(shape, generator=generator) * scale
            one = torch.ones(shape) if len(shape) == 1 else drawn
            stacked = one.expand(count, *shape).to(_device(), copy=True)
            self.weights[name] = stacked.contiguous().requires_grad_()
        self.numel = sum(math.prod(shape) for shape in shapes.values())

    def losses(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of each model on its own tokens, (count, batch, sequence)."""
        request, weights, width = self._request, self.weights, self._request.hidden
        count, batch, length = tokens.shape
        numbers = tokens.view(count, -1, 1).expand(-1, -1, width)
        hidden = weights["embed"].gather(1, numbers) + weights["place"].repeat(1, batch, 1)

        def norm(values: Tensor, name: str) -> Tensor:
            return functional.layer_norm(values, (width,)) * weights[name][:, None]

        for layer in range(request.layers):
            three = norm(hidden, f"{layer}.norm1") @ weights[f"{layer}.qkv"]
            heads = (count * batch, length, 3, request.heads, width // request.heads)
            query, key, value = three.view(heads).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            mixed = mixed.transpose(1, 2).reshape(count, -1, width)
            hidden = hidden + mixed @ weights[f"{layer}.out"]
            wide = functional.gelu(norm(hidden, f"{layer}.norm2") @ weights[f"{layer}.up"])
            hidden = hidden + wide @ weights[f"{layer}.down"]
        logits = (norm(hidden, "norm") @ weights["head"]).view(count, batch, length, -1)
        logits, targets = logits[:, :, :-1].flatten(0, 2), tokens[:, :, 1:].flatten()
        return functional.cross_entropy(logits, targets, reduction="none").view(count, -1).mean(1)

    def flat(self) -> Tensor:
        """Return all weights: (count, numel)."""
        return torch.cat([w.detach().view(self.count, -1) for w in self.weights.values()], 1)

    def write(self, flat: Tensor) -> None:
        """Set all weights, of each model or of all alike."""
        start = 0
        for weight in self.weights.values():
            size = weight[0].numel()
            part = flat[..., start : start + size]
            weight.detach().view(self.count, -1).copy_(part)
            start += size


class Inner:
    """The optimizer of all models, with clipping by the norm of each and one rate schedule."""

    def __init__(self, variant: Variant, model: StackedGpt, steps: int) -> None:
        self._variant, self._model, self._steps = variant, model, steps
        self._rise = max(1, round(_RISE * steps))
        weights = model.weights
        self._views: list[tuple[Tensor, Tensor, int]] = []
        options: dict[str, Any] = {"lr": variant.rate, "weight_decay": _DECAY, "betas": _BETAS}
        if variant.optimizer == "adamw":
            self._optimizer: Any = torch.optim.AdamW(list(weights.values()), **options)
            return
        hidden = [w for n, w in weights.items() if w.ndim > 2 and n[0].isdigit()]  # noqa: PLR2004
        self._views = [(w.detach()[n], w, n) for w in hidden for n in range(model.count)]
        chosen = {id(w) for w in hidden}
        rest = [w for w in weights.values() if id(w) not in chosen]
        groups = [
            {"params": [view for view, *_ in self._views], "use_muon": True},
            {"params": rest, "use_muon": False},
        ]
        self._optimizer = Muon(groups, adjust_lr_fn="match_rms_adamw", **options)

    def step(self, number: int, *, together: bool) -> None:
        """Step all models by their gradients, or by the mean of these."""
        weights = self._model.weights.values()
        grads = [weight.grad for weight in weights if weight.grad is not None]
        if together:
            for grad in grads:
                grad.copy_(grad.mean(0, keepdim=True).expand_as(grad).clone())
        squares = [grad.flatten(1).square().sum(1) for grad in grads]
        factors = (_CLIP / torch.stack(squares).sum(0).sqrt()).clamp_max(1.0)
        for grad in grads:
            grad.mul_(factors.view(-1, *[1] * (grad.ndim - 1)))
        for view, weight, place in self._views:
            assert weight.grad is not None
            view.grad = weight.grad[place]
        falling = (1 - _LAST) * (1 + math.cos(math.pi * number / self._steps)) / 2
        rate = self._variant.rate * min(1.0, number / self._rise) * (_LAST + falling)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        for weight in weights:
            weight.grad = None


class Outer:
    """The common weights, and what messages have left out."""

    def __init__(self, variant: Variant, model: StackedGpt) -> None:
        self._variant, self._model = variant, model
        self.common = model.flat()[0]
        self._momentum = torch.zeros_like(self.common) if variant.outer[1] else None
        self._residuals = torch.zeros_like(model.flat())
        self._owed = torch.zeros_like(self.common)

    def exchange(self) -> None:
        """Step the common weights, and give them to all replicas."""
        changes, code, count = self.common - self._model.flat(), self._variant.code, len(self)
        if code.is_exact:
            mean = _sum(changes).mul_(1.0 / count)
        else:
            pairs = zip(changes, self._residuals, strict=True)
            sent = [encode_ranges(code, change, residual, count) for change, residual in pairs]
            ranges = ranges_of(model_size := self._model.numel, count)
            means = [
                encode_mean(code, messages, self._owed[own])
                for messages, own in zip(zip(*sent, strict=True), ranges, strict=True)
            ]
            mean = decode_ranges(code, means, model_size)
        outer_step(self.common, self._momentum, mean, *self._variant.outer)
        self._model.write(self.common)

    def synchronize(self) -> None:
        """Give all replicas the mean of what they have, with all that was left out."""
        changes = self.common - self._model.flat() + self._residuals
        self.common.sub_(_sum(changes).mul_(1.0 / len(self))).sub_(self._owed)
        self._model.write(self.common)

    def __len__(self) -> int:
        return self._model.count


def _device() -> torch.device:
    return torch.device(get_accelerator().current_device_name())


def _sum(rows: Tensor) -> Tensor:
    total = torch.zeros_like(rows[0])
    for row in rows:
        total += row
    return total


def measure(request: LossRequest) -> dict[str, Any]:
    """Train all variants, one after the other; return the result."""
    torch.set_num_threads(1)
    screen, rows = Screen(rank=0), []
    variants = request.variants()
    for number, variant in enumerate(variants, 1):
        screen.note(f"{number} of {len(variants)}: {named(variant)}")
        rows.append({**named(variant), **train(request, variant)})
    for row in rows:
        alike = [r for r in rows if (r["optimizer"], r["seed"]) == (row["optimizer"], row["seed"])]
        best = min((r["loss"] for r in alike if not r["every"]), default=None)
        row["gap"] = best and row["loss"] / best - 1
    parameters = StackedGpt(request, 1, 0).numel
    return {"request": request.model_dump(), "parameters": parameters, "rows": rows}


def train(request: LossRequest, variant: Variant) -> dict[str, Any]:
    """Train one variant; return its loss after `synchronize`, and that of the common weights."""
    begun = time.perf_counter()
    model = StackedGpt(request, request.replicas if variant.every else 1, variant.seed)
    data = list(_of_all_replicas(request, variant.seed))
    inner, outer = Inner(variant, model, request.steps), Outer(variant, model)
    for step in range(1, request.steps + 1):
        tokens = torch.stack([next(own)["input_ids"] for own in data]).to(_device())
        model.losses(tokens.view(model.count, -1, request.sequence)).sum().backward()
        inner.step(step, together=step <= request.warmup)
        past = step - request.warmup
        if variant.every and past == 0:
            outer = Outer(variant, model)
        if variant.every and past > 0 and past % variant.every == 0:
            outer.exchange()
    found: dict[str, Any] = {"bytes_share": None, "common_loss": None}
    if variant.every:
        trained = model.flat()
        model.write(outer.common)
        found["common_loss"] = evaluate(request, model, variant.seed)
        model.write(trained)
        outer.synchronize()
        found["bytes_share"] = variant.code.share / variant.every
    found["loss"] = evaluate(request, model, variant.seed)
    return {**found, "seconds": time.perf_counter() - begun}


def _of_all_replicas(request: LossRequest, seed: int) -> Iterator[Iterator[Batch]]:
    for replica in range(request.replicas):
        yield batches(request, replica, seed=seed)


def evaluate(request: LossRequest, model: StackedGpt, seed: int) -> float:
    """Return the first model's loss on held-out text."""
    held_out = islice(batches(request, 0, seed=seed, held_out=True), _EVAL_BATCHES)
    kept = model.weights
    model.weights = {name: weight.detach()[:1] for name, weight in kept.items()}
    with torch.no_grad():
        losses = [model.losses(batch["input_ids"][None].to(_device())) for batch in held_out]
    model.weights = kept
    return float(torch.cat(losses).mean())
