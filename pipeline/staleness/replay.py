# SPDX-License-Identifier: Apache-2.0
"""An asynchronous pipeline replayed in one process, weight version by weight version.

`Replay` computes what a pipeline of many ranks must compute. It shares no arithmetic on weights
with the engine: old weights come from a history of copies, PipeMare's estimate from its formula.
Only the factors of learning rate and decay are shared.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from wavemare.errors import PlanError
from wavemare.pipeline.optim.soap_muon import SOAP
from wavemare.pipeline.plan.orders import ahead, steps_to_drain
from wavemare.pipeline.staleness.staleness import ema_decay, lr_factor, resolve_mode

Value = Any
"""What passes between stages: a tensor or a tuple of tensors."""

Weights = list[Tensor]


@dataclass(frozen=True)
class StepRecord:
    """Results of one optimizer step.

    Args:
        step: Counted from 0.
        losses: Of each micro-batch.
        staleness: For each stage and micro-batch, the age of its forward weights in versions.
    """

    step: int
    losses: tuple[float, ...]
    staleness: tuple[tuple[int, ...], ...]

    @property
    def loss(self) -> float:
        """Mean loss of the micro-batches."""
        return math.fsum(self.losses) / len(self.losses)


class Replay:
    """Trains a chain of stages exactly as an asynchronous pipeline of as many ranks does.

    Forward passes use the version of the weights that the stage has at that time in the pipeline.
    Backward passes use the newest weights or, with a correction, the former ones or their estimate.

    Random numbers (dropout) and buffers (running means) follow the order of the micro-batches, not
    the pipeline's.

    Args:
        stages: From a tensor or tuple of tensors to another; they share no parameters.
        loss_fn: Mean loss of a micro-batch, from the last stage's outputs and the labels.
        make_optimizer: Makes a stage's optimizer from its trainable parameters.
        micro_batches: Micro-batches per optimizer step.
        correction: One of `staleness.MODES`.
        error_feedback: Whether to correct each update by its difference to the previous one; see
            `UpdateFeedback`.
        decay_base: PipeMare's D for "ema"; the decay is that of `ema_decay` if omitted.
        anneal_steps: Steps after warm-up in which the learning rate is rescheduled (T1), or None.
        make_scheduler: Makes a stage's learning-rate scheduler, stepped after its optimizer.
        warmup_steps: Number of synchronous first steps (T3).
        drain_interval: Steps between later drains; 0 for none.
        slack: See `orders.ahead`.
        delays: For each stage the micro-batches it forwards ahead of its backward passes; those of
            the pipeline and ``slack`` if omitted. ``micro_batches`` everywhere is PipeDream-2BW,
            ``2 (P - 1 - s) + 1`` PipeMare's dataflow machine.
        clip: Bound of the gradient norm over all stages in this step, or None.
        together: Whether micro-batches that see the same weights of a stage pass it as one batch.
            It is faster for small micro-batches. Results are equal up to rounding, if samples do
            not depend on one another, as they do in batch normalization.

    Attributes:
        records: One for each step since the last load.

    Raises:
        PlanError: There is no such correction.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        loss_fn: Callable[[Value, Any], Tensor],
        make_optimizer: Callable[[list[Parameter]], Optimizer],
        micro_batches: int,
        *,
        correction: str = "off",
        decay_base: float | None = None,
        anneal_steps: int | None = None,
        make_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        warmup_steps: int = 0,
        drain_interval: int = 0,
        slack: int = 0,
        delays: Sequence[int] | None = None,
        clip: float | None = None,
        error_feedback: bool = False,
        together: bool = False,
    ) -> None:
        self._loss_fn = loss_fn
        self._micro_batches = micro_batches
        self._anneal_steps = anneal_steps
        self._warmup_steps = warmup_steps
        self._drain_interval = drain_interval
        self._clip = clip
        self._together = together
        self._drained = self._before = 0
        if delays is None:
            delays = [ahead(index, len(stages), slack) for index in range(len(stages))]
        self.records: list[StepRecord] = []
        self._stages = [
            _Stage(
                module,
                make_optimizer,
                make_scheduler,
                delay=delay,
                micro_batches=micro_batches,
                correction=correction,
                decay_base=decay_base,
                error_feedback=error_feedback,
            )
            for module, delay in zip(stages, delays, strict=True)
        ]

    @property
    def steps(self) -> int:
        """Optimizer steps done: the version of all stages' weights."""
        return self._before + len(self.records)

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next steps depend on, but for random states."""
        stages = [stage.state_dict() for stage in self._stages]
        return {"steps": self.steps, "drained": self._drained, "stages": stages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of the same stages; `records` then begins with the next step."""
        self._before, self._drained = state["steps"], state["drained"]
        self.records.clear()
        for stage, own in zip(self._stages, state["stages"], strict=True):
            stage.load_state_dict(own)

    def correction_bytes(self) -> list[int]:
        """Return what each stage of a real pipeline holds for its correction."""
        return [stage.correction_bytes() for stage in self._stages]

    def step(self, batches: Iterable[tuple[Value, Any]]) -> float:
        """Do one optimizer step on every stage.

        Args:
            batches: The step's micro-batches: (inputs, labels) of each.

        Returns:
            The mean loss of the micro-batches.

        Raises:
            PlanError: These are not as many micro-batches as a step has.
        """
        given = list(batches)
        if len(given) != self._micro_batches:
            reason = f"an optimizer step has {self._micro_batches}"
            raise PlanError("micro_batches", len(given), reason, "Give as many")
        step, first = self.steps, self.steps * self._micro_batches
        ages = [self._ages(stage, first) for stage in self._stages]
        if self._together:
            losses = self._pass_together(given, ages)
        else:
            losses = tuple(
                self._pass(inputs, labels, [age[index] for age in ages])
                for index, (inputs, labels) in enumerate(given)
            )
        if self._clip is not None:
            parameters = [p for stage in self._stages for p in stage.parameters]
            nn.utils.clip_grad_norm_(parameters, self._clip)
        for stage, age in zip(self._stages, ages, strict=True):
            stage.update(self._factor(stage, step), math.fsum(age) / len(age))
        if steps_to_drain(step, self._warmup_steps, self._drain_interval) == 1:
            self._drained = step + 1
        record = StepRecord(step, losses, tuple(ages))
        self.records.append(record)
        return record.loss

    def _ages(self, stage: _Stage, first: int) -> tuple[int, ...]:
        """Return the staleness of the next step's micro-batches at a stage."""
        micro_batches = range(first, first + self._micro_batches)
        seen = ((m - stage.delay) // self._micro_batches for m in micro_batches)
        return tuple(self.steps - max(self._drained, version) for version in seen)

    def _pass(self, inputs: Value, labels: Any, ages: list[int]) -> float:
        """Take one micro-batch through all stages and back; return its loss.

        No optimizer step falls between the two directions, as one would in a pipeline, and weights
        are put in place through `.data`. So autograd's version counters never find a saved weight
        changed, whatever the optimizer does to them; and as the contents change in place, the
        backward pass takes the weights that lie there when it runs.
        """
        received: list[Value] = []
        sent: list[Value] = []
        value = inputs
        for stage, age in zip(self._stages, ages, strict=True):
            stage.put_former(age)
            received.append(value)
            sent.append(stage.module(value))
            stage.put_newest(age)
            value = _detached(sent[-1])
        loss = self._loss_fn(sent[-1], labels)
        outputs: Value = loss / self._micro_batches
        grads: list[Tensor | None] = [torch.ones_like(loss)]
        for index in reversed(range(len(self._stages))):
            stage, age = self._stages[index], ages[index]
            stage.put_corrected(age)
            _backward(outputs, grads)
            stage.put_newest(age)
            if index:
                outputs = sent[index - 1]
                grads = [tensor.grad for tensor in _tensors(received[index])]
        return float(loss.detach())

    def _pass_together(
        self, given: Sequence[tuple[Value, Any]], ages: Sequence[Sequence[int]]
    ) -> tuple[float, ...]:
        """Take all micro-batches of a step through all stages and back; return their losses.

        Those that see the same weights of a stage go through it as one batch. Autograd adds up the
        gradients of a batch.
        """
        values = [inputs for inputs, _ in given]
        received: list[list[Value]] = []
        sent: list[list[Value]] = []
        for stage, seen in zip(self._stages, ages, strict=True):
            received.append(values)
            sent.append([])
            for age, members in groupby(range(len(given)), key=seen.__getitem__):
                stage.put_former(age)
                sent[-1] += _apply_to_all(stage.module, [values[index] for index in members])
                stage.put_newest(age)
            values = [_detached(value) for value in sent[-1]]
        losses = [
            self._loss_fn(output, labels)
            for output, (_, labels) in zip(sent[-1], given, strict=True)
        ]
        outputs: list[Value] = [loss / self._micro_batches for loss in losses]
        grads: list[list[Tensor | None]] = [[torch.ones_like(loss)] for loss in losses]
        for index in reversed(range(len(self._stages))):
            stage, seen = self._stages[index], ages[index]
            for age, members in groupby(range(len(given)), key=seen.__getitem__):
                own = list(members)
                stage.put_corrected(age)
                leaving = tuple(tensor for n in own for tensor in _tensors(outputs[n]))
                _backward(leaving, [grad for n in own for grad in grads[n]])
                stage.put_newest(age)
            if index:
                outputs = sent[index - 1]
                grads = [[tensor.grad for tensor in _tensors(n)] for n in received[index]]
        return tuple(float(loss.detach()) for loss in losses)

    def _factor(self, stage: _Stage, step: int) -> float:
        # A synchronous step has no delay: the annealing begins after them.
        step -= self._warmup_steps
        if self._anneal_steps is None or step < 0:
            return 1.0
        return lr_factor(step, stage.tau, self._anneal_steps)


class _Stage:
    """One stage with the history of its weights; its delay is in micro-batches."""

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: Callable[[list[Parameter]], Optimizer],
        make_scheduler: Callable[[Optimizer], LRScheduler] | None,
        *,
        delay: int,
        micro_batches: int,
        correction: str,
        decay_base: float | None,
        error_feedback: bool,
    ) -> None:
        self.module = module
        self.delay = delay
        self.tau = delay / micro_batches
        oldest = self._oldest = -(-delay // micro_batches)
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        # torch's optimizers refuse to be made without parameters.
        self._optimizer = make_optimizer(self.parameters) if self.parameters else None
        self._scheduler = (
            make_scheduler(self._optimizer) if make_scheduler and self._optimizer else None
        )
        self._mode = resolve_mode(correction, oldest)
        self._decay = ema_decay(oldest, decay_base) if self._mode == "ema" else 0.0
        # One more than passes meet, for the change that a prediction continues.
        self._history: deque[Weights] = deque([self._copy()], maxlen=oldest + 2)
        self._error_feedback = error_feedback
        self._update: Weights | None = None
        self._updates = 0
        self._deltas = [torch.zeros_like(w) for w in map(_wide, self._history[-1])]

    def state_dict(self) -> dict[str, Any]:
        """Return weights of all versions, optimizer, scheduler, and what corrections keep."""
        return {
            "module": self.module.state_dict(),
            "optimizer": self._optimizer.state_dict() if self._optimizer else None,
            "scheduler": self._scheduler.state_dict() if self._scheduler else None,
            "history": list(self._history),
            "deltas": self._deltas,
            "update": self._update,
            "updates": self._updates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of `state_dict`."""
        self.module.load_state_dict(state["module"])
        if self._optimizer is not None:
            self._optimizer.load_state_dict(state["optimizer"])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        self._history = deque(state["history"], maxlen=self._history.maxlen)
        self._deltas, self._update = state["deltas"], state["update"]
        self._updates = state["updates"]

    def correction_bytes(self) -> int:
        """Return what the correction of a real stage holds."""
        predicted = min(self._oldest, 2)
        copies = {"off": 0, "exact": self._oldest, "ema": 2, "predict": predicted}[self._mode]
        return copies * sum(p.nbytes for p in self.parameters)

    def former(self, age: int) -> Weights:
        """Return the weights of some versions ago."""
        return self._history[-1 - age]

    def put_former(self, age: int) -> None:
        """Put the weights for a forward pass, of some versions ago, in place of the newest."""
        if age and self._mode == "predict" and age + 1 < len(self._history):
            pairs = zip(self.former(age), self.former(age + 1), strict=True)
            self._put([seen + age * (seen - before) for seen, before in pairs])
        elif age:
            self._put(self.former(age))

    def put_corrected(self, age: int) -> None:
        """Put the weights for a backward pass in place of the newest."""
        if age and self._mode == "exact":
            self._put(self.former(age))
        elif age and self._mode == "ema":
            pairs = zip(self.former(0), self._deltas, strict=True)
            self._put([_wide(newest) - age * delta for newest, delta in pairs])

    def put_newest(self, age: int) -> None:
        """Put the newest weights back after a pass."""
        if age:
            self._put(self.former(0))

    def update(self, factor: float, staleness: float) -> None:
        """Do an optimizer step; ``staleness`` is the mean of its micro-batches."""
        if self._optimizer is not None:
            self._step(self._optimizer, factor)
        if self._scheduler is not None:
            self._scheduler.step()
        if self._error_feedback:
            self._correct_update(staleness)
        newest = self._copy()
        if self._mode == "ema":
            former = self.former(0)
            self._deltas = [
                self._decay * delta + (1 - self._decay) * (_wide(new) - _wide(old))
                for delta, new, old in zip(self._deltas, newest, former, strict=True)
            ]
        self._history.append(newest)

    def _correct_update(self, staleness: float) -> None:
        update = [p.detach() - w for p, w in zip(self.parameters, self.former(0), strict=True)]
        if self._update is not None:
            for p, new, old in zip(self.parameters, update, self._update, strict=True):
                p.data.add_(min(staleness, staleness**0.5) * (new - old))
        # SOAP's first gradient makes its bases and no step, of which the next were a change.
        looks = isinstance(self._optimizer, SOAP) and any(p.ndim > 1 for p in self.parameters)
        if self._updates or not looks:
            self._update = update
        self._updates += 1

    @staticmethod
    def _step(optimizer: Optimizer, factor: float) -> None:
        rates = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        optimizer.step()
        # A scheduler that derives the next rate from the present one must not see the factor.
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)

    def _copy(self) -> Weights:
        return [parameter.detach().clone() for parameter in self.parameters]

    def _put(self, weights: Weights) -> None:
        for parameter, weight in zip(self.parameters, weights, strict=True):
            parameter.data.copy_(weight)


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in fp32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _tensors(value: Value) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def _detached(value: Value) -> Value:
    """Return what the next rank receives: the same contents without their graph."""
    received = tuple(t.detach().requires_grad_(t.requires_grad) for t in _tensors(value))
    return received if isinstance(value, tuple) else received[0]


def _apply_to_all(module: nn.Module, values: Sequence[Value]) -> list[Value]:
    """Return what a module makes of values that pass it as one batch, apart again."""
    if len(values) == 1:
        return [module(values[0])]
    parts = [_tensors(value) for value in values]
    sizes = [len(tensors[0]) for tensors in parts]
    joined = tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))
    output = module(joined if isinstance(values[0], tuple) else joined[0])
    for tensor in (*joined, *_tensors(output)):
        if not tensor.ndim or len(tensor) != sum(sizes):
            reason = f"a stage passes on a tensor {tuple(tensor.shape)} whose rows are no samples"
            raise PlanError("together", True, reason, "Take micro-batches one by one")
    split = [tensor.split(sizes) for tensor in _tensors(output)]
    return list(zip(*split, strict=True)) if isinstance(output, tuple) else list(split[0])


def _backward(sent: Value, grads: Sequence[Tensor | None]) -> None:
    """Go backward from those outputs that a gradient has come for."""
    pairs = [(t, g) for t, g in zip(_tensors(sent), grads, strict=True) if g is not None]
    if pairs:
        outputs, gradients = zip(*pairs, strict=True)
        torch.autograd.backward(outputs, gradients)
