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
    """Starts early stages with a smaller rate: that of a stage with the mean staleness tau (in
    optimizer steps) is divided by ``max(1, tau) ** (1 - step / anneal_steps)``."""

    anneal_steps: int = Field(default=2000, ge=1)
    """After so many steps, counted from the end of ``warmup_steps``, all stages have the schedule's
    own rate."""


class DiscrepancyCorrection(Section):
    """PipeMare's T2: backward passes with the weights that the forward pass saw."""

    mode: Literal["auto", "off", "exact", "ema", "predict"] = "auto"
    """``off`` takes the newest weights and holds no copies, ``exact`` keeps copies of the last
    versions, ``ema`` estimates them from the mean of the last changes. With ``predict``, backward
    passes use the newest weights, and forward passes predict them (SpecTrain, PipeOptim). ``auto``
    is what runs have shown to be best for the optimizer and the staleness (docs/asynchronous.md):
    with AdamW and others ``exact`` on a stage with a staleness up to 2, and ``ema`` beyond."""

    decay: float | None = Field(default=None, gt=0, lt=1)
    """For ``ema``: the paper's D. The decay of the mean is ``D ** (1 / staleness)``. If omitted, it
    is ``(staleness - 1) / (staleness + 1)``, the optimum of the quadratic model."""


class PipeMareConfig(Section):
    """The asynchronous schedule."""

    lr_rescheduling: LrRescheduling = LrRescheduling()
    """See `LrRescheduling`."""

    discrepancy_correction: DiscrepancyCorrection = DiscrepancyCorrection()
    """See `DiscrepancyCorrection`."""

    optimizer_policy: Literal["keep", "auto"] = "keep"
    """If gradients are stale, ``auto`` replaces Adam and AdamW by an optimizer that bears stale
    gradients: Muon for matrices up to a staleness of two steps, SOAP beyond. It keeps your ``lr``
    and ``weight_decay``, and turns on ``error_feedback``. It costs time in each step, and with SOAP
    memory (docs/asynchronous.md). It logs its choice and the reason. It is refused with an
    optimizer that was given to ``initialize``, with ``offload_optimizer``, and for matrices of
    which a rank holds a part. ``keep`` keeps Adam and AdamW, and says in one line what ``auto``
    would give."""

    error_feedback: bool = False
    """Whether each update corrects the error of the previous, stale one: it adds the mean
    staleness (above 1, its square root) times the difference of the two."""

    warmup_steps: int = Field(default=0, ge=0)
    """The number of first optimizer steps that are synchronous (PipeMare's T3)."""

    drain_interval: int = Field(default=0, ge=0)
    """How many optimizer steps lie between two drains of the pipeline. 0: it drains only to
    evaluate and to save."""

    slack: int = Field(default=0, ge=0)
    """How many micro-batches each stage runs further ahead of the next one. 1 hides the latency of
    slow messages, doubles the delay, and nearly doubles the activations."""


class PipelineConfig(Section):
    """How a Hugging Face model becomes a pipeline, and how the pipeline runs.

    A ``PipelineModule`` that the caller built keeps its own stages and cuts.
    """

    schedule: Schedule | Annotated[str, Field(pattern=f"^{FILE}.")] = "1f1b"
    """``1f1b``, ``zb-h1``, ``interleaved``, ``zbv`` and ``auto`` empty the pipeline at each
    optimizer step; the last four wait less. ``pipemare`` never empties it. ``file:PATH`` runs the
    one-step plan in a file, in our text form or in torch's CSV."""

    stages: int = Field(default=1, ge=1)
    """The number of pipeline stages; 1 is plain data parallelism. With ``interleaved``, ``zbv``,
    ``auto`` and a file: the number of ranks of the pipeline, each of which may have several
    stages."""

    partition: str | list[int] | list[list[int]] = "parameters"
    """What makes stages equal: the number of parameters (``parameters``), the same without the word
    embedding (``compute``), measured times (``time``), or the number of layers (``uniform``). A
    list gives the first layer of each stage, and a list of such lists those of each replica."""

    chunks: int | None = Field(default=None, ge=1)
    """For ``interleaved``: stages per rank; 2 if omitted."""

    slack: int | None = Field(default=None, ge=0)
    """For ``1f1b``: how many micro-batches each stage runs further ahead of the next one. 1 hides
    the latency of slow messages, and nearly doubles the activations; 0 if omitted. No result
    changes. (``pipemare`` has a key of its own.)"""

    memory_limit: str | None = None
    """For ``auto``: the most activations of a rank, as a share of 1F1B's on its first rank, such as
    ``0.63x``; ``1x`` if omitted."""

    dynamic_shape: bool = False
    """Set it if micro-batches differ in shape. Each message then carries its shape. If only the
    last batch of the data is smaller, DeepSpeed's own key ``"dataloader_drop_last": true`` is
    enough: it leaves that batch out."""

    inputs: list[str] | None = None
    """The entries of a batch that travel with the hidden states. If omitted: the default of the
    model."""

    untie: bool | None = None
    """If the output head shares the weights of the embedding, it gets a copy of its own. If the key
    is omitted: only with ``pipemare``, whose stages cannot share a weight."""

    pipemare: PipeMareConfig = PipeMareConfig()
    """Settings of the schedule ``pipemare``."""

    @property
    def own_cuts(self) -> list[list[int]] | None:
        """The first layers of each replica's stages, where replicas are cut apart; else None."""
        cuts = [own for own in self.partition if isinstance(own, list)]
        return cuts or None

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
    """``sync`` runs the backward pass of a micro-batch beside the forward pass of the next, and
    gives the sums of gradient accumulation. ``auto`` measures first, and turns ``sync`` on if it
    pays."""
