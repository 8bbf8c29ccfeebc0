# SPDX-License-Identifier: Apache-2.0
"""Megatron's ``forward_step(data_iterator, model) -> (output, loss_func)`` on our engines.

A step function of a ``pretrain_gpt.py`` reads a batch, calls
``model(tokens, position_ids, attention_mask, labels=labels)``, which returns the loss of each
token, and leaves the rest to ``loss_func``. A data-parallel engine is called in just this way. In a
pipeline no rank has the whole model: the call is noted, its arguments become the engine's batch,
and ``loss_func`` is applied where the logits are, on the last stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from wavemare.engine.pipe.engine import PipelineEngine
from wavemare.errors import ConfigError, ModelError
from wavemare.lazy import Proxy
from wavemare.megatron.core import scale_auxiliary_losses
from wavemare.models import TransformerPipeline

ForwardStep = Callable[..., tuple[Any, Callable[[Tensor], Any]]]

_KEY = "forward_step"
_WITH_COUNT = 3  # loss_func's form with the number of tokens


@dataclass
class StepResult:
    """One optimizer step.

    Attributes:
        loss: Mean over the micro-batches; in a pipeline also over the data-parallel ranks.
        reports: What each micro-batch's ``loss_func`` had to report; in a pipeline on the last
            stage alone.
    """

    loss: Tensor
    reports: list[Any] = field(default_factory=list)


def megatron_train_step(engine: Any, forward_step: ForwardStep, data_iterator: Any) -> StepResult:
    """Do one optimizer step with Megatron's step function; all ranks call it.

    Args:
        engine: From `wavemare.initialize`: data-parallel, or a pipeline with the schedule 1f1b.
        forward_step: Its model is a transformers causal language model in Megatron's dress, or
            any other module as it is (data-parallel engines).
        data_iterator: Given to ``forward_step``; read once per micro-batch, in a pipeline on its
            first and its last stage.

    Raises:
        ConfigError: The engine is a pipeline of another kind, or ``forward_step`` uses the output.
        ModelError: A call's arguments cannot travel through the pipeline.
    """
    if isinstance(engine, deepspeed.PipelineEngine):
        return _pipeline_step(engine, forward_step, data_iterator)
    model = _Dressed(engine) if isinstance(engine.module, PreTrainedModel) else engine
    result = StepResult(torch.zeros((), device=engine.device))
    micro_steps = engine.gradient_accumulation_steps()
    scale_auxiliary_losses(engine, micro_steps)
    for left in reversed(range(micro_steps)):
        output, loss_func = forward_step(data_iterator, model)
        loss, report = _loss(loss_func(output))
        engine.backward(loss)
        engine.end_micro_batch(last=not left)
        result.loss += loss.detach() / micro_steps
        result.reports.append(report)
    return result


def _loss(returned: Any) -> tuple[Tensor, Any]:
    """Return the loss of a micro-batch and its report.

    ``loss_func`` returns the two, or a sum over tokens, their number and the report.
    """
    if len(returned) == _WITH_COUNT:
        total, count, report = returned
        return total / torch.as_tensor(count).clamp(min=1), report
    loss, report = returned
    return loss, report


def _per_token(logits: Any, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each token; Megatron's labels are shifted already."""
    logits = logits[0] if isinstance(logits, tuple) else logits  # beside the sums of routers
    flat = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
    return flat.view(labels.shape)


def _refuse_others(others: dict[str, Any]) -> None:
    """Refuse arguments of Megatron's GPT that a transformers model does not have."""
    for name, value in others.items():
        if value is not None and name != "loss_mask":  # which is for multi-token prediction
            reason = f"a model of transformers does not take {name!r} from Megatron's step"
            raise ModelError(_KEY, name, reason, "Leave it out of the call")


class _Dressed(Proxy):
    """A causal language model of transformers that is called as Megatron's GPT."""

    vp_stage: int | None = None  # step functions of recent versions read it

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        labels: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        _refuse_others(others)
        mask = None
        if attention_mask is not None and not _is_causal(attention_mask):
            batch, length = input_ids.shape
            forbidden = attention_mask.bool().expand(batch, 1, length, length)
            dtype = next(self._inner.parameters()).dtype  # added to the scores
            mask = torch.zeros_like(forbidden, dtype=dtype)
            mask.masked_fill_(forbidden, torch.finfo(dtype).min)
        logits = self._inner(
            input_ids=input_ids, position_ids=position_ids, attention_mask=mask, use_cache=False
        ).logits
        return logits if labels is None else _per_token(logits, labels)


def _is_causal(mask: Tensor) -> bool:
    """Whether a mask, true where attention is forbidden, forbids the later tokens and no more."""
    later = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    return bool((mask.bool() == later).all())


class _Noted:
    """The model that a pipeline's step function sees: it keeps what it is called with."""

    vp_stage: int | None = None

    def __init__(self) -> None:
        self.output = _Output()
        self.batch: dict[str, Tensor] = {}

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        labels: Tensor | None = None,
        **others: Any,
    ) -> _Output:
        _refuse_others(others)
        if attention_mask is not None and not _is_causal(attention_mask):
            reason = "a mask for each pair of tokens does not travel between stages"
            remedy = "Use position ids that restart, or train without --reset-attention-mask"
            raise ModelError("attention_mask", tuple(attention_mask.shape), reason, remedy)
        if labels is None:
            reason = "a pipeline has no output on this rank, only a loss on the last stage"
            raise ModelError("labels", None, reason, "Call the model with labels")
        self.batch = {"input_ids": input_ids, "labels": labels}
        usual = torch.arange(input_ids.shape[1], device=input_ids.device)
        if position_ids is not None and not bool((position_ids == usual).all()):
            self.batch["position_ids"] = position_ids
        return self.output


class _Output:
    """Stands for what the model returns, where there is nothing yet."""

    def __getattr__(self, name: str) -> Any:
        reason = (
            f"it uses the model's output ({name}), which in a pipeline is on the last stage alone"
        )
        raise ConfigError(_KEY, name, reason, "Do it in loss_func")


def _pipeline_step(engine: Any, forward_step: ForwardStep, data_iterator: Any) -> StepResult:
    module = engine.module
    schedule = engine.plan.schedule if isinstance(engine, PipelineEngine) else type(engine).__name__
    if schedule != "1f1b":
        # Its micro-batches outlive a call, or come to the loss in another order.
        reason = "it does not bring micro-batches to the loss in the order in which they are read"
        remedy = 'Use "schedule": "1f1b"'
        raise ConfigError("wavemare.pipeline.schedule", schedule, reason, remedy)
    if not isinstance(module, TransformerPipeline):
        reason = f"{type(module).__name__} does not say how a batch becomes its inputs"
        raise ModelError(_KEY, type(module).__name__, reason, "Give a transformers model")
    waiting: deque[Callable[[Tensor], Any]] = deque()
    result = StepResult(torch.zeros(()))
    batches: list[Any] = []
    # All are read before the first is sent: what is refused is refused on both stages that read.
    reads = engine.is_first_stage() or engine.is_last_stage()
    for _ in range(engine.gradient_accumulation_steps() if reads else 0):
        model = _Noted()
        output, loss_func = forward_step(data_iterator, model)
        if output is not model.output:
            reason = "it returns something else than the model's output"
            raise ConfigError(_KEY, type(output).__name__, reason, "Return it as it is")
        waiting.append(loss_func)
        batches.append(module.split_batch(model.batch))

    def loss_of(logits: Any, labels: Tensor) -> Tensor:
        loss, report = _loss(waiting.popleft()(_per_token(logits, labels)))
        result.reports.append(report)
        return loss

    # For the guard's second pass: Megatron's own functions may reduce over ranks.
    loss_of.alone = lambda logits, labels: _per_token(logits, labels).mean()  # type: ignore[attr-defined]
    with _loss_function(module, loss_of):
        result.loss = engine.train_batch(iter(batches)).detach()
    return result


@contextmanager
def _loss_function(module: Any, function: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
    own = module.loss_fn
    is_module = module._modules.pop("loss_fn", None) is not None
    module.loss_fn = function
    try:
        yield
    finally:
        if is_module:  # a module is no plain attribute
            del module.loss_fn
        module.loss_fn = own
