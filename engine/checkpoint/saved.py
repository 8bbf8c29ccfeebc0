# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's weights and optimizer states, by weight, whatever ranks and stages wrote them.

DeepSpeed's universal checkpoints have for each weight a file of its fp32 master and of each state.
`Saved` gives the same values from the files of a save as they are, its own or stock DeepSpeed's.
Files are mapped, so that a rank reads only what it asks for, one weight at a time.
"""

from __future__ import annotations

import math
import re
import zipfile
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    BUFFER_NAMES,
    FP32_FLAT_GROUPS,
    FROZEN_PARAM_FRAGMENTS,
    FROZEN_PARAM_SHAPES,
    LOSS_SCALER,
    OPTIMIZER_STATE_DICT,
    PARAM_SHAPES,
    PARAM_SLICE_MAPPINGS,
    SINGLE_PARTITION_OF_FP32_GROUPS,
    ZERO_STAGE,
)
from torch import Tensor

from wavemare.engine.checkpoint.files import read_file
from wavemare.engine.checkpoint.manifest import rank_file
from wavemare.engine.config.shape import ZERO_WEIGHTS
from wavemare.errors import CheckpointError

_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_LAYER = re.compile(r"layer_(\d+)-model_\d+-model_states\.pt|layer_(\d+)-model_states\.pt")
_COUNTS = {"step", "mu_product"}
"""States of one number, also of a weight that has a single element."""
_MATRICES = "tensors"
"""Where an optimizer of matrices keeps the states of the tensors of a partition, by number."""
_WHOLE_FILE = "Resume from another checkpoint"
_SAME_SIZES = "Resume with the ranks, stages and ZeRO stage of the run that saved it"

_Place = tuple[int, int]
"""Of a file: data rank, and rank within one model."""


@dataclass(frozen=True, eq=False)
class _Elements:
    """Consecutive elements of a weight: ``values``, flat, begin at its element ``first``."""

    first: int
    values: Tensor


class Saved:
    """A checkpoint's weights and states.

    Names are those of the whole model where the save has told them, see `weight_names`; else those
    of the stage's modules.

    Args:
        folder: Of one tag.
        manifest: Of `read_manifest`; None if stock DeepSpeed wrote the folder.

    Attributes:
        common: What the first file of weights has beside them: schedule, steps, client state.
        path: This file.
        loss_scaler: That of ZeRO in fp16; None without.
        shapes: By name, of all weights and buffers.
        held: The names of the weights that the optimizer steps.

    Raises:
        CheckpointError: A rank's file is missing, or the files do not say whose a state is.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any] | None) -> None:
        self.folder = folder
        self._manifest = manifest or {}
        self.tells_names = "names" in self._manifest
        self._names: Mapping[str, str] = self._manifest.get("names") or {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.held: set[str] = set()
        self._weights: dict[str, list[_Elements]] = defaultdict(list)
        self._masters: dict[str, list[_Elements]] = defaultdict(list)
        self._states: dict[str, dict[str, list[_Elements]]] = defaultdict(dict)
        self._others: dict[str, dict[str, Any]] = defaultdict(dict)
        self._groups: dict[str, tuple[int, int]] = {}
        self._settings: dict[tuple[int, int], Mapping[str, Any]] = {}
        self._model_files = {place: _map(path) for place, path in _places(folder, _MODEL).items()}
        if not self._model_files:
            raise self._error("it has no file mp_rank_*_model_states.pt", _WHOLE_FILE)
        first = min(self._model_files)
        self.common = dict(self._model_files[first])
        self.path = _places(folder, _MODEL)[first]
        self.loss_scaler: Any = None
        self._optimizer_files = {
            place: _map(path) for place, path in _places(folder, _OPTIMIZER).items()
        }
        spread = self._zero_stage() == ZERO_WEIGHTS
        lost = _lost(self._model_files, self._optimizer_files, self.common, spread=spread)
        if lost is not None:
            raise self._error(lost, _WHOLE_FILE)
        self._read_weights()
        for place in sorted(self._optimizer_files, key=lambda place: place[::-1]):
            self._read_optimizer(place, self._optimizer_files[place][OPTIMIZER_STATE_DICT])
        if not self._optimizer_files:
            self._read_whole_optimizers()
        self._check_elements()

    # --- what there is ----------------------------------------------------------------------------

    def weight(self, name: str) -> Tensor:
        """Return a weight or buffer, flat."""
        found = self._weights.get(name) or self._masters[name]
        return self._cut(name, found, 0, math.prod(self.shapes[name]))

    def master(self, name: str, first: int, count: int) -> Tensor:
        """Return elements of what the optimizer steps: of the fp32 master, or of the weight."""
        return self._cut(name, self._masters.get(name) or self._weights[name], first, count)

    def averages(self, name: str, first: int, count: int) -> dict[str, Tensor]:
        """Return elements of those states that have one for each element of the weight, flat."""
        states = self._states.get(name, {})
        return {key: self._cut(name, parts, first, count) for key, parts in states.items()}

    def others(self, name: str) -> dict[str, Any]:
        """Return the other states of a weight: counts of steps, bases of matrices."""
        return self._others.get(name, {})

    def settings(self, name: str) -> Mapping[str, Any]:
        """Return the settings of the parameter group of a weight."""
        return self._settings[self._groups[name]]

    def group_of(self, name: str) -> tuple[int, int]:
        """Return the rank within the model that steps a weight, and the number of its group."""
        return self._groups[name]

    def groups(self, rank: int) -> int:
        """Return how many parameter groups a rank within the model has."""
        return sum(place == rank for place, _ in self._settings)

    def schedule(self, rank: int) -> Any:
        """Return the state of the learning-rate schedule on a rank within the model."""
        files = (state for place, state in self._model_files.items() if place[1] == rank)
        return next(files).get("lr_scheduler")

    def find(self, own: str, name: str) -> str | None:
        """Return the name here of a weight; None if it is not here.

        Args:
            own: Its name in this run's module.
            name: Its name in the whole model.
        """
        candidates = (name,) if self.tells_names else (own, name)
        return next((each for each in candidates if each in self.shapes), None)

    # --- files ------------------------------------------------------------------------------------

    def _layer_files(self) -> list[tuple[int, Path]]:
        found = []
        for path in sorted(self.folder.glob("layer_*.pt")):
            if match := _LAYER.fullmatch(path.name):
                found.append((int(match[1] or match[2]), path))
        return found

    def _zero_stage(self) -> int:
        told = self._manifest.get("topology", {}).get("zero_stage")
        first: Any = next(iter(self._optimizer_files.values()), {})
        return _stage_of(self.common, first) if told is None else int(told)

    # --- weights ----------------------------------------------------------------------------------

    def _read_weights(self) -> None:
        for number, path in self._layer_files():
            for own, value in _map(path).items():
                self._take_weight(self._name(f"{number}.{own}"), value)
        spread = self._zero_stage() == ZERO_WEIGHTS  # it has left empty tensors for weights
        for _, state in sorted(self._model_files.items()):
            for own, value in (state.get("module") or {}).items():
                if isinstance(value, Tensor) and (value.numel() or not spread):
                    self._take_weight(self._name(own), value)
        self._read_frozen()

    def _take_weight(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor) and name not in self._weights:
            self.shapes[name] = tuple(value.shape)
            self._weights[name] = [_Elements(0, value.detach().reshape(-1))]

    def _read_frozen(self) -> None:
        """Take the weights that ZeRO 3 spreads and no optimizer holds."""
        reached: dict[str, int] = defaultdict(int)
        for _, state in sorted(self._model_files.items()):
            shapes = state.get(FROZEN_PARAM_SHAPES) or {}
            for own, value in (state.get(FROZEN_PARAM_FRAGMENTS) or {}).items():
                name, size = self._name(own), math.prod(shapes[own])
                if name in self._weights and not reached[name]:
                    continue
                self.shapes[name] = tuple(shapes[own])
                first = reached[name]
                part = value.reshape(-1)[: size - first]
                self._weights[name].append(_Elements(first, part))
                reached[name] += part.numel()

    # --- optimizers -------------------------------------------------------------------------------

    def _read_optimizer(self, place: _Place, state: Mapping[str, Any]) -> None:
        """Take what one rank of ZeRO, or of a pipeline in bf16, has saved."""
        data, model = place
        self.loss_scaler = self.loss_scaler or state.get(LOSS_SCALER)
        if isinstance(state.get(BASE_OPTIMIZER_STATE), list):
            reason = "it was saved with elastic_checkpoint, which keeps no learning rates"
            raise self._error(reason, "Save it without that key")
        spread = self._zero_stage() == ZERO_WEIGHTS
        basic = state[OPTIMIZER_STATE_DICT if spread else BASE_OPTIMIZER_STATE]
        flats = state[FP32_FLAT_GROUPS if spread else SINGLE_PARTITION_OF_FP32_GROUPS]
        shapes = _groups(self._model_files[data if spread else 0, model].get(PARAM_SHAPES))
        groups = _group_numbers(basic)
        for number, flat in enumerate(flats):
            row = shapes[number] if number < len(shapes) else {}
            for own, shape in row.items():
                self.shapes.setdefault(self._name(own), tuple(shape))
            addresses: Any = None if spread else state[PARAM_SLICE_MAPPINGS][number]
            own_states = basic["state"].get(number, {})
            spans = _of_zero_3(row, place[0], self._ranks()) if addresses is None else None
            found = spans if spans is not None else self._of_partition(row, addresses, model)
            for index, own, start, first, count in found:
                if self._takes(own, model, groups[number], basic):
                    self._take(self._name(own), flat, own_states, index, start, first, count)

    def _of_partition(
        self, row: Mapping[str, Any], addresses: Mapping[str, Any], model: int
    ) -> Iterator[tuple[int, str, int, int, int]]:
        """Yield the tensors of a flat partition: number, name, start in it, first and count."""
        numbers = {own: index for index, own in enumerate(row)}
        for own, address in addresses.items():
            parts = self._masters.get(self._name(own), [])
            known = self._groups.get(self._name(own), (model, 0))[0] == model
            first = sum(part.values.numel() for part in parts) if known else 0
            yield numbers.get(own, -1), own, int(address.start), first, int(address.numel)

    def _read_whole_optimizers(self) -> None:
        """Take what ranks without ZeRO have saved: whole tensors, in the order of the optimizer."""
        for (_, model), state in sorted(self._model_files.items()):
            outer = state.get("optimizer")
            if not outer:
                continue
            basic = outer.get(OPTIMIZER_STATE_DICT, outer)
            groups, names = _group_numbers(basic), self._order(model, basic)
            flats = outer.get("fp32_groups_flat")
            masters = [m for group in outer.get("fp32_groups") or () for m in group]
            for number, own in enumerate(name for group in names for name in group):
                if flats is not None or not self._takes(own, model, groups[number], basic):
                    continue
                name = self._name(own)
                master = masters[number].reshape(-1) if masters else None
                count = math.prod(self.shapes[name])
                self._take(name, master, basic["state"].get(number, {}), None, 0, 0, count)
            for number, flat in enumerate(flats or ()):
                sizes = [math.prod(self.shapes[self._name(own)]) for own in names[number]]
                starts = [0, *accumulate(sizes)]
                for own, start, count in zip(names[number], starts, sizes, strict=False):
                    if self._takes(own, model, number, basic):
                        own_states = basic["state"].get(number, {})
                        self._take(self._name(own), flat, own_states, -1, start, 0, count)

    def _order(self, model: int, basic: Mapping[str, Any]) -> list[list[str]]:
        """Return the weights of a rank's optimizer by group, in its order.

        Raises:
            CheckpointError: The files do not say.
        """
        topology = self._manifest.get("topology", {})
        path = self.folder / rank_file(model * int(topology.get("data", 1)))
        if path.is_file() and (held := read_file(path).get("held")) is not None:
            return [list(group) for group in held]
        names = [] if self._layer_files() else _trained_order(self._model_files[0, model])
        sizes = [len(group["params"]) for group in basic["param_groups"]]
        fits = (
            len(sizes) == 1
            and len(names) == sizes[0]
            and all(
                _fits(basic["state"].get(number, {}), self.shapes[self._name(own)])
                for number, own in enumerate(names)
            )
        )
        if not fits:
            reason = (
                "without ZeRO, its files do not say which weights the optimizer's states are of"
            )
            raise self._error(reason, f"{_SAME_SIZES}, and save once from there")
        return [names]

    def _takes(self, own: str, model: int, group: int, basic: Mapping[str, Any]) -> bool:
        """Note the group of a weight; return whether this rank's states of it are taken.

        Stages that share a tied weight all have them; those of the first one are taken.
        """
        self._settings.setdefault((model, group), basic["param_groups"][group])
        self.held.add(self._name(own))
        return self._groups.setdefault(self._name(own), (model, group))[0] == model

    def _take(
        self,
        name: str,
        flat: Tensor | None,
        state: Mapping[str, Any],
        number: int | None,
        start: int,
        first: int,
        count: int,
    ) -> None:
        """Take elements of a weight, and their states, from a tensor that the optimizer stepped.

        Args:
            name: Of the weight.
            flat: Of the master weights; None if the optimizer stepped the weight itself.
            state: Of the tensor that was stepped.
            number: Of the weight among those in it; None if it is the weight, in its shape.
            start: Index in it of the first element.
            first: Index of this element in the weight.
            count: How many.
        """
        own, size = slice(start, start + count), math.prod(self.shapes[name])
        if flat is not None:
            self._masters[name].append(_Elements(first, flat.detach().reshape(-1)[own]))
        matrices = state.get(_MATRICES)
        if matrices is not None and number is not None:
            for key, value in matrices.get(number, {}).items():
                if not _has_elements(key, value, size):
                    is_part = isinstance(value, Tensor) and value.dim() and value.numel() == count
                    if not (is_part and key not in _COUNTS):
                        self._others[name][key] = value
                        continue
                whole = value.numel() == size
                self._add(name, key, 0 if whole else first, value.reshape(-1))
        for key, value in state.items():
            if key == _MATRICES:
                continue
            if number is None and _has_elements(key, value, size):
                self._add(name, key, 0, value.reshape(-1))
            elif number is not None and isinstance(value, Tensor) and value.dim():
                self._add(name, key, first, value[own])
            else:
                self._others[name].setdefault(key, value)

    def _add(self, name: str, key: str, first: int, values: Tensor) -> None:
        self._states[name].setdefault(key, []).append(_Elements(first, values))

    def with_states(self) -> set[str]:
        """Return the names of the weights of which there are states: frozen ones have none."""
        return {name for name in self.held if self._states.get(name) or self._others.get(name)}

    # --- the rest ---------------------------------------------------------------------------------

    def _ranks(self) -> int:
        return int(self.common.get("dp_world_size", 1))

    def _name(self, own: str) -> str:
        return self._names.get(own, own)

    def _cut(self, name: str, parts: Sequence[_Elements], first: int, count: int) -> Tensor:
        """Return elements of a weight's master or state: (count,)."""
        found, last = [], first + count
        for part in sorted(parts, key=lambda part: part.first):
            begin, end = part.first, part.first + part.values.numel()
            if max(first, begin) < min(last, end):
                found.append(part.values[max(first - begin, 0) : min(last, end) - begin])
        if sum(part.numel() for part in found) != count:
            raise self._error(f"it lacks elements of {name}", _WHOLE_FILE)
        if len(found) == 1:
            return found[0]
        return torch.cat(found) if found else torch.empty(0)

    def _check_elements(self) -> None:
        for name in sorted(self.held):
            for parts in (self._masters.get(name), *self._states.get(name, {}).values()):
                if parts and sum(p.values.numel() for p in parts) != math.prod(self.shapes[name]):
                    raise self._error(f"it lacks elements of {name}", _WHOLE_FILE)

    def _error(self, reason: str, remedy: str) -> CheckpointError:
        return CheckpointError("checkpoint", str(self.folder), reason, remedy)


def _map(path: Path) -> Any:
    return read_file(path, mmap=zipfile.is_zipfile(path))


def _stage_of(common: Mapping[str, Any], optimizer_file: Mapping[str, Any]) -> int:
    """Return the stage of ZeRO by which a file of weights, and one of an optimizer, were saved."""
    config = common.get("ds_config")
    given = config.get("zero_optimization") if isinstance(config, Mapping) else None
    if isinstance(given, Mapping) and isinstance(given.get("stage"), int):
        return int(given["stage"])
    return int(optimizer_file.get(OPTIMIZER_STATE_DICT, {}).get(ZERO_STAGE, 0))


def _lost(
    weights: Collection[_Place],
    states: Collection[_Place],
    common: Mapping[str, Any],
    *,
    spread: bool,
) -> str | None:
    """Return which rank's file is missing in a folder, as a reason; None if all are there.

    Args:
        weights: The places that have a file of weights.
        states: Those that have one of the optimizer.
        common: One of the files of weights.
        spread: Whether each data rank has a file of weights, as with ZeRO 3.
    """
    data = int(common.get("dp_world_size", 1))
    models = max(int(common.get("mp_world_size", 1)), *(1 + model for _, model in weights))
    wanted = [(weights, data if spread else 1, "model_states")]
    if states:
        wanted.append((states, data, "optim_states"))
    for found, count, what in wanted:
        lost = [(d, m) for d in range(count) for m in range(models) if (d, m) not in found]
        if lost:
            (rank, place), more = lost[0], len(lost) - 1
            others = f" and {more} others" if more else ""
            return (
                f"the file {what} of data rank {rank}, rank {place} of the model{others} is "
                f"missing: {data * models} ranks saved it"
            )
    return None


def check_stock_files(folder: Path, *, whole: bool) -> None:
    """Refuse stock DeepSpeed's folder that lacks a rank's file: no list says which there were.

    Args:
        folder: Of one tag.
        whole: Whether the optimizer's files are read, too.

    Raises:
        CheckpointError: Naming the file.
    """
    weights, states = (_places(folder, pattern) for pattern in (_MODEL, _OPTIMIZER))
    if not weights:
        return
    common = _map(weights[min(weights)])
    stage = _stage_of(common, _map(states[min(states)]) if states else {})
    lost = _lost(weights, states if whole else {}, common, spread=stage == ZERO_WEIGHTS)
    if lost is not None:
        raise CheckpointError("checkpoint", str(folder), lost, _WHOLE_FILE)


def stock_topology(folder: Path) -> dict[str, Any] | None:
    """Return what `compatibility.topology` would say of stock DeepSpeed's save; None if unknown.

    Keys that the files do not tell are missing: which layers a stage has, for one.
    """
    weights, states = (_places(folder, pattern) for pattern in (_MODEL, _OPTIMIZER))
    if not weights:
        return None
    common = _map(weights[min(weights)])
    models = max(int(common.get("mp_world_size", 1)), *(1 + model for _, model in weights))
    data = int(common.get("dp_world_size", 1))
    stages = next(folder.glob("layer_*-model_states.pt"), None) is not None
    return {
        "world_size": data * models,
        "data": data,
        "pipe": models if stages else 1,
        "model": 1 if stages else models,
        "zero_stage": _stage_of(common, _map(states[min(states)]) if states else {}),
    }


def stock_names(folder: Path, place: tuple[int, int]) -> set[str] | None:
    """Return the weights of which a rank's optimizer had a part; None if no file says.

    Args:
        folder: Of one tag.
        place: Data rank, and rank within one model.
    """
    path = _places(folder, _OPTIMIZER).get(place)
    state = {} if path is None else _map(path)[OPTIMIZER_STATE_DICT]
    mappings = state.get(PARAM_SLICE_MAPPINGS)
    return None if mappings is None else {name for each in mappings for name in each}


def divides_states(folder: Path) -> bool:
    """Return whether the data ranks of a save have parts of the optimizer's states each."""
    return bool(_places(folder, _OPTIMIZER))


def names_another_precision(folder: Path, *, bf16: bool) -> bool:
    """Return whether the files of ZeRO's states have other names than those of a run's precision.

    Args:
        folder: Of one tag.
        bf16: Whether the run is in bf16, of which DeepSpeed's files have names of their own.
    """
    files = _places(folder, _OPTIMIZER).values()
    return any(file.name.startswith("bf16_") != bf16 for file in files)


def _places(folder: Path, pattern: re.Pattern[str]) -> dict[_Place, Path]:
    found = {}
    for path in sorted(folder.glob("*.pt")):
        if match := pattern.fullmatch(path.name):
            found[int(match[1] or 0), int(match[2])] = path
    return found


def _groups(shapes: Any) -> list[Mapping[str, Any]]:
    return [shapes] if isinstance(shapes, Mapping) else list(shapes or ())


def _group_numbers(basic: Mapping[str, Any]) -> dict[int, int]:
    """Return the number of the parameter group of each tensor that an optimizer steps."""
    groups = enumerate(basic["param_groups"])
    return {tensor: number for number, group in groups for tensor in group["params"]}


def _of_zero_3(
    row: Mapping[str, Any], rank: int, ranks: int
) -> Iterator[tuple[int, str, int, int, int]]:
    """Yield the tensors of a flat partition of ZeRO 3, of which each rank has an equal part."""
    start = 0
    for number, (own, shape) in enumerate(row.items()):
        size = math.prod(shape)
        part = -(-size // ranks)
        first = min(rank * part, size)
        yield number, own, start, first, min(part, size - first)
        start += part


def _trained_order(state: Mapping[str, Any]) -> list[str]:
    """Return the names of a model's parameters in their order; tied ones have their first name."""
    buffers, seen, names = set(state.get(BUFFER_NAMES) or ()), set(), []
    for name, value in (state.get("module") or {}).items():
        place = value.untyped_storage().data_ptr(), value.storage_offset()
        if name not in buffers and place not in seen:
            seen.add(place)
            names.append(name)
    return names


def _fits(state: Mapping[str, Any], shape: Sequence[int]) -> bool:
    return all(
        tuple(value.shape) == tuple(shape)
        for key, value in state.items()
        if isinstance(value, Tensor) and key in ("exp_avg", "momentum_buffer")
    )


def _has_elements(key: str, value: Any, size: int) -> bool:
    """Return whether a state has one number for each element of its weight."""
    return key not in _COUNTS and isinstance(value, Tensor) and value.numel() == size
