# SPDX-License-Identifier: Apache-2.0
"""Local steps of replicas that come and go: each is a job of its own.

An exchange that fails changes nothing: a replica keeps its change for its next turn. One that was
behind, or has just come, takes the state of a replica that is not, and gives nothing to the
exchange in which it does so. `quorum.py` says who takes part.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor
from torch import distributed as dist

from wavemare.engine.checkpoint.compatibility import topology
from wavemare.engine.config.sections import LocalStepsConfig
from wavemare.engine.launch.environment import LIGHTHOUSE
from wavemare.engine.launch.group import gather
from wavemare.engine.local_steps.meeting import Meeting, Verdict, reason_of
from wavemare.engine.local_steps.steps import EXACT, LocalSteps, finite, norms
from wavemare.engine.local_steps.wire import START, WHOLE, Header
from wavemare.engine.observe.progress import PROGRESS
from wavemare.errors import CommError, ConfigError, NumericsError
from wavemare.extras import require

if TYPE_CHECKING:
    from wavemare.engine.base import EngineMixin
    from wavemare.engine.local_steps.quorum import Members
    from wavemare.engine.local_steps.steps import Flight

logger = logging.getLogger("wavemare")

_KEY = "wavemare.local_steps.elastic"
_PAUSE_S = 0.2
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_SETTINGS = (
    *("optimizer", "scheduler", "gradient_clipping", "bf16", "torch_autocast"),
    *("gradient_accumulation_steps", "train_micro_batch_size_per_gpu"),
)


class ElasticSteps(LocalSteps):
    """Sends, receives and applies the changes of the replicas that are there.

    Args:
        engine: Complete, with a process grid of one replica.
        config: The section; has passed `refuse`.
        timeout_s: Seconds after which a replica that meets nobody ends.
    """

    def __init__(self, engine: EngineMixin, config: LocalStepsConfig, timeout_s: float) -> None:
        if any(gather(bool(norms(engine)))):  # of a stage
            reason = "statistics of batch normalization differ by replica"
            remedy = "Use another normalization, or replicas of one job"
            raise ConfigError(f"{_KEY}.replicas", config.elastic.replicas, reason, remedy)
        require("torchft", _KEY)
        self._members: Members | None = None
        self._saved: dict[str, int] | None = None
        self._is_open = False
        """Whether the message in flight is of an exchange that this process has begun."""
        self._met_at, self._missed = time.monotonic(), 0
        self._patience_s, self._ahead = timeout_s, 0
        self._doing = Header(0, 0, 0, 0)
        super().__init__(engine, config, timeout_s)

    def _open_link(self, timeout_s: float) -> None:
        """Connect nobody yet: others would wait for this replica until its first step."""

    # --- called by engines ------------------------------------------------------------------------

    def join(self) -> int:
        """Meet the other replicas before the first step, and take their state if they are ahead.

        Returns:
            How many samples the others have read since the last call, beside this replica's own
            step: its data go on after them.
        """
        if self._members is None:
            with PROGRESS.doing("wait for the other replicas"):
                self._come()
        ahead, self._ahead = self._ahead, 0
        return ahead

    def before_forward(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Meet the other replicas, unless `join` was called."""
        if self._members is None:
            self.join()

    def synchronize(self) -> None:
        """Let all replicas that are there have their mean; all call it after the same step."""
        if self._members is None:
            return
        self._deliver(math.inf)
        with PROGRESS.doing("synchronize"):
            while not self._average():
                time.sleep(_PAUSE_S)

    def extra_state(self) -> dict[str, Any]:
        """Return what the next step needs, and how many exchanges there have been."""
        for flight in [*self._flights]:
            try:
                flight.message.wait()
            except CommError:
                self._flights.remove(flight)
                self._receive(flight)
        state = super().extra_state()
        exchanges = self._saved if self._members is None else self._members.state_dict()
        return state | {"exchanges": exchanges}

    def load_extra_state(self, state: Mapping[str, Any] | None) -> None:
        """Load a state; of replicas that meet, the one with the most exchanges counts."""
        super().load_extra_state(state)
        self._saved = (state or {}).get("exchanges")
        if self._members is not None and self._saved:
            self._members.load_state_dict(self._saved)

    def reset(self) -> None:
        """Drop what is in flight: other weights have been loaded."""
        while self._flights:
            self._receive(self._flights.pop(0))
        self._begin()

    def close(self) -> None:
        """Leave the other replicas."""
        if self._members is not None:
            self._members.close()

    # --- coming -----------------------------------------------------------------------------------

    def _come(self) -> None:
        members = self._members = self._found()
        self._link = members.link
        if self._engine.global_steps == 0:
            self._begin()  # weights may have been loaded into the module since
        if self._saved:
            members.load_state_dict(self._saved)
        begun = self._met_at = time.monotonic()
        while True:
            hurries = time.monotonic() - begun > self._config.elastic.start_s
            meeting = self._meet(self._of_all(START), trains=False, hurries=hurries)
            if meeting.verdict is Verdict.WAIT:
                self._met_at = time.monotonic()  # ``start_s`` is the limit of this wait
            if meeting.state is not None and meeting.header.fragment == START:
                self._take(meeting.state)
            if meeting.goes and meeting.header.fragment == START:
                if members.commit():
                    break
                self._miss("a replica has gone, or too few are there")
            elif self._take_part(meeting):
                break
            time.sleep(_PAUSE_S)
        self._met_at = time.monotonic()
        logger.info("local_steps: this replica begins at step %d", self._engine.global_steps)

    def _found(self) -> Members:
        from wavemare.engine.local_steps.quorum import Members, check_lighthouse

        elastic, engine = self._config.elastic, self._engine
        address = elastic.lighthouse or os.environ.get(LIGHTHOUSE, "")
        check_lighthouse(address)
        return Members(
            address,
            replica=engine.replica,
            replicas=elastic.replicas,
            least=elastic.min_replicas,
            timeout_s=elastic.timeout_s,
            state=self._state,
            digests=(_of_model(engine), _of_settings(engine)),
        )

    def _state(self) -> dict[str, Any]:
        """Return what a replica that is behind gets. Nothing changes until it has come."""
        engine, scheduler = self._engine, self._engine.lr_scheduler
        return {
            "header": list(self._doing),
            "common": self._common,
            "momentum": self._momentum,
            "weights": [self._read(number) for number in range(self._config.fragments)],
            "optimizer": engine.basic_optimizer.state_dict(),
            "scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
            "counters": {name: getattr(engine, name) for name in _COUNTERS},
            "loss": float(self._loss),
            "losses": self._losses,
        }

    def _take(self, state: Mapping[str, Any]) -> None:
        engine, before = self._engine, self._engine.global_samples
        steps = state["counters"]["global_steps"] - engine.global_steps
        # Its own place within a step stays: the other one may be at the end of a step.
        engine.micro_steps += steps * engine.gradient_accumulation_steps()
        for name, ours in (("common", self._common), ("momentum", self._momentum)):
            for own, given in zip(ours, state[name], strict=True):
                own.copy_(given)
        for number, weights in enumerate(state["weights"]):
            self._write(number, weights)
        self._adapter.publish_masters()
        engine.basic_optimizer.load_state_dict(state["optimizer"])
        if state["scheduler"] is not None:
            engine.lr_scheduler.load_state_dict(state["scheduler"])
        for name, value in state["counters"].items():
            setattr(engine, name, value)
        self._loss.fill_(state["loss"])
        self._losses = state["losses"]
        self._ahead += engine.global_samples - before
        logger.warning("local_steps: this replica goes on from another one's step %d", self._step)

    # --- exchanges --------------------------------------------------------------------------------

    @property
    def _step(self) -> int:
        return int(self._engine.global_steps)

    def _follow(self) -> None:
        reason = "other layers are trained from now on, and a replica that comes cannot know it"
        remedy = "Freeze and thaw layers between two runs"
        raise ConfigError(f"{_KEY}.replicas", self._config.elastic.replicas, reason, remedy)

    def _of_all(self, what: int) -> Header:
        """Return the header of what concerns all fragments."""
        parts = [self._header(number, EXACT) for number in range(self._config.fragments)]
        digest = _digest([part.digest for part in parts])
        return Header(self._step, what, sum(part.numel for part in parts), EXACT.bits, digest)

    def _meet(self, header: Header, *, trains: bool = True, hurries: bool = False) -> Meeting:
        assert self._members is not None
        self._doing = header
        # One that comes waits for the others' next exchange; not as long as the watchdog.
        left = max(0.9 * self._patience_s - (time.monotonic() - self._met_at), 1.0)
        return self._members.meet(
            header,
            trains=trains,
            gives=trains and self._is_finite(),
            hurries=hurries,
            wait_s=None if trains else left,
        )

    def _is_finite(self) -> bool:
        """Whether all weights of this replica are; its ranks agree."""
        numbers = range(self._config.fragments)
        sums = [own.sum() for number in numbers for own in self._own(number)]
        own = not sums or bool(torch.stack(sums).isfinite().all())
        return own if dist.get_world_size() == 1 else all(gather(own))

    def _send(self, number: int, step: int) -> None:
        self._take_part(self._meet(self._header(number, EXACT)))

    def _take_part(self, meeting: Meeting) -> bool:
        """Make the exchange of a meeting, or none; return whether it has begun."""
        assert self._members is not None
        if not meeting.goes:
            self._miss(meeting.reason)
            self._members.commit(meeting.reason)
            self._stop_if_diverged(meeting)
            return False
        if meeting.state is not None:
            self._take(meeting.state)
        if meeting.header.fragment == WHOLE:
            return self._average(meeting)
        number = meeting.header.fragment
        super()._send(number, self._step)
        self._is_open = True
        if meeting.diverged:
            self._deliver(math.inf)
            self._stop_if_diverged(meeting)
        self._deliver(self._step)
        return True

    def _receive(self, flight: Flight) -> Tensor | None:
        """Return the mean of a message; None if the exchange has failed."""
        if not self._is_open:  # it was received before a checkpoint
            return super()._receive(flight)
        assert self._members is not None
        self._is_open, reason = False, ""
        try:
            flight.message.wait()
        except CommError as error:
            reason = reason_of(error)
        if self._members.commit(reason):
            self._met_at, self._missed = time.monotonic(), 0
            self._figures["replicas"] = float(self._members.link.givers)
            return super()._receive(flight)
        self._miss(reason or "too few replicas, or a rank of this one, took part")
        return None

    def _average(self, meeting: Meeting | None = None) -> bool:
        """Let all weights be their mean; return whether that has succeeded."""
        assert self._members is not None
        meeting = meeting or self._meet(self._of_all(WHOLE))
        if not meeting.goes:
            return self._take_part(meeting)
        if meeting.header.fragment != WHOLE:  # others are ahead, and make another exchange
            return self._take_part(meeting) and False
        if meeting.state is not None:
            self._take(meeting.state)
        messages, reason = [], ""
        for number, common in enumerate(self._common):
            change = common - self._read(number)
            messages.append(self._link.send(self._header(number, EXACT), change))
        try:
            means = [message.wait() for message in messages]
        except CommError as error:
            reason = reason_of(error)
        if not self._members.commit(reason):
            self._miss(reason or "too few replicas, or a rank of this one, took part")
            return False
        self._stop_if_diverged(meeting)
        for number, mean in enumerate(means):
            self._common[number].sub_(finite(mean, number))
            self._write(number, self._common[number])
        self._adapter.publish_masters()
        self._common_since, self._met_at, self._missed = self._step, time.monotonic(), 0
        return True

    def _stop_if_diverged(self, meeting: Meeting) -> None:
        if meeting.diverged:
            reason = "the weights of this replica are not finite; the others go on without it"
            remedy = "Start it again: it takes the others' weights. Or use a smaller learning rate"
            raise NumericsError("replica", self._engine.replica, reason, remedy)

    def _miss(self, reason: str) -> None:
        """Note that there was no exchange.

        Raises:
            CommError: There has been none for too long.
        """
        self._missed += 1
        self._figures["missed_exchanges"] = float(self._missed)
        waited = time.monotonic() - self._met_at
        if waited > self._patience_s:
            assert self._members is not None
            self._members.commit(reason)
            where = self._members.address
            remedy = (
                f"Look at the lighthouse {where} and the other replicas, and start this one again"
            )
            told = f"there was no exchange for {waited:.0f} s: {reason}"
            raise CommError("replica", self._engine.replica, told, remedy)
        if self._missed == 1:
            logger.warning("local_steps: no exchange at step %d: %s", self._step, reason)


def _digest(value: object) -> int:
    text = json.dumps(value, sort_keys=True, default=str)
    return int(xxhash.xxh3_64_intdigest(text.encode())) - (1 << 63)


def _of_model(engine: EngineMixin) -> int:
    """Return a digest of what all replicas must have alike from the beginning on."""
    shapes, frozen = [], xxhash.xxh3_64()
    for name, parameter in engine.module.named_parameters():
        shapes.append([name, list(parameter.shape), parameter.requires_grad])
        if not parameter.requires_grad:
            frozen.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return _digest([shapes, frozen.hexdigest()])


def _of_settings(engine: EngineMixin) -> int:
    given = {name: engine.config.get(name) for name in _SETTINGS}
    local = engine.settings.local_steps.model_dump(exclude={"copies": True, "elastic": True})
    return _digest([given, local, topology(engine)])
