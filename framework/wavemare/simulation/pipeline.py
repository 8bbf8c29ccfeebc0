# SPDX-License-Identifier: Apache-2.0
"""Simulate an asynchronous pipeline of any length in one process, by its JSON configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, pairwise
from typing import Any, Literal, get_args

import torch
from deepspeed.runtime import lr_schedules
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from transformers import PreTrainedModel

from wavemare.engine.config.resolve import (
    WavemareConfig,
    check_batch_sizes,
    check_config,
    load_config,
)
from wavemare.engine.optim.optimizers import (
    check_parameters,
    clipping_limit,
    make_muon,
    refresh_by_stage,
    take_optimizer,
)
from wavemare.engine.optim.policy import advise
from wavemare.errors import ConfigError, did_you_mean
from wavemare.models.activations import split_batch
from wavemare.models.convert import cut_chain, give_own_weights, tied_weights
from wavemare.models.families import family_of
from wavemare.models.proof import prove
from wavemare.pipeline.config import PipelineConfig
from wavemare.pipeline.plan.orders import ahead
from wavemare.pipeline.plan.partition import PARTITION_KEY
from wavemare.pipeline.staleness.replay import Replay

Delays = Literal["pipeline", "one-step", "dataflow"]
"""How far the gradients of stages lag: as in the real pipeline; by one optimizer step everywhere,
as in PipeDream-2BW; or twice as far, as on PipeMare's dataflow machine."""


class SimulatedPipeline:
    """Trains with exactly the weight versions of an asynchronous pipeline, in one process.

    It takes the engine's configuration and batches: optimizer and policy, scheduler, clipping (by
    the exact norm of all stages), and the section ``wavemare.pipeline``, where ``1f1b`` flushes.
    Passes and updates are those of `wavemare.pipeline.staleness.replay.Replay`, the oracle of
    the engine's own tests. One replica, fp32, one process: a step takes the time of all stages.

    Args:
        model: A transformers model; its own weights are trained, but for a tied output head, which
            gets a copy as in the real pipeline.
        config: Path or mapping of the JSON configuration.
        delays: See `Delays`; or for each stage its own, in micro-batches.
        together: Whether micro-batches that see the same weights of a stage pass it as one batch:
            faster, and equal up to rounding.

    Attributes:
        stages: From carry to carry.
        optimizers: Of the stages that have parameters, in their order.
        micro_batches: Per optimizer step.
        micro_batch_size: In samples.
        advice: What the engine tells at its start, one message a line: how stale gradients are, if
            micro-batches do not bound that to one step, and what ``optimizer_policy`` chose and
            why, if it was asked. None if there is nothing to tell.

    Raises:
        ConfigError: A key or value that cannot work.
        ModelError: The model cannot be cut into stages.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: Any,
        *,
        delays: Delays | Sequence[int] = "pipeline",
        together: bool = False,
    ) -> None:
        values = load_config(config)
        pipeline = WavemareConfig.of(values).pipeline
        check_config(values, world_size=pipeline.stages)
        sizes = check_batch_sizes(values, data_world_size=1)
        self.micro_batches = sizes["gradient_accumulation_steps"]
        self.micro_batch_size = sizes["train_micro_batch_size_per_gpu"]
        values, advice = advise(values, stages=pipeline.stages, micro_batches=self.micro_batches)
        told = advice.lines
        if told and delays != "pipeline":
            told = (f"delays are {delays}; the next lines are about the real pipeline's:", *told)
        self.advice = "\n".join(told) or None
        pipeline = WavemareConfig.of(values).pipeline
        self.stages = self.cut(model, pipeline)
        self.optimizers: list[Optimizer] = []
        self._together = together
        self.replay = self._replay(values, pipeline, delays)

    def cut(self, model: PreTrainedModel, pipeline: PipelineConfig) -> list[nn.Module]:
        """Return the stages."""
        family = family_of(model)
        self.inputs = family.declared(pipeline.inputs)
        chain, self.loss_fn = tuple(family.chain(model, self.inputs)), family.loss(model)
        prove(model, chain, self.inputs, self.loss_fn)
        tied = tied_weights(model)
        if tied:
            chain, _ = give_own_weights(chain, tied)
        for parameter in chain[-1].parameters():
            head: Any = parameter
            head.use_muon = False  # an output head is no hidden matrix
        if pipeline.own_cuts is not None:
            reason = "a simulation has one replica, and these are the cuts of several"
            raise ConfigError(PARTITION_KEY, pipeline.own_cuts, reason, "Give one list")
        partition: Any = pipeline.partition
        cuts = cut_chain(model, chain, self.inputs, partition, range(pipeline.stages))
        return [nn.Sequential(*chain[first:end]) for first, end in pairwise(cuts)]

    def _replay(
        self, values: Mapping[str, Any], pipeline: PipelineConfig, delays: Delays | Sequence[int]
    ) -> Replay:
        settings, flushes = pipeline.pipemare, not pipeline.is_asynchronous
        annealing = settings.lr_rescheduling

        makers = [
            _make_optimizer(values, module, stage, len(self.stages))
            for stage, module in enumerate(self.stages)
        ]

        held = [set(map(id, module.parameters())) for module in self.stages]

        def make(parameters: list[Parameter]) -> Optimizer:
            stage = next(i for i, own in enumerate(held) if id(parameters[0]) in own)
            self.optimizers.append(makers[stage](parameters))
            return self.optimizers[-1]

        self._feeds_back, self._slack = settings.error_feedback, settings.slack
        return Replay(
            self.stages,
            self.loss_fn,
            make,
            self.micro_batches,
            correction="off" if flushes else settings.discrepancy_correction.mode,
            decay_base=settings.discrepancy_correction.decay,
            anneal_steps=annealing.anneal_steps if annealing.enabled else None,
            make_scheduler=_scheduler_maker(values),
            warmup_steps=settings.warmup_steps,
            drain_interval=1 if flushes else settings.drain_interval,
            slack=settings.slack,
            delays=_delays(delays, len(self.stages), self.micro_batches, settings.slack),
            clip=clipping_limit(values) or None,
            error_feedback=settings.error_feedback,
            together=self._together,
        )

    @property
    def global_steps(self) -> int:
        """Optimizer steps done."""
        return self.replay.steps

    @property
    def learning_rate(self) -> float:
        """Of the next step, before any rescheduling by stage."""
        return float(self.optimizers[0].param_groups[0]["lr"])

    def train_batch(self, batches: Iterator[Any]) -> float:
        """Train one optimizer step of all stages.

        Args:
            batches: Gives micro-batches, as to the engine: mappings with ``input_ids`` and
                ``labels``, or (inputs, labels).

        Returns:
            The mean loss of its micro-batches.

        Raises:
            StopIteration: There are fewer micro-batches than a step has.
        """
        given = [self._pair(batch) for batch in islice(batches, self.micro_batches)]
        if len(given) < self.micro_batches:
            raise StopIteration
        for stage in self.stages:
            stage.train()
        return self.replay.step(given)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Any]) -> float:
        """Return the mean loss of micro-batches, with the newest weights of all stages."""
        losses = []
        for batch in batches:
            value, labels = self._pair(batch)
            for stage in self.stages:
                stage.eval()
                value = stage(value)
            losses.append(float(self.loss_fn(value, labels)))
        return sum(losses) / len(losses)

    def memory(self) -> dict[str, float]:
        """Return the memory of all stages beside the weights, in units of the weights.

        ``optimizer``: its states, those of error feedback among them; ``correction``: what real
        stages hold for the correction of their passes.
        """
        weights = sum(p.nbytes for stage in self.stages for p in stage.parameters())
        states = sum(
            tensor.nbytes
            for optimizer in self.optimizers
            for state in optimizer.state.values()
            for tensor in state.values()
            if isinstance(tensor, Tensor)
        )
        return {
            "optimizer": (states + self._feedback_bytes()) / weights,
            "correction": sum(self.replay.correction_bytes()) / weights,
        }

    def _feedback_bytes(self) -> int:
        """Return the bytes of the last updates, which stages with stale gradients keep."""
        count = len(self.stages)
        stale = [m for i, m in enumerate(self.stages) if ahead(i, count, self._slack)]
        return sum(p.nbytes for m in stale for p in m.parameters()) if self._feeds_back else 0

    def _pair(self, batch: Any) -> tuple[Any, Any]:
        return split_batch(batch, self.inputs) if isinstance(batch, Mapping) else batch


def _delays(
    kind: str | Sequence[int], stages: int, micro_batches: int, slack: int
) -> Sequence[int] | None:
    if not isinstance(kind, str):
        if len(kind) != stages:
            reason, remedy = f"there are {stages} stages", "Give one number for each stage"
            raise ConfigError("delays", list(kind), reason, remedy)
        return kind
    if kind == "one-step":
        return [micro_batches] * stages
    if kind == "dataflow":
        return [2 * ahead(stage, stages, slack) + 1 for stage in range(stages)]
    if kind != "pipeline":
        remedy = did_you_mean(kind, get_args(Delays))
        raise ConfigError("delays", kind, "there is no such model of delays", remedy)
    return None


def _make_optimizer(
    config: Mapping[str, Any], module: nn.Module, stage: int, stages: int
) -> Callable[[list[Parameter]], Optimizer]:
    """Return a factory of a stage's optimizer, as the engine's; Adam and SGD are torch's."""
    chosen = config.get("optimizer") or {}
    _, make = take_optimizer(dict(config), module, None)
    if make is not None:
        asynchronous = WavemareConfig.of(config).pipeline.is_asynchronous
        return partial(_with_refresh, make, stage, stages) if asynchronous else make
    settings = dict(chosen.get("params") or {})
    name = str(chosen.get("type", ""))
    if name.lower() == "muon":
        return make_muon(module, settings)
    for key in ("torch_adam", "fused", "foreach"):
        settings.pop(key, None)
    if settings.get("bias_correction") is True:
        del settings["bias_correction"]  # torch has no other way
    adam = settings.pop("adam_w_mode", True)
    kinds = {"adam": "AdamW" if adam else "Adam", "adamw": "AdamW", "sgd": "SGD"}
    kind = getattr(torch.optim, kinds.get(name.lower(), name), None)
    if kind is None:
        reason = "a simulation steps with torch's optimizers, SOAP and Muon"
        remedy = did_you_mean(name, ("AdamW", "Adam", "SGD", "NAdam", "SOAP", "Muon"))
        raise ConfigError("optimizer.type", name, reason, remedy)
    if kind is torch.optim.AdamW:
        settings.setdefault("weight_decay", 0.0)  # DeepSpeed's default; torch has another
    check_parameters(kind, settings)
    return partial(kind, **settings)


def _with_refresh(
    make: Callable[[list[Parameter]], Optimizer], stage: int, stages: int, parameters: Any
) -> Optimizer:
    optimizer = make(parameters)
    refresh_by_stage(optimizer, stage, stages)
    return optimizer


def _scheduler_maker(config: Mapping[str, Any]) -> Any:
    """Return a factory of the configured scheduler, DeepSpeed's or torch's; None without one."""
    chosen = config.get("scheduler")
    if not chosen:
        return None
    kind = getattr(lr_schedules, chosen["type"], None)
    kind = kind or getattr(torch.optim.lr_scheduler, chosen["type"], None)
    if kind is None:
        reason = "neither DeepSpeed nor torch has such a scheduler"
        remedy = did_you_mean(chosen["type"], lr_schedules.VALID_LR_SCHEDULES)
        raise ConfigError("scheduler.type", chosen["type"], reason, remedy)
    return lambda optimizer: kind(optimizer, **chosen.get("params", {}))
