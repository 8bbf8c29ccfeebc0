# SPDX-License-Identifier: Apache-2.0
"""Local steps: replicas step alone and exchange the changes of their weights every so many steps.

Common weights, the same bits on all replicas, are stepped by SGD with Nesterov momentum over the
mean change of the replicas' weights. Each rank of a replica does so for the masters that it owns,
with the ranks at its place in the other replicas. Only ``global_steps`` decides what is sent when.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from wavemare.engine.config.sections import LocalStepsConfig
from wavemare.engine.feature import Feature
from wavemare.engine.launch.group import gather
from wavemare.engine.local_steps.codec import Code
from wavemare.engine.local_steps.wire import Header, Message, ReplicaLink
from wavemare.engine.observe.progress import PROGRESS
from wavemare.engine.optim.adapter import adapt
from wavemare.engine.pipe.chunks import tied_on_several
from wavemare.errors import CheckpointError, ConfigError, NumericsError

if TYPE_CHECKING:
    from wavemare.engine.base import EngineMixin

logger = logging.getLogger("wavemare")

_KEY = "wavemare.local_steps"
EXACT = Code(32)


@dataclass
class Flight:
    """A message, the step after which it is applied, and the weights at sending if needed."""

    message: Message
    due: int
    sent: Tensor | None


class LocalSteps(Feature):
    """Sends, receives and applies the changes of replicas.

    Args:
        engine: Complete, with a process grid of replicas.
        config: The section; has passed `refuse`.
        timeout_s: Seconds after which a silent replica counts as lost.
    """

    key = "local_steps"

    def __init__(self, engine: EngineMixin, config: LocalStepsConfig, timeout_s: float) -> None:
        sparse = any(getattr(module, "sparse", False) for module in engine.module.modules())
        if engine.pipeline_parallelism:
            sparse = any(gather(sparse))  # of any stage
        if config.warmup_steps and sparse:
            reason = "replicas have sparse gradients of different rows, which have no mean"
            remedy = "Leave it out, or build embeddings without sparse=True"
            raise ConfigError(f"{_KEY}.warmup_steps", config.warmup_steps, reason, remedy)
        self._engine, self._config = engine, config
        self._tied = tied_on_several(engine.module)
        if self._tied and config.bits != EXACT.bits:
            reason = f"stages hold copies of a weight ({self._tied[0]}), each rounded by its own"
            remedy = 'Set wavemare.pipeline.untie to true, or leave "bits" out'
            raise ConfigError(f"{_KEY}.bits", config.bits, reason, remedy)
        self._adapter = adapt(engine)
        self._device = engine.device if config.copies == "device" else torch.device("cpu")
        replicas = engine.mpu.replicas
        self._replicas = replicas.size
        self._code = Code(config.bits)
        self._momentum_rate = 0.0 if config.mode == "average" else config.outer.momentum
        self._flights: list[Flight] = []
        self._figures: dict[str, float] = {}
        self._open_link(timeout_s)
        self._bytes = 0
        if norms(engine):
            logger.warning(
                "local_steps: statistics of batch normalization are averaged only by synchronize()"
            )
        self._begin()

    def _open_link(self, timeout_s: float) -> None:
        group = self._engine.mpu.replicas.group
        self._link = ReplicaLink(group, timeout_s=timeout_s, device=self._device)

    def _begin(self) -> None:
        """Take the present weights, the same on all replicas, as the common ones."""
        self._adapter.hold_trained()
        self._parts = self._fragments()
        self._common = [self._read(number) for number in range(self._config.fragments)]
        self._momentum = [torch.zeros_like(c) for c in self._common if self._momentum_rate]
        coded = [] if self._code.is_exact else self._common
        self._residual = [torch.zeros_like(common) for common in coded]
        # Of the means that this rank makes: they are rounded, too.
        self._owed = [torch.zeros_like(c[self._link.own_range(c.numel())]) for c in coded]
        self._flights.clear()
        self._common_since = -1
        self._loss, self._losses = torch.zeros((), device=self._engine.device), 0

    def _fragments(self) -> list[int]:
        """Return the fragment of each held weight; copies within a replica travel at one step.

        These are weights that stages tie, and what ranks that split layers all hold.
        """
        held = self._adapter.held()
        modules = getattr(self._engine.module, "tied_modules", {})
        tied = [p for key in self._tied if key in modules for p in modules[key].parameters()]
        first = {id(weight): place for place, weight in enumerate(tied)}
        sizes = [getattr(weight, "whole_numel", weight.numel()) for weight in held]
        places = [first.get(id(weight), len(tied)) for weight in held]
        return fragments_of(sizes, self._config.fragments, places)

    # --- called by engines ------------------------------------------------------------------------

    def before_backward(self, loss: Tensor) -> Tensor:
        """Count a loss for the mean over all replicas, which travels with a message."""
        self._loss = self._loss + loss.detach().float()
        self._losses += 1
        return loss

    def before_step(self) -> bool:
        """Average the gradients over the replicas in a warm-up; the step is always made."""
        self._figures = {}
        if self._adapter.trains_others:
            self._follow()
        step = self._engine.global_steps + 1
        if step == 1:  # weights may have been loaded into the module since
            self._common = [self._read(number) for number in range(self._config.fragments)]
        gradients = self._adapter.gradients() if step <= self._config.warmup_steps else []
        if gradients:
            flat = torch.cat([g.reshape(-1).float() for g in gradients]).to(self._device)
            mean = self._link.send(Header(step, -1, flat.numel(), EXACT.bits), flat).wait()
            if not self._engine.gradient_average:
                mean *= self._replicas
            for gradient, part in zip(
                gradients, mean.split([g.numel() for g in gradients]), strict=True
            ):
                gradient.copy_(part.view_as(gradient))
        return True

    def _follow(self) -> None:
        """Exchange what the layers so far have learned, and begin with the layers trained now.

        So replicas have the same bits of frozen layers.
        """
        if self._engine.global_steps:
            logger.warning(
                "local_steps: other layers are trained from now on; replicas exchange all changes, "
                "and the outer momentum begins anew"
            )
            self.synchronize()
        self._begin()

    def after_step(self) -> None:
        """Apply what is due, then send the fragment whose turn it is.

        The other order would send the steps of a message in flight a second time. At a turn all
        messages are due, unless the run has resumed with another schedule.
        """
        every, count = self._config.every, self._config.fragments
        step = self._engine.global_steps - self._config.warmup_steps
        if step == 0:
            self._begin()
        if step <= 0:
            return
        for number in range(count):
            if (step - number * every // count) % every == 0:
                self._deliver(math.inf)
                self._send(number, step)
        self._deliver(step)

    def synchronize(self) -> None:
        """Apply all messages, then let all replicas have their mean."""
        engine = self._engine
        for buffer in norms(engine):
            for group in (engine.data_parallel_group, engine.mpu.replicas.group):
                dist.all_reduce(buffer, group=group)
            buffer.div_(engine.dp_world_size * self._replicas)
        if self._engine.global_steps <= self._config.warmup_steps:
            return
        self._deliver(math.inf)
        with PROGRESS.doing("synchronize"):
            for number, common in enumerate(self._common):
                change = common - self._read(number)
                if self._residual:
                    change += self._residual[number]
                    change[self._link.own_range(len(change))] += self._owed[number] * self._replicas
                    self._residual[number].zero_()
                    self._owed[number].zero_()
                message = self._link.send(self._header(number, EXACT), change)
                common.sub_(finite(message.wait(), number))
                self._write(number, common)
            self._adapter.publish_masters()
        self._common_since = self._engine.global_steps

    @property
    def is_common(self) -> bool:
        """Whether no replica has made a step of its own since `synchronize`."""
        step = self._engine.global_steps
        return step in (0, self._common_since) or step <= self._config.warmup_steps

    def metrics(self) -> Mapping[str, float]:
        """Return what the messages of the last step have cost, and how far replicas differ."""
        return self._figures

    def reset(self) -> None:
        """Drop what is in flight: other weights have been loaded."""
        for flight in self._flights:
            flight.message.wait()
        self._begin()

    def close(self) -> None:
        """Finish the exchanges in flight, and close the link."""
        self._link.close()

    # --- an exchange ------------------------------------------------------------------------------

    def _send(self, number: int, step: int) -> None:
        local = self._read(number)
        overlap = self._config.overlap
        carries = overlap and self._config.mixing == "carry"
        # Large new tensors cost as much as what is computed: reuse those that nobody needs again.
        change = torch.sub(self._common[number], local, out=None if carries else local)
        norm = float(self._common[number].norm())
        self._figures["drift"] = float(change.norm()) / norm if norm else 0.0
        header, note = self._header(number, self._code), self._mean_loss()
        self._bytes = self._link.bytes_sent  # no other message is on its way
        if self._residual:
            residuals = self._residual[number], self._owed[number]
            message = self._link.send_coded(header, change, residuals, note)
        else:
            message = self._link.send(header, change, note)
        self._flights.append(Flight(message, step + overlap, local if carries else None))

    def _mean_loss(self) -> float:
        """Return the mean loss of this replica since the last message; one stage alone knows it."""
        engine = self._engine
        known = torch.full_like(self._loss, float(self._losses > 0))
        total = torch.stack([self._loss / max(self._losses, 1), known])
        for group in (engine.data_parallel_group, engine.ranks.model_group):
            if group is not None and dist.get_world_size(group) > 1:
                dist.all_reduce(total, group=group)
        self._loss, self._losses = torch.zeros_like(self._loss), 0
        return float(total[0] / total[1].clamp(min=1))

    def _header(self, number: int, code: Code) -> Header:
        common, step = self._common[number], self._engine.global_steps
        digest = xxhash.xxh3_64_intdigest(common.cpu().numpy().data) - (1 << 63)
        return Header(step, number, common.numel(), code.bits, digest)

    def _deliver(self, step: float) -> None:
        begun = time.perf_counter()
        while self._flights and self._flights[0].due <= step:
            flight = self._flights.pop(0)
            with PROGRESS.doing("an exchange of replicas"):
                mean = self._receive(flight)
            if mean is None:
                continue
            waited = time.perf_counter() - begun
            self._apply(flight, mean)
            sent, notes = float(self._link.bytes_sent - self._bytes), flight.message.notes
            self._figures |= {"outer_wait_seconds": waited, "outer_bytes": sent}
            self._figures["replica_loss"] = sum(notes) / len(notes)

    def _receive(self, flight: Flight) -> Tensor | None:
        """Return the mean of a message; a subclass may have none."""
        return finite(flight.message.wait(), flight.message.header.fragment)

    def _apply(self, flight: Flight, mean: Tensor) -> None:
        number = flight.message.header.fragment
        self._outer_step(number, mean)
        weights = self._common[number]
        if flight.sent is not None:
            weights = weights + (self._read(number) - flight.sent)
        self._write(number, weights)
        self._adapter.publish_masters()

    def _outer_step(self, number: int, mean: Tensor) -> None:
        momentum = self._momentum[number] if self._momentum_rate else None
        rate = 1.0 if self._config.mode == "average" else self._config.outer.lr
        outer_step(self._common[number], momentum, mean, rate, self._momentum_rate)

    # --- masters ----------------------------------------------------------------------------------

    def _own(self, number: int) -> list[Tensor]:
        masters = zip(self._adapter.masters(), self._parts, strict=True)
        return [own for (_, own), part in masters if part == number]

    def _read(self, number: int) -> Tensor:
        """Return a copy of this rank's masters of a fragment: (E,), float32, maybe empty."""
        empty = torch.empty(0, device=self._engine.device)
        return torch.cat([empty, *self._own(number)]).to(self._device)

    def _write(self, number: int, weights: Tensor) -> None:
        own = self._own(number)
        parts = weights.to(self._engine.device).split([master.numel() for master in own])
        for master, part in zip(own, parts, strict=True):
            master.copy_(part)

    # --- checkpoints ------------------------------------------------------------------------------

    def extra_state(self) -> dict[str, Any]:
        """Wait for what is in flight, apply nothing, and return all that the next step needs."""
        if self._engine.global_steps < self._config.warmup_steps:
            return {}  # the common weights are those of the end of the warm-up
        flights = [
            {
                "header": list(flight.message.header),
                "mean": flight.message.wait(),
                "notes": flight.message.notes,
                "due": flight.due,
                "sent": flight.sent,
            }
            for flight in self._flights
        ]
        return {
            "replicas": self._replicas,
            "common": self._common,
            "momentum": self._momentum,
            "residual": self._residual,
            "owed": self._owed,
            "flights": flights,
            "loss": float(self._loss),
            "losses": self._losses,
        }

    def load_extra_state(self, state: Mapping[str, Any] | None) -> None:
        """Load a state; of another number of replicas common weights and momentum alone."""
        if not state:
            return  # a checkpoint without local steps: `reset` has begun with its weights
        same = state["replicas"] == self._replicas
        steps, warmup = self._engine.global_steps, self._config.warmup_steps
        if same and steps < warmup:
            reason = f"the replicas of this checkpoint of step {steps} step alone already"
            raise CheckpointError(f"{_KEY}.warmup_steps", warmup, reason, f"Give {steps} or less")
        lists = {"common": self._common, "momentum": self._momentum}
        if same:
            lists |= {"residual": self._residual, "owed": self._owed}
        for name, ours in lists.items():
            # A checkpoint of other settings, or of an older version, lacks some.
            for own, saved in zip(ours, state.get(name, ()), strict=False):
                if own.shape != saved.shape:
                    reason = f"its {name} of a fragment is of {len(saved)} weights, not {len(own)}"
                    remedy = (
                        "Resume with the model, parameter groups and frozen layers that saved it"
                    )
                    raise CheckpointError(_KEY, name, reason, remedy)
                own.copy_(saved)
        flights = [
            Flight(
                Message(Header(*f["header"]), list(f["notes"]), f["mean"].to(self._device)),
                f["due"],
                None if f["sent"] is None else f["sent"].to(self._device),
            )
            for f in state["flights"]
        ]
        if same:
            self._flights = flights
            self._loss.fill_(state["loss"])
            self._losses = state["losses"]
            return
        for flight in flights:
            number = flight.message.header.fragment
            self._outer_step(number, finite(flight.message.wait(), number))
        for number, common in enumerate(self._common):
            self._write(number, common)
        self._adapter.publish_masters()
        logger.warning(
            "local_steps: %d replicas resume from a checkpoint of %d, with its common weights and "
            "the first replica's optimizer; not bit for bit",
            *(self._replicas, state["replicas"]),
        )


def outer_step(
    weights: Tensor, momentum: Tensor | None, mean: Tensor, rate: float, momentum_rate: float
) -> None:
    """Step common weights by SGD with Nesterov momentum; this overwrites the mean.

    Each operation rounds once, so that all devices agree.

    Args:
        weights: (E,), changed.
        momentum: (E,), changed; None for none.
        mean: (E,), the mean change of the replicas' weights.
        rate: Learning rate.
        momentum_rate: Decay of the momentum.
    """
    if momentum is not None:
        momentum.mul_(momentum_rate).add_(mean)
        mean = (momentum * momentum_rate).add_(mean)
    weights -= mean.mul_(rate)


def fragments_of(
    sizes: Sequence[int], count: int, places: Sequence[int] | None = None
) -> list[int]:
    """Return the fragment of each parameter: by size, dealt in turns.

    Args:
        sizes: Of the parameters.
        count: Fragments.
        places: Of the parameters; those of smaller ones come first, whatever their size.
    """
    parts, first = [0] * len(sizes), places or [0] * len(sizes)
    by_size = sorted(range(len(sizes)), key=lambda n: (first[n], -sizes[n], n))
    for place, number in enumerate(by_size):
        parts[number] = place % count
    return parts


def finite(mean: Tensor, fragment: int) -> Tensor:
    """Return the mean of a message, if its numbers are finite; all replicas have the same one."""
    if not math.isfinite(mean.norm()):
        reason = "the mean change of this fragment is not finite, on all replicas: one has diverged"
        remedy = "Resume from the last checkpoint, with a smaller learning rate"
        raise NumericsError(_KEY, fragment, reason, remedy)
    return mean


def norms(engine: EngineMixin) -> list[Tensor]:
    """Return the running statistics of batch normalization."""
    layers = [module for module in engine.module.modules() if isinstance(module, _NormBase)]
    buffers = [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
    return [buffer for buffer in buffers if buffer.is_floating_point()]
