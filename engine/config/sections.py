# SPDX-License-Identifier: Apache-2.0
"""The smaller sections of ``"wavemare"``. Larger ones stand beside their classes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from wavemare.pipeline.config import Schedule
from wavemare.section import Section

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_WEEK_S = 7 * 24 * 3600.0


class BalanceConfig(Section):
    """How the samples of a step are shared among unlike data-parallel ranks."""

    shares: list[int] | None = Field(default=None, min_length=1)
    """Samples of each data-parallel rank in a micro-batch. They sum to
    ``train_micro_batch_size_per_gpu`` (their mean) times the data-parallel ranks."""

    mean: Literal["samples", "tokens"] = "samples"
    """Whether all samples of a micro-batch weigh the same, or all labels other than -100."""

    @property
    def is_active(self) -> bool:
        """Whether losses have weights."""
        return self.shares is not None or self.mean == "tokens"


class CheckpointConfig(Section):
    """How checkpoints are written, kept and verified."""

    keep: int | None = Field(default=None, ge=1)
    """How many complete checkpoints of this run stay when another one is complete; else all.
    The one that ``latest`` names always stays."""

    background: bool = False
    """Whether a thread writes while training goes on, from a copy in host memory of what the rank
    saves."""

    verify: Literal["checksums", "sizes"] = "checksums"
    """What is compared with the list of files before anything is loaded."""


class ExpertParallelConfig(Section):
    """Data-parallel ranks that share the experts of a model: Mixtral, Qwen2-MoE or Qwen3-MoE."""

    size: int = Field(default=1, ge=1)
    """Over how many consecutive ranks the experts of each layer are divided; 1 for none."""


class GuardConfig(Section):
    """Numbers that are not finite: what follows from them."""

    nonfinite: Literal["off", "stop", "skip"] = "stop"
    """What a loss, a gradient or an activation that is not finite does to an optimizer step. With
    fp16 the default is ``off``: its loss scaler skips steps by itself."""

    max_skips: int = Field(default=10, ge=1)
    """Steps skipped one after the other at which ``skip`` stops the run, too."""


class OuterConfig(Section):
    """The outer optimizer: SGD with Nesterov momentum over pseudo-gradients."""

    lr: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Its learning rate; 0.7 from some 200 exchanges on."""

    momentum: float = Field(default=0.5, ge=0, lt=1)
    """Its momentum; 0.9 from some 200 exchanges on."""


class LocalStepsConfig(Section):
    """Replicas that step alone and meet every so many steps, for slow links between them."""

    mode: Literal["off", "diloco", "average"] = "off"
    """``diloco``: the mean change of the replicas' weights is a gradient of the outer optimizer;
    ``average``: it is added as it is."""

    every: int = Field(default=32, ge=1)
    """Steps between two exchanges of a fragment."""

    replica: Literal["host", "rank"] | PositiveInt = "host"
    """The ranks that reduce gradients in each step: those of a host, each one alone, or so many
    consecutive ones."""

    fragments: int = Field(default=1, ge=1)
    """Parts of the weights, which are exchanged in turns; they divide ``every``."""

    overlap: int = Field(default=0, ge=0)
    """Steps for which a message travels while training goes on, at most ``every / fragments``."""

    mixing: Literal["carry", "replace"] = "carry"
    """Whether weights keep the steps made while their message travelled."""

    outer: OuterConfig = OuterConfig()
    """See `OuterConfig`."""

    bits: Literal[32, 8, 4] = 32
    """Of a number in a message. What 8 and 4 round off is added to the next message."""

    warmup_steps: int = Field(default=0, ge=0)
    """So many first steps average gradients over all ranks."""

    copies: Literal["auto", "device", "cpu"] = "auto"
    """Where common weights, momentum and residual are; ``auto``: beside GPUs ``cpu``."""


class PipelineNames(Section):
    """How the stages work together."""

    micro_batches: int | None = Field(default=None, ge=1)
    """Micro-batches of an optimizer step; ``gradient_accumulation_steps`` if omitted."""

    schedule: Schedule | None = None
    """That of ``wavemare.pipeline`` if omitted."""


class SplitNames(Section):
    """Which modules are split."""

    size: int = Field(ge=1)
    """Over how many consecutive ranks."""

    modules: list[str] = Field(min_length=1)
    """Patterns of the modules; all blocks of a model must be among them."""


class ParallelConfig(Section):
    """Annotations of a model by names and patterns, or a plan that was made before."""

    stages: PositiveInt | list[list[str]] | dict[str, list[str]] | None = None
    """Patterns of the modules of each stage, by its name or as a list; or a number of stages, which
    are balanced by parameters."""

    split: PositiveInt | SplitNames | None = None
    """Over how many consecutive ranks each layer is split."""

    replica: Literal["rest"] | PositiveInt | None = None
    """``rest``: all processes left over replicate the model; or how many replicas there must be."""

    pipeline: PipelineNames = PipelineNames()
    """See `PipelineNames`."""

    plan: str | dict[str, Any] | None = None
    """A plan's file, or the plan itself, in place of all others."""

    @property
    def annotates(self) -> bool:
        """Whether there are annotations."""
        return self.model_copy(update={"plan": None}) != ParallelConfig()

    @property
    def given(self) -> bool:
        """Whether the section says anything."""
        return self.annotates or self.plan is not None


class WatchdogConfig(Section):
    """When waiting counts as failure."""

    enabled: bool = True
    """Whether ranks that wait for a lost one, or all for each other, end the run."""

    timeout_s: _Seconds = 600.0
    """Seconds for which ranks wait before the run is ended; one that computes is never ended.
    Without the watchdog: seconds in which a peer answers a sparse collective."""

    folder: str = "wavemare-watchdog"
    """Where every rank writes what it was doing when the run is ended; recipes: ``watchdog`` in
    the run folder."""

    @property
    def collective_timeout_s(self) -> float:
        """Seconds after which a collective fails by itself, though its peers may only compute."""
        return _WEEK_S if self.enabled else self.timeout_s
