# SPDX-License-Identifier: Apache-2.0
"""Annotations by names: a mapping from regions to patterns of modules, and what these match."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

from torch import nn

from wavemare.engine.config.sections import ParallelConfig, SplitNames
from wavemare.errors import ModelError, PlanError, did_you_mean
from wavemare.models.families import family_of
from wavemare.models.layers import PipelineLayer, TiedHead
from wavemare.parallel.layout.annotations import PLAN, Region, own_region, tag
from wavemare.parallel.layout.layout import Layout

_RANGE = re.compile(r"(\d+)-(\d+)")
_MOST_DIGITS = 5
_EMBEDDINGS = ("embed", "embedding", "embeddings", "tok_embeddings")
_BLOCKS = ("layers", "blocks")
_HEADS = ("head", "output")


@dataclass(frozen=True)
class NamedChain:
    """The chain of `wavemare.models.to_pipeline`.

    Args:
        layers: The layers.
        modules: For each of them the names of the model's modules that it holds.
    """

    layers: tuple[PipelineLayer, ...]
    modules: tuple[tuple[str, ...], ...]

    @property
    def blocks(self) -> list[int]:
        """Which layers are the repeated blocks."""
        return [index for index, layer in enumerate(self.layers) if layer.is_block]

    def known_as(self, name: str) -> list[int] | None:
        """Return the layers that have a name in all models; None if it is none.

        ``embed`` are those before the blocks, ``layers`` the blocks and ``layers.N`` one of them,
        ``head`` the last layer and ``norm`` those between. torchtitan's ``tok_embeddings`` and
        ``output`` are understood as well.
        """
        first, last = self.blocks[0], self.blocks[-1]
        group, _, number = name.partition(".")
        if group in _BLOCKS and number in ("", "*"):
            return self.blocks
        if group in _BLOCKS and number.isdecimal() and int(number) < len(self.blocks):
            return [self.blocks[int(number)]]
        if name in _EMBEDDINGS:
            return list(range(first))
        if name in _HEADS:
            return [len(self.layers) - 1]
        if name == "norm":
            return list(range(last + 1, len(self.layers) - 1))
        return None


def named_chain(model: Any, inputs: Sequence[str] | None = None) -> NamedChain:
    """Return the layers of a transformers model and their modules' names.

    Args:
        model: The model, whole.
        inputs: ``wavemare.pipeline.inputs``.

    Raises:
        ModelError: Models of this class cannot be cut.
    """
    family = family_of(model)
    layers = tuple(family.chain(model, family.declared(inputs)))
    names = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
    return NamedChain(layers, tuple(_names(model, layer, names) for layer in layers))


def _names(model: Any, layer: PipelineLayer, names: dict[int, str]) -> tuple[str, ...]:
    held = list(layer.children())
    if isinstance(layer, TiedHead):  # it holds but a weight of the module whose part it plays
        held = [model.get_output_embeddings()]
    return tuple(names[id(module)] for module in held if id(module) in names)


def annotate(model: Any, layout: Mapping[str, Any] | Layout, *, key: str = "mapping") -> Any:
    """Annotate a model's modules by their names, or give it a layout to be run by.

    A pattern is a module's name, or its end: ``h.0`` is ``transformer.h.0``; where several modules
    end so, the outermost are meant. A part of it may have ``*`` and ``?``, or be a range, ``0-11``
    with both ends. ``re:EXPRESSION`` is a regular expression for whole names. Beside the model's
    own names there are ``embed``, ``layers.N``, ``norm`` and ``head``; see `NamedChain.known_as`.

    Args:
        model: The model, which is returned.
        layout: A layout, or a mapping with the keys of `ParallelConfig`.
        key: What messages call the mapping.

    Returns:
        The model.

    Raises:
        ConfigError: A key or value of the mapping is invalid.
        PlanError: A pattern matches nothing, or a module gets two regions that do not go together.
        ModelError: The model cannot be cut into stages.
    """
    if isinstance(layout, Layout):
        setattr(model, PLAN, layout)
        return model
    names = ParallelConfig.parse(layout, key)
    if names.plan is not None:
        reason = "a mapping of names does not hold a layout"
        raise PlanError(f"{key}.plan", names.plan, reason, "Give the layout itself to annotate")
    _Annotator(model, key).apply(names)
    return model


class _Annotator:
    """Puts the regions of a mapping on a model.

    Args:
        model: The model.
        key: What messages call the mapping.
    """

    def __init__(self, model: Any, key: str) -> None:
        self._model, self._key = model, key
        try:
            self._chain: NamedChain | None = named_chain(model)
        except ModelError as error:
            self._chain, self._no_chain = None, error

    def apply(self, names: ParallelConfig) -> None:
        """Annotate the model."""
        if names.stages is not None:
            self._stages(names)
        elif "pipeline" in names.model_fields_set:
            reason = "a pipeline has stages"
            raise PlanError(f"{self._key}.pipeline", {}, reason, f"Give {self._key}.stages")
        elif names.replica is not None:
            count = names.replica if isinstance(names.replica, int) else None
            place = self._place("replica", count or "rest")
            tag(self._model, Region(kind="replica", place=place, size=count))
        if names.split is not None:
            self._split(names.split)

    def _stages(self, names: ParallelConfig) -> None:
        stages = names.stages
        automatic = stages if isinstance(stages, int) else None
        pipeline = Region(
            kind="pipeline",
            place=self._place("stages", automatic) if automatic else f"{self._key}.pipeline",
            micro_batches=names.pipeline.micro_batches,
            schedule=names.pipeline.schedule,
            stages=automatic,
            size=names.replica if isinstance(names.replica, int) else None,
        )
        modules = self._all_modules()
        if automatic is not None:
            for module in modules:
                tag(module, pipeline)
            return
        assert stages is not None
        assert not isinstance(stages, int)
        listed = {f"s{n}": p for n, p in enumerate(stages)} if isinstance(stages, list) else stages
        for stage, patterns in listed.items():
            for pattern in patterns:
                place = self._place(f"stages.{stage}", pattern)
                region = Region(kind="stage", name=stage, parent=pipeline, place=place)
                for module in self._modules(pattern, f"{self._key}.stages.{stage}"):
                    tag(module, region)

    def _split(self, split: int | SplitNames) -> None:
        if isinstance(split, int):
            modules, size, place = self._all_modules(), split, self._place("split", split)
        else:
            key, size = f"{self._key}.split.modules", split.size
            modules = [m for pattern in split.modules for m in self._modules(pattern, key)]
            place = self._place("split.modules", ", ".join(split.modules))
        for module in modules:
            region = own_region(module)
            tag(module, Region(kind="split", place=place, parent=region, size=size))

    def _all_modules(self) -> list[nn.Module]:
        """Return the modules of all layers."""
        if self._chain is None:
            raise self._no_chain
        return [self._model.get_submodule(name) for names in self._chain.modules for name in names]

    def _modules(self, pattern: str, key: str) -> list[nn.Module]:
        found = matches(self._model, self._chain, pattern, key)
        return [self._model.get_submodule(name) for name in found]

    def _place(self, name: str, value: object) -> str:
        return f"{self._key}.{name} = {value!r}"


def matches(model: nn.Module, chain: NamedChain | None, pattern: str, key: str) -> list[str]:
    """Return the names of the modules that a pattern of `annotate` names.

    Args:
        model: The model.
        chain: Its layers, if it can be cut.
        pattern: The pattern.
        key: Where it stands, for messages.

    Raises:
        PlanError: There is no such module, or the regular expression is invalid.
    """
    names = [name for name, _ in model.named_modules() if name]
    if pattern.startswith("re:"):
        try:
            expression = re.compile(pattern[3:])
        except re.error as error:
            reason = f"the expression is invalid ({error})"
            raise PlanError(key, pattern, reason, "Correct it") from error
        found = [name for name in names if expression.fullmatch(name)]
        if not found:
            reason = "no module's whole name matches it"
            raise PlanError(key, pattern, reason, f"Names are such as {names[-1]!r}")
        return found
    return [
        name for single in _expanded(pattern, key) for name in _ending(names, chain, single, key)
    ]


def _expanded(pattern: str, key: str) -> list[str]:
    """Return the patterns of a pattern with ranges, one for each number in them."""
    parts: list[Sequence[str]] = []
    for part in pattern.split("."):
        bounds = _RANGE.fullmatch(part)
        if bounds and max(map(len, bounds.groups())) > _MOST_DIGITS:
            reason = f"the range {part} goes beyond {_MOST_DIGITS} digits"
            raise PlanError(key, pattern, reason, "Name blocks that the model has")
        numbers = range(int(bounds[1]), int(bounds[2]) + 1) if bounds else None
        parts.append([str(number) for number in numbers] if numbers is not None else [part])
    return [".".join(single) for single in product(*parts)]


def _ending(names: list[str], chain: NamedChain | None, pattern: str, key: str) -> list[str]:
    wanted = pattern.split(".")
    found = [
        parts
        for parts in (name.split(".") for name in names)
        if len(parts) >= len(wanted) and all(map(fnmatchcase, parts[-len(wanted) :], wanted))
    ]
    if found:
        depth = min(map(len, found))
        return [".".join(parts) for parts in found if len(parts) == depth]
    layers = chain.known_as(pattern) if chain is not None else None
    if layers is None or chain is None:
        raise PlanError(key, pattern, "no module has such a name", _nearest(names, chain, pattern))
    return [name for layer in layers for name in chain.modules[layer]]


def _nearest(names: list[str], chain: NamedChain | None, pattern: str) -> str:
    if chain is not None:
        if pattern.rpartition(".")[2].isdecimal():
            return f"The model has {len(chain.blocks)} blocks, numbered from 0"
        names = [*(n for own in chain.modules for n in own), "embed", "layers", "norm", "head"]
    return did_you_mean(pattern, names)
