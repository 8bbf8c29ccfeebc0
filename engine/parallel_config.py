# SPDX-License-Identifier: Apache-2.0
"""Configuration of how a model is laid out: the ``"wavemare": {"parallel": ...}`` section."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveInt

from wavemare.pipeline.config import Schedule
from wavemare.section import Section

__all__ = ["ParallelConfig", "PipelineNames", "SplitNames"]


class PipelineNames(Section):
    """How the stages work together."""

    micro_batches: int | None = Field(default=None, ge=1)
    """Micro-batches of an optimizer step; ``gradient_accumulation_steps`` if omitted."""

    schedule: Schedule | None = None
    """``1f1b`` or ``pipemare``; that of ``wavemare.pipeline`` if omitted."""


class SplitNames(Section):
    """Which modules are split."""

    size: int = Field(ge=1)
    """Over how many consecutive ranks."""

    modules: list[str] = Field(min_length=1)
    """Patterns of the modules; all blocks of a model must be among them."""


class ParallelConfig(Section):
    """Annotations of a model by names and patterns, or a plan that was made before."""

    stages: PositiveInt | str | list[list[str]] | dict[str, list[str]] | None = None
    """Patterns of the modules of each stage, by its name or as a list; a layout string of
    Megatron-LM; or a number of stages, which are balanced by parameters."""

    split: PositiveInt | SplitNames | None = None
    """Over how many consecutive ranks each layer is split."""

    replica: Literal["rest"] | PositiveInt | None = None
    """``rest``: all processes left over replicate the model; or how many replicas there must be."""

    pipeline: PipelineNames = PipelineNames()
    """See `PipelineNames`."""

    colocated: list[str] = Field(default=[])
    """Patterns of output heads that are split over the data-parallel ranks."""

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
