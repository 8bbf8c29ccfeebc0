# SPDX-License-Identifier: Apache-2.0
"""Annotations: what they say of some modules, where they stand, and what may hold what.

Whale's four primitives (Jia et al., ATC 2022) as scopes around construction, which make regions.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from wavemare.errors import PlanError, check_number, did_you_mean
from wavemare.pipeline.plan.schedules import TRAINED

Kind = Literal["replica", "stage", "split", "pipeline"]

_HOLDS: dict[Kind, tuple[Kind, ...]] = {
    "replica": ("pipeline", "stage", "split"),
    "pipeline": ("stage", "split"),
    "stage": ("split",),
    "split": (),
}
"""What may stand in a region of each kind."""

_TAG = "_wavemare_region"
_serials = itertools.count()


def next_serial() -> int:
    """Return a number that no region has."""
    return next(_serials)


@dataclass(frozen=True, kw_only=True)
class Region:
    """An annotation that was made once: a scope that was entered, a pattern.

    Args:
        kind: Which primitive.
        place: Where it stands: ``FILE:LINE``, or the key and the pattern of a mapping.
        parent: The region around it.
        name: Of a stage.
        size: Ranks of a split; number of replicas, None for as many as the processes allow.
        micro_batches: Of a pipeline, per optimizer step.
        schedule: Of a pipeline, ``1f1b``, ``zb-h1`` or ``pipemare``.
        stages: Of a pipeline that is cut by itself, how many.
    """

    kind: Kind
    place: str
    parent: Region | None = None
    name: str | None = None
    size: int | None = None
    micro_batches: int | None = None
    schedule: str | None = None
    stages: int | None = None
    serial: int = field(default_factory=next_serial)
    """Tells regions of one place apart, also in copies of a model."""

    @property
    def around(self) -> Iterator[Region]:
        """The region itself and all around it, from the innermost outwards."""
        region: Region | None = self
        while region is not None:
            yield region
            region = region.parent

    def enclosing(self, kind: Kind) -> Region | None:
        """Return the innermost region of a kind that this one is or stands in."""
        return next((region for region in self.around if region.kind == kind), None)

    def within(self, other: Region) -> bool:
        """Whether the region is another one or stands in it."""
        return any(region.serial == other.serial for region in self.around)

    def __str__(self) -> str:
        label = {"stage": self.name, "split": self.size}.get(self.kind)
        return f"{self.kind}({label!r})" if label is not None else f"{self.kind}()"


def check_nesting(outer: Region, inner: Region) -> None:
    """Check that a region may stand directly in another one.

    Raises:
        PlanError: It may not; both places are named.
    """
    if inner.kind not in _HOLDS[outer.kind]:
        raise _refusal(outer, inner, *_why_not(outer, inner))
    if outer.kind == "pipeline" and inner.kind == "split" and outer.stages is None:
        reason = "a pipeline is made of stages, and these may be split"
        raise _refusal(outer, inner, reason, "Put a stage between them, or give pipeline(stages=N)")
    if outer.kind == "pipeline" and inner.kind == "stage" and outer.stages is not None:
        reason = f"the pipeline cuts itself into {outer.stages} stages"
        raise _refusal(outer, inner, reason, "Leave out pipeline's stages, or the scopes")


def _why_not(outer: Region, inner: Region) -> tuple[str, str]:
    if outer.kind == "split":
        return "a split contains no other annotation", "End the split first"
    if outer.kind == inner.kind:
        return f"a {outer.kind} cannot contain a {inner.kind}", "Leave out one of the two"
    if inner.kind == "pipeline" and outer.kind == "stage":
        return "a pipeline does not consist of pipelines", "Put the stages into one pipeline"
    return "devices that a pipeline leaves over replicate it automatically", "Leave out replica"


def _refusal(outer: Region, inner: Region, reason: str, remedy: str) -> PlanError:
    where = f"{inner} at {inner.place} is inside {outer} at {outer.place}"
    return PlanError(inner.kind, str(inner), f"{where}, but {reason}", remedy)


def combined(outer: Region | None, own: Region | None) -> Region | None:
    """Return the region of a module in another one: the innermost of the two.

    Args:
        outer: The region of the modules around.
        own: What the module itself was annotated with.

    Raises:
        PlanError: The two do not go together.
    """
    if outer is None or own is None:
        return own if outer is None else outer
    if outer.within(own):
        return outer
    if own.within(outer):
        return own
    # Annotated apart from each other: one is put into the other.
    stage, own_stage = outer.enclosing("stage"), own.enclosing("stage")
    if stage is not None and own_stage is not None and stage.name == own_stage.name:
        return own if own.kind == "split" or outer.kind != "split" else outer
    grafted = outer
    for region in reversed(list(own.around)):
        known = next((r for r in outer.around if r.serial == region.serial), None)
        if known is None:
            check_nesting(grafted, region)
            grafted = replace(region, parent=grafted)
    return grafted


def own_region(module: nn.Module) -> Region | None:
    """Return what a module itself was annotated with."""
    return module.__dict__.get(_TAG)


def set_region(module: nn.Module, region: Region | None) -> None:
    """Annotate a module itself."""
    setattr(module, _TAG, region)


@dataclass(frozen=True)
class Regions:
    """What a model's annotations say.

    Args:
        by_module: The region of each annotated module, by its name; "" is the model.
    """

    by_module: Mapping[str, Region]

    @property
    def all(self) -> list[Region]:
        """All regions, also those around others, each once."""
        found = {r.serial: r for region in self.by_module.values() for r in region.around}
        return list(found.values())

    def of(self, kind: str) -> list[Region]:
        """Return the regions of a kind."""
        return [region for region in self.all if region.kind == kind]

    @property
    def split(self) -> Region | None:
        """The split over consecutive ranks.

        Raises:
            PlanError: There are several sizes.
        """
        return _one(self.of("split"), "size", "all stages are split alike")

    @property
    def replicas(self) -> Region | None:
        """The region that says how many replicas there must be, if one does.

        Raises:
            PlanError: There are several numbers.
        """
        counted = [*self.of("replica"), *self.of("pipeline")]
        return _one([r for r in counted if r.size is not None], "size", "replicas are alike")

    @property
    def pipeline(self) -> Region | None:
        """The pipeline, if there is one.

        Raises:
            PlanError: There are several.
        """
        return _one(
            self.of("pipeline"), "place", "a model is one pipeline; leave out all scopes but one"
        )


def _one(regions: Sequence[Region], attribute: str, reason: str) -> Region | None:
    for region in regions[1:]:
        first = regions[0]
        if getattr(region, attribute) != getattr(first, attribute):
            where = f"{first} at {first.place} and {region} at {region.place} differ"
            raise PlanError(region.kind, str(region), f"{where}: {reason}", "Give both the same")
    return regions[0] if regions else None


def regions_of(model: nn.Module) -> Regions:
    """Return the regions of a model.

    Raises:
        PlanError: Two of them do not go together.
    """
    found: dict[str, Region] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        outer = found.get(name.rpartition(".")[0]) if name else None
        region = combined(outer, own_region(module))
        if region is not None:
            found[name] = region
    regions = Regions(found)
    _check_beside(regions)
    return regions


def _check_beside(regions: Regions) -> None:
    """Refuse regions beside each other that would need devices of their own."""
    stages, split = regions.of("stage"), regions.split
    replicas = regions.of("replica")
    beside = [(s, r) for s in stages for r in replicas if not s.within(r)]
    if beside:
        first, second = beside[0]
        where = f"{second} at {second.place} stands beside {first} at {first.place}"
        reason = f"{where}, but devices that a pipeline leaves over replicate it automatically"
        raise PlanError("replica", str(second), reason, "Put it around the stages, or use stage")
    if split is not None and replicas and split.enclosing("replica") is None:
        where = f"{split} at {split.place} stands beside {replicas[0]} at {replicas[0].place}"
        reason = f"{where}, but all ranks share the grid of splits and replicas"
        raise PlanError("split", str(split), reason, "Put the split into the replica")


PLAN = "_wavemare_plan"
"""Attribute of a model that is to be run by a layout."""

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
