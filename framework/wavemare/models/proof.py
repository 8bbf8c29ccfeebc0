# SPDX-License-Identifier: Apache-2.0
"""The proof of a conversion: on a small batch the chain computes what the model computes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import LOSS_MAPPING

from wavemare.engine.checkpoint.random_state import random_state, restore_random_state
from wavemare.errors import ModelError
from wavemare.models.activations import Activations, split_batch
from wavemare.models.families import ClassificationLoss, Loss, whole_logits
from wavemare.models.layers import PipelineLayer

_LIBRARIES = (
    "accelerate",
    "deepspeed",
    "liger_kernel",
    "peft",
    "torch",
    "transformers",
    "trl",
    "wavemare",
)
"""Whose forward passes compute what transformers' class does."""

_TEXTS, _TOKENS, _PADDING, _WINDOW = 2, 8, 3, 4
_ROUNDING = 1e-6
# The size of what modules return, None for that which the weights give; tokens; modes.
_RUNS = ((None, _TOKENS, (False,)), (1.0, 13, (False, True)), (30.0, 5, (False,)))


def run_chain(chain: Sequence[PipelineLayer], inputs: Any) -> Activations:
    """Apply all layers to the tensors that enter the first layer."""
    for layer in chain:
        inputs = layer(inputs)
    return inputs


def prove(model: Any, chain: Sequence[PipelineLayer], inputs: Sequence[str], loss: Loss) -> None:
    """Compare a chain's logits and loss with the model's, without and with dropout.

    Weights that are small, or zero as those of new heads may be, hide no difference: results are
    also compared with all that the model's modules return scaled to a root mean square of 1 and of
    30, and with other lengths and padding.

    Neither the random state nor the model is changed. For the time of the proof a sliding window is
    narrowed, so that a few tokens show whether it is respected.

    Args:
        model: The model, on one real device.
        chain: Its layers, from ``input_ids`` to logits.
        inputs: The declared names.
        loss: The loss of logits and labels.

    Raises:
        ModelError: They differ by more than rounding, or the layers cannot be called as they are.
    """
    with undisturbed(model):
        for size, tokens, modes in _RUNS:
            batch = example_batch(model, inputs, tokens=tokens)
            if size == 1 and "attention_mask" in batch:
                batch["attention_mask"] = batch["attention_mask"].flip(-1)
            with _scaled(model, chain, size) if size else nullcontext():
                for training in modes:
                    model.train(training)
                    _compare(model, chain, inputs, loss, batch)


def _compare(
    model: Any, chain: Sequence[PipelineLayer], inputs: Sequence[str], loss: Loss, batch: Any
) -> None:
    labels = example_labels(loss, batch["input_ids"])
    activations, _ = split_batch(batch, inputs, labels_required=False)
    takes = inspect.signature(model.forward).parameters
    options = {"use_cache": False} if "use_cache" in takes else {}
    random = random_state()

    def original() -> tuple[Tensor, Tensor]:
        restore_random_state(random)
        output = model(**batch, labels=labels, **options)
        return output.logits, output.loss

    expected = original()
    restore_random_state(random)
    ours = _results_of_chain(model, chain, activations, loss, labels)
    _check_shapes(model, ours, expected)
    difference = _difference(ours, expected)
    if not difference <= _ROUNDING:
        # The operations are the same, so the results are equal to the bit unless kernels
        # are not deterministic; then the model differs from itself by as much.
        noise = _difference(original(), expected)
        if not difference <= _ROUNDING + 2 * noise:
            mode = "training" if model.training else "evaluation"
            raise _refusal(
                model,
                f"in {mode} mode the layers' results differ from the model's by "
                f"{difference:.1e} of the largest",
            )


def has_own_forward(module: Any) -> bool:
    """Whether ``forward`` of a module, or what wraps it, is of the caller and of no library."""
    forward = vars(module).get("forward", type(module).forward)
    while forward is not None:
        defined = getattr(forward, "__globals__", {})
        if defined.get("__name__", "").partition(".")[0] not in _LIBRARIES:
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def has_own_loss(model: Any) -> bool:
    """Whether a model may compute another loss than transformers' class of it does."""
    return has_own_forward(model) or model.loss_function not in LOSS_MAPPING.values()


def example_batch(
    model: Any, inputs: Sequence[str], texts: int = _TEXTS, tokens: int = _TOKENS
) -> dict[str, Tensor]:
    """Return a small batch: the last text is padded, or packed where only positions tell it.

    Args:
        model: The model whose vocabulary and device are used.
        inputs: The declared names.
        texts: Number of rows.
        tokens: Length of a row, at most what the model takes.
    """
    tokens = min(tokens, getattr(model.config, "max_position_embeddings", None) or tokens)
    device = next(model.parameters()).device
    count = torch.arange(texts * tokens, device=device).view(texts, tokens)
    batch = {"input_ids": (count * 7 + 3) % model.config.vocab_size}
    if "attention_mask" in inputs:
        batch["attention_mask"] = torch.ones_like(count)
        batch["attention_mask"][-1, -min(_PADDING, tokens - 1) :] = 0
    if "token_type_ids" in inputs:
        batch["token_type_ids"] = count % model.config.type_vocab_size
    if "position_ids" in inputs:
        positions = torch.arange(tokens, device=device).repeat(texts, 1)
        positions[-1] %= tokens // 2 + 1
        batch["position_ids"] = positions
    return batch


def example_labels(loss: Loss, ids: Tensor) -> Tensor:
    """Return labels that a loss takes, for token ids of shape (batch, sequence)."""
    if not isinstance(loss, ClassificationLoss):
        labels = ids.clone()
        labels[:, ::3] = -100
        return labels
    of_kind = loss.problem_type
    if of_kind is None:
        of_kind = "regression" if loss.num_labels == 1 else "single_label_classification"
    if of_kind == "single_label_classification":
        return torch.arange(len(ids), device=ids.device) % loss.num_labels
    shape = (len(ids), loss.num_labels)
    return torch.linspace(0, 1, len(ids) * loss.num_labels, device=ids.device).view(shape)


@contextmanager
def _scaled(model: Any, chain: Sequence[PipelineLayer], size: float) -> Iterator[None]:
    """Scale what all modules return to a size, by the factors that the model, run first, needs."""
    keys = {module: module for layer in chain for module in layer.modules() if module != layer}
    head = model.get_output_embeddings()
    if head is not None and head not in keys:  # the last layer does what the model's head does
        for module in chain[-1].modules():
            keys.pop(module, None)
        keys |= {head: head, chain[-1]: head}
    factors: dict[nn.Module, float] = {}

    def scale(module: nn.Module, _: Any, output: Any) -> Any:
        first, *rest = output if isinstance(output, tuple) else (output,)
        if not isinstance(first, Tensor) or not first.is_floating_point():
            return output
        now = float(first.float().square().mean().sqrt())
        factor = factors.setdefault(keys[module], size / now if now else 0.0)
        if not factor:  # behind zeros nothing would show
            first, factor = torch.linspace(-1, 1, first.numel()).to(first).view_as(first), size
        return (first * factor, *rest) if isinstance(output, tuple) else first * factor

    handles = [module.register_forward_hook(scale) for module in keys]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _plain_attention(config: Any) -> Iterator[None]:
    """Attend by torch alone inside: FlashAttention's kernels take neither fp32 nor a CPU."""
    chosen = config._attn_implementation
    try:
        if chosen != "sdpa":
            config._attn_implementation = "eager"
        yield
    finally:
        config._attn_implementation = chosen


@contextmanager
def keeping_state(model: nn.Module) -> Iterator[None]:
    """Leave what passes change as it was: buffers, modes, counters of modules, the random state."""
    modules = list(model.modules())
    numbers = [{n: v for n, v in vars(m).items() if isinstance(v, int | float)} for m in modules]
    buffers = [
        (module, name, own, own.clone())
        for module in modules
        for name, own in module.named_buffers(recurse=False)
    ]
    random = random_state()
    try:
        yield
    finally:
        restore_random_state(random)
        for module, kept in zip(modules, numbers, strict=True):
            vars(module).update(kept)
        with torch.no_grad():
            for module, name, own, before in buffers:
                if not own.is_meta and not torch.equal(own, before):
                    own.copy_(before)
                setattr(module, name, own)


@contextmanager
def undisturbed(model: Any) -> Iterator[None]:
    """Leave a model's state and configuration as they were; inside, windows are narrow."""
    config = model.config
    # A classification head writes its problem type into the configuration on its first loss.
    kept = {
        name: getattr(config, name)
        for name in ("problem_type", "sliding_window")
        if hasattr(config, name)
    }
    try:
        if kept.get("sliding_window") is not None:
            config.sliding_window = min(_WINDOW, kept["sliding_window"])
        with keeping_state(model), torch.no_grad(), _plain_attention(config):
            yield
    finally:
        for name, value in kept.items():
            setattr(config, name, value)


def _results_of_chain(
    model: Any, chain: Sequence[PipelineLayer], activations: Activations, loss: Loss, labels: Tensor
) -> tuple[Tensor, Tensor]:
    try:
        outputs: Any = run_chain(chain, activations)
        return whole_logits(loss, outputs), loss(outputs, labels)
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as error:
        message = str(error).partition("\n")[0]
        raise _refusal(model, f"its layers cannot be called one by one ({message})") from error


def _check_shapes(model: Any, ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    for mine, its in zip(ours, theirs, strict=True):
        if mine.shape != its.shape:
            shapes = f"{tuple(mine.shape)} instead of {tuple(its.shape)}"
            raise _refusal(model, f"the layers' results have the shape {shapes}")


def _difference(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> float:
    """Return the largest difference of logits or loss, relative to the largest value."""

    def relative(mine: Tensor, its: Tensor) -> float:
        largest = its.double().abs().max().clamp_min(torch.finfo(torch.float64).tiny)
        return float((mine.double() - its.double()).abs().max() / largest)

    (logits, loss), (its_logits, its_loss) = ours, theirs
    # Some heads compute a 16-bit loss in 16 bits, ours does so in 32.
    rounding = torch.finfo(its_loss.dtype).eps
    return max(relative(logits, its_logits), relative(loss, its_loss) - rounding)


def _refusal(model: Any, reason: str) -> ModelError:
    return ModelError(
        "model",
        type(model).__name__,
        f"{reason}, so it does more than its layers show",
        "Train it with one stage, or write a PipelineModule for it (docs/own-model.md)",
    )
