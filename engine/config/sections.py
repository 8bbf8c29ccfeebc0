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
    """How many samples of a micro-batch each data-parallel rank gets. Their mean is
    ``train_micro_batch_size_per_gpu``."""

    mean: Literal["samples", "tokens"] = "samples"
    """What has equal weight in the mean loss: each sample, or each label other than -100."""

    @property
    def is_active(self) -> bool:
        """Whether losses have weights."""
        return self.shares is not None or self.mean == "tokens"


class CheckpointConfig(Section):
    """How checkpoints are written, kept and verified."""

    keep: int | None = Field(default=None, ge=1)
    """How many complete checkpoints of this run stay after a save; all if omitted. The one that
    ``latest`` names always stays."""

    background: bool = False
    """A thread writes the checkpoint while training goes on. It writes from a copy in host
    memory."""

    verify: Literal["checksums", "sizes"] = "checksums"
    """What is compared before anything is loaded: sizes and checksums of all files, or only their
    sizes."""


class ExpertParallelConfig(Section):
    """Ranks of a stage that share the experts of a model: Mixtral, Qwen2-MoE or Qwen3-MoE."""

    size: int = Field(default=1, ge=1)
    """The number of consecutive ranks that share the experts of each layer; 1 for none. With
    ``tensor_parallel``, it is a multiple of that size."""


class GuardConfig(Section):
    """What happens if a number is not finite."""

    nonfinite: Literal["off", "stop", "skip"] = "stop"
    """What happens if a gradient, or a pipeline's loss, is not finite: nothing, the run stops, or
    the step is skipped. With fp16, also of autocast, it is ``off``, because the loss scaler skips
    steps by itself."""

    max_skips: int = Field(default=10, ge=1)
    """After so many skipped steps in a row, ``skip`` stops the run."""


class OuterConfig(Section):
    """The outer optimizer: SGD with Nesterov momentum over pseudo-gradients."""

    lr: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Learning rate of the outer optimizer. Set 0.7 for 200 or more exchanges."""

    momentum: float = Field(default=0.5, ge=0, lt=1)
    """Momentum of the outer optimizer. Set 0.9 for 200 or more exchanges."""


class ElasticConfig(Section):
    """Replicas that come and go: each is a job of its own, and they find each other by a server."""

    replicas: int = Field(default=0, ge=0)
    """How many replicas there are when all are present; 0 for replicas that are ranks of one job.
    Data are divided, and ``train_batch_size`` counts samples, by this number."""

    lighthouse: str | None = None
    """Address of torchft's lighthouse, such as ``http://host:29510``. If omitted: the variable
    ``TORCHFT_LIGHTHOUSE``, which ``wavemare launch --replicas`` sets."""

    min_replicas: int = Field(default=1, ge=1)
    """How many replicas an exchange needs. With fewer, the changes wait for the next one."""

    start_s: _Seconds = Field(default=120.0, le=_WEEK_S)
    """How long the first replica waits for all others before it begins without them."""

    timeout_s: _Seconds = Field(default=60.0, le=_WEEK_S)
    """How long an exchange may take, with the wait for the slowest replica and with the copy that
    a new one gets. After it, the changes wait for the next exchange. A replica that has had none
    for ``watchdog.timeout_s`` ends."""


class LocalStepsConfig(Section):
    """Replicas that train alone and synchronize every N steps, for slow links between them."""

    mode: Literal["off", "diloco", "average"] = "off"
    """What an exchange does with the mean change of the replicas' weights. ``diloco`` gives it to
    the outer optimizer as a gradient; ``average`` adds it as it is."""

    every: int = Field(default=32, ge=1)
    """How many steps lie between two exchanges of a fragment."""

    replica: Literal["host", "rank"] | PositiveInt = "host"
    """Which ranks form a replica and reduce gradients in each step: those of a host, each rank
    alone, or so many consecutive ranks. A replica holds one or more whole models."""

    fragments: int = Field(default=1, ge=1)
    """In how many parts the weights are exchanged, one after the other. The number must divide
    ``every``."""

    overlap: int = Field(default=0, ge=0)
    """For how many steps training goes on while a message travels; at most ``every /
    fragments``."""

    mixing: Literal["carry", "replace"] = "carry"
    """What happens to the steps that were made while a message travelled: ``carry`` keeps them,
    ``replace`` drops them."""

    outer: OuterConfig = OuterConfig()
    """See `OuterConfig`."""

    bits: Literal[32, 8, 4, 2] = 32
    """Bits of a number in a message. With fewer than 32, the rounding errors are added to the next
    message."""

    warmup_steps: int = Field(default=0, ge=0)
    """The number of first steps that average gradients over all ranks."""

    copies: Literal["auto", "device", "cpu"] = "auto"
    """Where the common weights, the momentum and the rounding errors are stored. ``auto`` is
    ``cpu``."""

    elastic: ElasticConfig = ElasticConfig()
    """See `ElasticConfig`."""


class PipelineNames(Section):
    """How the stages work together."""

    micro_batches: int | None = Field(default=None, ge=1)
    """Micro-batches of an optimizer step. If omitted: ``gradient_accumulation_steps``."""

    schedule: Schedule | None = None
    """The schedule. If omitted: that of ``wavemare.pipeline``."""


class SplitNames(Section):
    """Which modules are split."""

    size: int = Field(ge=1)
    """The number of consecutive ranks that share each layer."""

    modules: list[str] = Field(min_length=1)
    """Patterns of the modules that are split. All blocks of a model must be among them."""


class ParallelConfig(Section):
    """Annotations of a model by names and patterns, or a layout that was made before."""

    stages: PositiveInt | list[list[str]] | dict[str, list[str]] | None = None
    """The modules of each stage, as patterns: by the stage's name, or as a list of lists. A number
    makes so many stages with equally many parameters."""

    split: PositiveInt | SplitNames | None = None
    """The number of consecutive ranks that share each layer."""

    replica: Literal["rest"] | PositiveInt | None = None
    """How many replicas there must be. ``rest``: as many as there are processes for."""

    pipeline: PipelineNames = PipelineNames()
    """See `PipelineNames`."""

    plan: str | dict[str, Any] | None = None
    """A layout's file, or the layout itself. It takes the place of all other keys. (The key is
    older than the word layout.)"""

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
    """Ends the run if ranks wait for a lost rank, or if all ranks wait for each other."""

    timeout_s: _Seconds = 600.0
    """How many seconds ranks wait before the run is ended. A run in which a rank computes goes on.
    Without the watchdog: how long a peer may take to answer a sparse collective."""

    folder: str = "wavemare-watchdog"
    """Where each rank writes what it was doing when the run is ended. Recipes use the folder
    ``watchdog`` of the run."""

    @property
    def collective_timeout_s(self) -> float:
        """Seconds after which a collective fails by itself, though its peers may only compute."""
        return _WEEK_S if self.enabled else self.timeout_s
