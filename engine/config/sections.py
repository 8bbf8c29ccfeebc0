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
    """How a step's samples are shared among data-parallel ranks of unequal speed."""

    shares: list[int] | None = Field(default=None, min_length=1)
    """Samples of each data-parallel rank in a micro-batch. They sum to
    ``train_micro_batch_size_per_gpu`` (their mean) times the data-parallel ranks."""

    mean: Literal["samples", "tokens"] = "samples"
    """What has equal weight in a micro-batch: each sample, or each label other than -100."""

    @property
    def is_active(self) -> bool:
        """Whether losses have weights."""
        return self.shares is not None or self.mean == "tokens"


class CheckpointConfig(Section):
    """How checkpoints are written, kept and verified."""

    keep: int | None = Field(default=None, ge=1)
    """Number of complete checkpoints of this run to keep after each save; all if omitted. The one
    that ``latest`` names is always kept."""

    background: bool = False
    """Whether a thread writes while training goes on, from a copy in host memory of what the rank
    saves."""

    verify: Literal["checksums", "sizes"] = "checksums"
    """What is compared with the list of files before anything is loaded."""


class ExpertParallelConfig(Section):
    """Ranks of a stage that share the experts of a model: Mixtral, Qwen2-MoE or Qwen3-MoE."""

    size: int = Field(default=1, ge=1)
    """Over how many consecutive ranks the experts of each layer are divided; 1 for none. With
    ``tensor_parallel`` a multiple of its size."""


class GuardConfig(Section):
    """What happens if a number is not finite."""

    nonfinite: Literal["off", "stop", "skip"] = "stop"
    """What happens to an optimizer step with a gradient, or a pipeline's loss, that is not finite.
    With fp16, also of autocast, it is ``off``: the loss scaler skips steps by itself."""

    max_skips: int = Field(default=10, ge=1)
    """Number of consecutive skipped steps at which ``skip`` stops the run."""


class OuterConfig(Section):
    """The outer optimizer: SGD with Nesterov momentum over pseudo-gradients."""

    lr: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Its learning rate; set 0.7 for 200 or more exchanges."""

    momentum: float = Field(default=0.5, ge=0, lt=1)
    """Its momentum; set 0.9 for 200 or more exchanges."""


class LocalStepsConfig(Section):
    """Replicas that train alone and synchronize every N steps, for slow links between them."""

    mode: Literal["off", "diloco", "average"] = "off"
    """``diloco``: the mean change of the replicas' weights is a gradient of the outer optimizer;
    ``average``: it is added as it is."""

    every: int = Field(default=32, ge=1)
    """Steps between two exchanges of a fragment."""

    replica: Literal["host", "rank"] | PositiveInt = "host"
    """The ranks of a replica, which reduce gradients in each step: those of a host, each rank
    alone, or so many consecutive ranks."""

    fragments: int = Field(default=1, ge=1)
    """Number of parts of the weights, exchanged in turns; must divide ``every``."""

    overlap: int = Field(default=0, ge=0)
    """Steps for which a message travels while training goes on, at most ``every / fragments``."""

    mixing: Literal["carry", "replace"] = "carry"
    """Whether weights keep (``carry``) the steps made while their message travelled."""

    outer: OuterConfig = OuterConfig()
    """See `OuterConfig`."""

    bits: Literal[32, 8, 4] = 32
    """Bits per number in a message. With 8 and 4, rounding errors are added to the next message."""

    warmup_steps: int = Field(default=0, ge=0)
    """Number of first steps that average gradients over all ranks."""

    copies: Literal["auto", "device", "cpu"] = "auto"
    """Where common weights, momentum and residual are stored; ``auto`` is ``cpu``."""


class PipelineNames(Section):
    """How the stages work together."""

    micro_batches: int | None = Field(default=None, ge=1)
    """Micro-batches of an optimizer step; ``gradient_accumulation_steps`` if omitted."""

    schedule: Schedule | None = None
    """Schedule; that of ``wavemare.pipeline`` if omitted."""


class SplitNames(Section):
    """Which modules are split."""

    size: int = Field(ge=1)
    """Over how many consecutive ranks."""

    modules: list[str] = Field(min_length=1)
    """Patterns of the modules; all blocks of a model must be among them."""


class ParallelConfig(Section):
    """Annotations of a model by names and patterns, or a layout that was made before."""

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
    """A layout's file, or the layout itself, in place of all other keys. (The key is older than the
    word layout.)"""

    @property
    def annotates(self) -> bool:
        """Whether there are annotations."""
        return self.model_copy(update={"plan": None}) != ParallelConfig()

    @property
    def given(self) -> bool:
        """Whether the section says anything."""
        return self.annotates or self.plan is not None


class WatchdogConfig(Section):
    """How a run that hangs is ended."""

    enabled: bool = True
    """Whether the run is ended if ranks wait for a lost rank, or all wait for each other."""

    timeout_s: _Seconds = 600.0
    """Seconds that ranks wait before the run is ended; a run in which a rank computes goes on.
    Without the watchdog: seconds until a peer must answer a sparse collective."""

    folder: str = "wavemare-watchdog"
    """Where every rank writes what it was doing when the run is ended; recipes: ``watchdog`` in
    the run folder."""

    @property
    def collective_timeout_s(self) -> float:
        """Seconds after which a collective fails by itself, though its peers may only compute."""
        return _WEEK_S if self.enabled else self.timeout_s
