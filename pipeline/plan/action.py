# SPDX-License-Identifier: Apache-2.0
"""What a rank of a pipeline does, one action at a time."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from wavemare.errors import PlanError

__all__ = ["COLLECTIVES", "COMPUTE", "RECEIVES", "SENDS", "Action", "Kind"]


class Kind(StrEnum):
    """Kinds of actions; the value is the code in a plan's text form."""

    LOAD = "L"
    """Read a micro-batch: inputs on the first stage, labels on the last one."""

    FORWARD = "F"
    """Forward pass with the newest weights."""

    BACKWARD = "B"
    """Backward pass."""

    SEND_ACTIVATION = "SA"
    """To the next stage."""

    RECV_ACTIVATION = "RA"
    """From the stage before."""

    SEND_GRAD = "SG"
    """To the stage before."""

    RECV_GRAD = "RG"
    """From the next stage."""

    REDUCE = "R"
    """Average the stage's gradients over its data-parallel ranks."""

    SEND_NORM = "SN"
    """Squared gradient norm of this stage and all later ones, to the stage before."""

    RECV_NORM = "RN"
    """Squared gradient norm of all later stages, from the next stage."""

    SEND_TOTAL = "ST"
    """Squared gradient norm of all stages, to the next stage (synchronous steps only)."""

    RECV_TOTAL = "RT"
    """Squared gradient norm of all stages, from the stage before (synchronous steps only)."""

    STEP = "S"
    """Optimizer step of the stage; makes the weights' next version."""

    CORRECT = "C"
    """Put weights as the forward pass of a micro-batch saw them in place, or an estimate."""

    RESTORE = "U"
    """Put the newest weights back after the backward pass."""

    SUM_OUTPUT = "XO"
    """Sum of a segment's output over ranks, while passes go on; in timelines, not in plans."""

    SUM_GRADIENT = "XG"
    """Sum of the gradient of a segment's input, in the same way."""


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD})
"""Kinds that keep a device busy with a micro-batch."""

COLLECTIVES = frozenset({Kind.SUM_OUTPUT, Kind.SUM_GRADIENT})
"""Kinds that run beside a device's passes."""

SENDS = {
    Kind.SEND_ACTIVATION: (Kind.RECV_ACTIVATION, 1),
    Kind.SEND_TOTAL: (Kind.RECV_TOTAL, 1),
    Kind.SEND_GRAD: (Kind.RECV_GRAD, -1),
    Kind.SEND_NORM: (Kind.RECV_NORM, -1),
}
"""For each kind of send the kind of receive that meets it, and where its stage is: +1 next, -1
before. The messages of one direction between two stages keep their order."""

RECEIVES = {receive: (send, -step) for send, (receive, step) in SENDS.items()}
"""The same from the receiver's side."""

_NUMBER = "([0-9]{1,18})"
_TEXT = re.compile(f"{_NUMBER}([A-Z]+){_NUMBER}(?:@{_NUMBER})?(?:/{_NUMBER})?")


class Action(NamedTuple):
    """One action of one stage. Its text form is, for example, ``2F5@1``.

    Args:
        kind: What is done.
        stage: Counted from 0.
        micro_batch: Counted from 0 over the whole run. For `REDUCE`, `STEP` and the norms: the last
            micro-batch of the optimizer step.
        version: Of the stage's weights, counted in its optimizer steps: the newest when the action
            starts; for `CORRECT`, the version that the micro-batch's forward pass used. -1 where
            no pass has filled it in.
        wave: 0, or 1 for the second of two interleaved waves.
    """

    kind: Kind
    stage: int
    micro_batch: int
    version: int = -1
    wave: int = 0

    def __str__(self) -> str:
        version = f"@{self.version}" if self.version >= 0 else ""
        wave = f"/{self.wave}" if self.wave else ""
        return f"{self.stage}{self.kind.value}{self.micro_batch}{version}{wave}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the text form.

        Raises:
            PlanError: The text is no action.
        """
        match = _TEXT.fullmatch(text)
        if match is None or match[2] not in _KINDS:
            codes = ", ".join(kind.value for kind in Kind)
            remedy = f"Write STAGE CODE MICRO_BATCH [@VERSION] [/WAVE], as in 2F5@1; codes: {codes}"
            raise PlanError("action", text, "this is no action", remedy)
        stage, code, micro_batch, version, wave = match.groups()
        return cls(
            _KINDS[code],
            int(stage),
            int(micro_batch),
            int(version) if version is not None else -1,
            int(wave or 0),
        )


_KINDS = {kind.value: kind for kind in Kind}
