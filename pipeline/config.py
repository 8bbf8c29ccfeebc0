# SPDX-License-Identifier: Apache-2.0
"""Configuration of pipelines and waves: ``"wavemare": {"pipeline": ..., "wavelet": ...}``."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from wavemare.pipeline.plan.schedules import SCHEDULES, TRAINED
from wavemare.section import Section

if TYPE_CHECKING:
    Schedule = str
else:
    Schedule = Literal[TRAINED]
    """A name of a schedule that engines train with."""
FILE = "file:"
"""Before the path of a plan, in place of a schedule's name."""


class LrRescheduling(Section):
    """PipeMare's T1: the earlier the stage, the smaller its learning rate in the first steps."""

    enabled: bool = False
    """Divide the rate of a stage with the mean staleness tau (in optimizer steps) by
    ``max(1, tau) ** (1 - step / anneal_steps)``."""

    anneal_steps: int = Field(default=2000, ge=1)
    """Optimizer steps after ``warmup_steps`` until all stages have the schedule's own rate."""


class DiscrepancyCorrection(Section):
    """PipeMare's T2: backward passes with the weights that the forward pass saw."""

    mode: Literal["auto", "off", "exact", "ema", "predict"] = "auto"
    """``off`` takes the newest weights and holds no copies, ``exact`` keeps copies of the last
    versions, ``ema`` estimates them from the mean of the last changes. With ``predict``, backward
    passes use the newest weights, and forward passes predict them (SpecTrain, PipeOptim). ``auto``
    is what runs have shown to be best for the optimizer and the staleness (docs/asynchronous.md):
    with AdamW and others ``exact`` on a stage with a staleness up to 2, and ``ema`` beyond."""

    decay: float | None = Field(default=None, gt=0, lt=1)
    """The paper's D: the mean's decay is ``D ** (1 / staleness)``. If omitted, the decay is
    ``(staleness - 1) / (staleness + 1)``, the optimum of the quadratic model."""


class PipeMareConfig(Section):
    """The asynchronous schedule."""

    lr_rescheduling: LrRescheduling = LrRescheduling()
    """See `LrRescheduling`."""

    discrepancy_correction: DiscrepancyCorrection = DiscrepancyCorrection()
    """See `DiscrepancyCorrection`."""

    optimizer_policy: Literal["keep", "auto"] = "keep"
    """If gradients are stale, ``auto`` replaces Adam and AdamW by an optimizer that bears it: Muon
    for matrices up to a staleness of two steps, SOAP beyond. It logs its choice and the reason.
    ``keep`` keeps them, and says in one line what ``auto`` would give."""

    error_feedback: bool = False
    """Whether each update corrects the error of the previous, stale one: it adds the mean
    staleness (above 1, its square root) times the difference of the two."""

    warmup_steps: int = Field(default=0, ge=0)
    """Number of first optimizer steps that are synchronous (PipeMare's T3)."""

    drain_interval: int = Field(default=0, ge=0)
    """Optimizer steps between two drains of the pipeline; 0 drains only to evaluate and save."""

    slack: int = Field(default=0, ge=0)
    """Extra micro-batches in flight for each later stage. One hides the latency of slow messages,
    and doubles delay and activations."""


class PipelineConfig(Section):
    """How a Hugging Face model becomes a pipeline, and how the pipeline runs.

    A ``PipelineModule`` that the caller built keeps its own stages and cuts.
    """

    schedule: Schedule | Annotated[str, Field(pattern=f"^{FILE}.")] = "1f1b"
    """``1f1b`` empties the pipeline at each optimizer step; ``zb-h1``, ``interleaved``, ``zbv`` and
    ``auto`` do so and idle less; ``pipemare`` never empties it. ``file:PATH`` runs the one-step
    plan in a file, our text or torch's CSV."""

    stages: int = Field(default=1, ge=1)
    """Number of pipeline stages; 1 trains the model as a plain data-parallel job. With
    ``interleaved``, ``zbv``, ``auto`` and a file, the number of ranks; each may have several
    stages."""

    partition: str | list[int] = "parameters"
    """Where the stages are cut: balanced by parameter count (``parameters``), by that without the
    word embedding, whose rows are looked up (``compute``), or by measured time (``time``);
    ``uniform`` (equal layer counts); or the first layer of each stage as a list."""

    chunks: int | None = Field(default=None, ge=1)
    """Stages per rank of ``interleaved``; 2 if omitted."""

    memory_limit: str | None = None
    """Activations that a rank keeps with ``auto``, as a share of 1F1B's on its first rank, such as
    ``0.63x``; ``1x`` if omitted."""

    dynamic_shape: bool = False
    """Whether micro-batches differ in shape. Every message then carries its shape."""

    inputs: list[str] | None = None
    """Names of the batch entries that travel with the hidden states; the model's default if
    omitted."""

    untie: bool | None = None
    """Whether an output head that shares the embedding's weights gets its own. If omitted, only
    with ``pipemare``, whose stages cannot share a weight."""

    pipemare: PipeMareConfig = PipeMareConfig()
    """Settings of the schedule ``pipemare``."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether stages step on their own, each at its own time."""
        return self.file is None and not SCHEDULES[self.schedule].flushes

    @property
    def file(self) -> str | None:
        """Path of the plan, if it is in a file."""
        return self.schedule.removeprefix(FILE) if self.schedule.startswith(FILE) else None

    @property
    def memory_share(self) -> float:
        """The memory limit as a number, 1 if omitted; nan where it is no share."""
        text = self.memory_limit or "1x"
        return float(text[:-1]) if re.fullmatch(r"[0-9]+(\.[0-9]+)?x", text) else math.nan

    @property
    def unties(self) -> bool:
        """Whether tied weights are made separate."""
        return self.is_asynchronous if self.untie is None else self.untie


class WaveletConfig(Section):
    """Two waves of micro-batches, half a cycle apart on the same device."""

    mode: Literal["off", "auto", "sync"] = "off"
    """``sync`` pairs the backward pass of a micro-batch with the forward pass of the next: the
    same sums as gradient accumulation. ``auto`` measures first and turns ``sync`` on where that
    pays."""
