# SPDX-License-Identifier: Apache-2.0
"""Annotations as scopes around construction."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from wavemare.errors import PlanError, check_number, did_you_mean
from wavemare.parallel.layout.regions import (
    Region,
    check_nesting,
    combined,
    next_serial,
    own_region,
    set_region,
)
from wavemare.pipeline.config import TRAINED

PLAN = "_wavemare_plan"
"""Attribute of a model that is to be run by a plan."""

_open: ContextVar[tuple[Region, ...]] = ContextVar("open_regions", default=())


class Scope:
    """``with`` block that annotates the modules made, or assigned, in it; the innermost counts.

    Args:
        region: What the modules are annotated with.
    """

    def __init__(self, region: Region) -> None:
        self._region = region
        self._entered: list[tuple[Any, Any]] = []

    def __enter__(self) -> Region:
        around = _open.get()
        region = replace(self._region, parent=around[-1] if around else None, serial=next_serial())
        if around:
            check_nesting(around[-1], region)

        def annotate(module: nn.Module, name: str, child: nn.Module | None) -> None:
            if child is not None and _open.get()[-1:] == (region,):
                tag(child, region)

        token = _open.set((*around, region))
        self._entered.append((token, register_module_module_registration_hook(annotate)))
        return region

    def __exit__(self, *_: object) -> None:
        token, hook = self._entered.pop()
        hook.remove()
        _open.reset(token)


def replica(count: int | None = None) -> Scope:
    """Replicate the modules: data parallel.

    Args:
        count: Number of replicas; as many as the processes allow if omitted.

    Raises:
        PlanError: The number is below 1.
    """
    return Scope(Region(kind="replica", place=_caller(), size=_whole("replica", count)))


def stage(name: str | None = None) -> Scope:
    """Make the modules a stage of a pipeline, or part of the stage of that name.

    Args:
        name: The stage's; one of its own if omitted.
    """
    name = name if name is not None else f"stage {next_serial()}"
    return Scope(Region(kind="stage", place=_caller(), name=name))


def split(size: int) -> Scope:
    """Split the modules' tensors over ranks.

    Args:
        size: Number of consecutive ranks that share each tensor.

    Raises:
        PlanError: The number is below 1.
    """
    return Scope(Region(kind="split", place=_caller(), size=_whole("split", size)))


def pipeline(
    micro_batches: int | None = None, *, schedule: str | None = None, stages: int | None = None
) -> Scope:
    """Make the stages in it a pipeline, which is replicated by the processes left over.

    Args:
        micro_batches: Per optimizer step; ``gradient_accumulation_steps`` if omitted.
        schedule: As in the configuration, whose own it is if omitted.
        stages: In place of scopes: cut the model into so many, balanced by parameters.

    Raises:
        PlanError: There is no such schedule, or a number is below 1.
    """
    if schedule is not None and schedule not in TRAINED:
        remedy = did_you_mean(schedule, TRAINED)
        raise PlanError("pipeline", schedule, "there is no such schedule", remedy)
    region = Region(
        kind="pipeline",
        place=_caller(),
        micro_batches=_whole("pipeline", micro_batches),
        schedule=schedule,
        stages=_whole("pipeline", stages),
    )
    return Scope(region)


def tag(module: nn.Module, region: Region) -> None:
    """Annotate a module, unless it is annotated from further inside.

    Raises:
        PlanError: It belongs to another stage already, or its region may not stand in this one.
    """
    known = own_region(module)
    if known is not None and known.within(region):
        return
    theirs = known.enclosing("stage") if known is not None else None
    ours = region.enclosing("stage")
    if theirs is not None and ours is not None and theirs.name != ours.name:
        kind = type(module).__name__
        reason = f"this {kind} is in {theirs} by {theirs.place} and in {ours} by {ours.place}"
        raise PlanError("stage", ours.name, reason, "Name it in one stage")
    set_region(module, combined(region, known))


def is_annotated(model: Any) -> bool:
    """Whether a module of a model has an annotation."""
    return isinstance(model, nn.Module) and any(own_region(m) is not None for m in model.modules())


def _caller() -> str:
    """Where the user's program made a scope, as ``FILE:LINE``."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("wavemare"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _whole(key: str, value: int | None) -> int | None:
    if value is not None:
        check_number(PlanError, key, value, 1, whole=True)
    return value
