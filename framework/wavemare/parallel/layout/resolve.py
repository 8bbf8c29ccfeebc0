# SPDX-License-Identifier: Apache-2.0
"""From the annotations of modules to what they say of the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from wavemare.errors import PlanError
from wavemare.parallel.layout.annotations import own_region
from wavemare.parallel.layout.chains import NamedChain
from wavemare.parallel.layout.regions import Region, combined

__all__ = ["Regions", "check_split", "regions_of", "stage_cuts"]


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
        reason = f"{where}, but devices that a pipeline leaves over replicate it by themselves"
        raise PlanError("replica", str(second), reason, "Put it around the stages, or make it one")
    if split is not None and replicas and split.enclosing("replica") is None:
        where = f"{split} at {split.place} stands beside {replicas[0]} at {replicas[0].place}"
        reason = f"{where}, but all ranks share the grid of splits and replicas"
        remedy = "Put the split into the replica"
        raise PlanError("split", str(split), reason, remedy)


def stage_cuts(regions: Regions, chain: NamedChain) -> tuple[int, ...]:
    """Return the bounds of the stages: layers without a region join the stage around them.

    Raises:
        PlanError: The stages are not consecutive layers, or a layer could belong to two.
    """
    found = [_stage_of(regions, names) for names in chain.modules]
    known = [stage for stage in found if stage is not None]
    filled: list[Region] = []
    for index, own in enumerate(found):
        stage = own
        if stage is None:
            before = filled[-1] if filled else None
            after = next((s for s in found[index:] if s is not None), None)
            if before is not None and after is not None and before.name != after.name:
                layer = ", ".join(chain.modules[index]) or f"layer {index}"
                reason = f"it is between {before} at {before.place} and {after} at {after.place}"
                raise PlanError("stage", layer, reason, "Annotate it too")
            stage = before or after or known[0]
        filled.append(stage)
    starts = [i for i, s in enumerate(filled) if i == 0 or s.name != filled[i - 1].name]
    seen: dict[str | None, Region] = {}
    for start in starts:
        stage = filled[start]
        if stage.name in seen:
            between, first = filled[start - 1], seen[stage.name]
            reason = (
                f"{stage} by {first.place} goes on by {stage.place} after {between} by "
                f"{between.place}: a stage is consecutive layers"
            )
            raise PlanError("stage", stage.name, reason, "Move the modules to one side")
        seen[stage.name] = stage
    for region in regions.of("stage"):
        if region.name not in seen:
            reason = f"the stage of {region.place} holds no layer of its own"
            raise PlanError("stage", region.name, reason, "Name whole layers, or leave it out")
    return (*starts, len(filled))


def _stage_of(regions: Regions, names: Sequence[str]) -> Region | None:
    stages = [
        stage
        for name in names
        if (region := regions.by_module.get(name)) is not None
        if (stage := region.enclosing("stage")) is not None
    ]
    for stage in stages[1:]:
        first = stages[0]
        if stage.name != first.name:
            reason = (
                f"{', '.join(names)} are one layer, but {first} at {first.place} has one of them "
                f"and {stage} at {stage.place} another"
            )
            raise PlanError("stage", stage.name, reason, "Put them into one stage")
    return stages[0] if stages else None


def check_split(regions: Regions, chain: NamedChain) -> None:
    """Check that a split holds all blocks: the ranks that share one layer share each.

    Raises:
        PlanError: A block is not split.
    """
    split = regions.split
    assert split is not None
    for index in chain.blocks:
        for name in chain.modules[index]:
            region = regions.by_module.get(name)
            own = region.enclosing("split") if region is not None else None
            if own is None:
                where = f"{name} at {region.place}" if region is not None else name
                reason = f"{split} at {split.place} leaves {where} whole, and blocks are alike"
                raise PlanError("split", str(split), reason, "Split all blocks or none")
