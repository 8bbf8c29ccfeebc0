# SPDX-License-Identifier: Apache-2.0
"""A load by an engine of other sizes than those of the save: other ranks, stages or ZeRO stage.

Each rank takes what it holds of each weight, one weight at a time, from what `Saved` gives. Nothing
is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO
from deepspeed.pipe import PipelineModule
from torch import Tensor

from wavemare.engine.checkpoint.saved import Saved
from wavemare.engine.config.shape import ZERO_WEIGHTS
from wavemare.engine.launch.group import gather
from wavemare.engine.optim.adapter import adapt
from wavemare.engine.optim.held import Stepped
from wavemare.engine.parts import own_part
from wavemare.engine.pipe.chunks import numbered_layers
from wavemare.errors import CheckpointError
from wavemare.pipeline.optim.matrix_optimizer import FEEDBACK, MatrixOptimizer

if TYPE_CHECKING:
    from wavemare.engine.base import EngineMixin

_OF_A_STAGE = {"refresh"}
"""Settings of a parameter group that each stage of an asynchronous pipeline has for itself."""
_STATES: tuple[str, ...] = ("module", "optimizer", "lr_scheduler", "skipped_steps", "global_steps")
_STATES += ("dp_world_size", "mp_world_size", "data_sampler", "random_ltd")
_STATES += (UNIVERSAL_CHECKPOINT_INFO,)
_SAME = "Give the model, the frozen weights and the parameter groups of the run that saved it"


def weight_names(engine: EngineMixin) -> dict[str, str]:
    """Return what the whole model calls the weights of the stages, for each name of theirs.

    All ranks of a pipeline call it. Layers of the caller's own are named as by
    ``torch.nn.Sequential``. An engine without stages has no other names: {}.
    """
    module: Any = engine.module
    if not isinstance(module, PipelineModule):
        return {}
    found: dict[str, str] = {}
    names: dict[int, str] = {}
    with own_part():
        # A tied head may have a bias beside the weight that it shares.
        own_layers = [(int(n), layer) for n, layer in module.named_children() if n.isdigit()]
        for number, layer in [*numbered_layers(module), *own_layers]:
            given = getattr(layer, "weight_names", {})
            for own, value in layer.state_dict(keep_vars=True).items():
                name = given.get(own, f"{number}.{own}")
                found[f"{number}.{own}"] = name
                names.setdefault(id(value), name)
        held = module.state_dict(keep_vars=True)
    found |= {own: names[id(value)] for own, value in held.items() if id(value) in names}
    whole: dict[str, str] = {}
    for part in gather(found):
        for own, name in part.items():  # of a tied layer, the first place
            whole[own] = min(whole.get(own, name), name, key=_place)
    return whole


def _place(name: str) -> int:
    number = name.partition(".")[0]
    return int(number) if number.isdigit() else 0


@dataclass(frozen=True)
class Resized:
    """A checkpoint that an engine of other sizes can take; `check` makes it.

    Attributes:
        saved: What it holds.
        weights: The name in it of each weight and buffer of this rank, by their own names.
        names: The name in it of each parameter, by its ``id``.
        settings: For each parameter group of this rank those of the save.
        groups: For each of them its place: rank within the model, and number; None without weights.
    """

    saved: Saved
    weights: Mapping[str, str]
    names: Mapping[int, str]
    settings: Sequence[Mapping[str, Any]] = ()
    groups: Sequence[tuple[int, int] | None] = ()


def check(
    saved: Saved, engine: EngineMixin, names: Mapping[str, str], *, states: bool, strict: bool
) -> Resized:
    """Find each weight and state of this rank in a checkpoint.

    Args:
        saved: The checkpoint.
        engine: Is to go on from it.
        names: Of `weight_names`.
        states: Whether the optimizer's states are taken, too.
        strict: Whether all weights of the engine must be in it.

    Raises:
        CheckpointError: A weight is missing or has another size, or the optimizer's states are of
            other weights, or of groups that this run joins.
    """
    untied = getattr(engine.module, "untied", {})
    weights: dict[str, str] = {}
    found: dict[int, str] = {}
    for own, tensor in _tensors(engine).items():
        name = names.get(own, own)
        key = saved.find(own, name)
        if name in untied and key not in saved.held:  # a copy of a weight that was tied in the save
            key = saved.find(own, untied[name])
        shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
        if key is None:
            if not strict:
                continue
            raise _refuse(saved, f"it holds another model: {name} is not in it")
        if saved.shapes[key] != shape:
            sizes = f"{list(saved.shapes[key])} in it, and {list(shape)} in this run"
            raise _refuse(saved, f"it holds another model: {name} is {sizes}")
        weights[own] = key
        found[id(tensor)] = key
    plan = Resized(saved, weights, found)
    if not states or getattr(engine, "basic_optimizer", None) is None:
        return plan
    for each in adapt(engine).stepped():
        names_of_row = [found.get(id(weight), "a weight") for weight in each.weights]
        for name in names_of_row:
            if name not in saved.held:
                reason = f"its optimizer did not hold {name}, which is trained in this run"
                raise _refuse(saved, reason)
        if not _is_partition(engine, each):
            _check_counts(saved, names_of_row)
    return Resized(saved, weights, found, *_settings(plan, engine))


def _is_partition(engine: EngineMixin, each: Stepped) -> bool:
    """Return whether a flat tensor has states of its own for each of its weights."""
    basic = engine.basic_optimizer
    return isinstance(basic, MatrixOptimizer) and basic.partition_of(each.tensor) is not None


def _check_counts(saved: Saved, names: Sequence[str]) -> None:
    """Refuse weights that were stepped more often than others which share a flat tensor here."""
    others = [saved.others(name) for name in names]
    for name, own in zip(names, others, strict=True):
        for key, value in own.items():
            if key not in others[0] or not _equal(others[0][key], value):
                reason = f"{name} and {names[0]} have other counts of steps, and share one here"
                raise _refuse(saved, reason, "Use ZeRO 0 in fp32, as the run that saved it")


def check_all_held(plan: Resized, engine: EngineMixin) -> None:
    """Refuse states of weights that no rank of this run trains; all ranks call it.

    Raises:
        CheckpointError: There are some.
    """
    has_optimizer = getattr(engine, "basic_optimizer", None) is not None
    stepped = adapt(engine).stepped() if has_optimizer else ()
    own = {plan.names[id(weight)] for each in stepped for weight in each.weights}
    left = plan.saved.with_states() - {name for part in gather(sorted(own)) for name in part}
    if left:
        reason = f"its optimizer held {min(left)}, which is not trained in this run"
        raise _refuse(plan.saved, reason)


def load(plan: Resized, engine: EngineMixin, *, states: bool, schedule: bool) -> dict[str, Any]:
    """Take over a checkpoint, and return its client state.

    Args:
        plan: Of `check`.
        engine: Changes.
        states: Whether it takes the optimizer's states, the schedule and the counts of steps, too.
        schedule: Whether it takes the state of the learning-rate schedule.
    """
    common = plan.saved.common
    with torch.no_grad(), _gathered_late(engine):
        _load_weights(plan, engine)
        adapt(engine).refresh_masters()
        if states and getattr(engine, "basic_optimizer", None) is not None:
            _load_states(plan, engine)
    if states:
        if schedule and engine.lr_scheduler is not None:
            if (state := _schedule(plan)) is not None:
                engine.lr_scheduler.load_state_dict(state)
        engine.global_steps = common["global_steps"]
        engine.global_samples = common.get(
            "global_samples", engine.global_steps * engine.train_batch_size()
        )
        engine.skipped_steps = common["skipped_steps"]
        engine.loaded_checkpoint_dp_world_size = common["dp_world_size"]
        engine.loaded_checkpoint_mp_world_size = common["mp_world_size"]
    return {key: value for key, value in common.items() if key not in _STATES}


def _load_weights(plan: Resized, engine: EngineMixin) -> None:
    spread = engine.zero_optimization_stage() == ZERO_WEIGHTS
    for own, tensor in _tensors(engine).items():
        if own not in plan.weights:
            continue
        value = plan.saved.weight(plan.weights[own])
        if spread and hasattr(tensor, "ds_tensor"):
            part: Any = tensor.ds_tensor
            rank = torch.distributed.get_rank(tensor.ds_process_group)
            value = value[rank * part.ds_numel :][: part.ds_numel]
            part.data.view(-1)[: value.numel()].copy_(value)
        else:
            tensor.data.copy_(value.view(tensor.shape))


def _load_states(plan: Resized, engine: EngineMixin) -> None:
    adapter, basic = adapt(engine), engine.basic_optimizer
    for group, settings in zip(basic.param_groups, plan.settings, strict=True):
        group.update({key: value for key, value in settings.items() if key != "params"})
    states = {}
    for each in adapter.stepped():
        flat = each.tensor.data.view(-1)
        for part in each.held:
            master = plan.saved.master(plan.names[id(part.weight)], part.first, part.count)
            flat[part.start : part.start + part.count].copy_(master)
        of = _partition_state if _is_partition(engine, each) else _state
        states[id(each.tensor)] = of(plan, basic, each)
    adapter.load_states(states)
    if plan.saved.loss_scaler is not None and hasattr(engine.optimizer, "loss_scaler"):
        engine.optimizer.loss_scaler = plan.saved.loss_scaler


def _state(plan: Resized, basic: Any, each: Stepped) -> dict[str, Any]:
    """Return the state of a tensor that the optimizer steps, made of those of its weights."""
    state: dict[str, Any] = {}
    for part in each.held:
        name = plan.names[id(part.weight)]
        for key, value in plan.saved.averages(name, part.first, part.count).items():
            if key not in state:
                state[key] = torch.zeros_like(each.tensor.data, dtype=value.dtype)
            state[key].view(-1)[part.start : part.start + part.count].copy_(value)
        state |= _copies(plan.saved.others(name))
    return state


def _partition_state(plan: Resized, basic: Any, each: Stepped) -> dict[str, Any]:
    """Return the state of a flat tensor of an optimizer of matrices, which has one for each."""
    states: dict[int, Any] = {}
    state: dict[str, Any] = {"tensors": states}
    partition = basic.partition_of(each.tensor)
    group = basic.param_groups[each.group]
    for number, part in partition.parts(lambda shape: basic.is_matrix(group, shape)):
        name = plan.names[id(each.weights[number])]
        own = plan.saved.averages(name, part.first, part.count)
        if (update := own.pop(FEEDBACK, None)) is not None:
            if FEEDBACK not in state:
                state[FEEDBACK] = torch.zeros_like(each.tensor.data)
            state[FEEDBACK][part.start : part.start + part.count].copy_(update)
        if not part.is_stepped:
            continue
        shape = (part.count,)
        if part.is_matrix:
            shape = part.shape
            own = plan.saved.averages(name, 0, math.prod(shape))
            own.pop(FEEDBACK, None)
        states[number] = {key: value.clone().view(shape) for key, value in own.items()}
        states[number] |= _copies(plan.saved.others(name))
        if not states[number]:
            del states[number]
    return state if states or FEEDBACK in state else {}


def _copies(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}


def _settings(
    plan: Resized, engine: EngineMixin
) -> tuple[list[Mapping[str, Any]], list[tuple[int, int] | None]]:
    """Return for each parameter group of this rank the settings that it had, and where.

    Raises:
        CheckpointError: Weights of one group had other settings than others.
    """
    groups = engine.basic_optimizer.param_groups
    settings: list[Mapping[str, Any]] = [{} for _ in groups]
    places: list[tuple[int, int] | None] = [None for _ in groups]
    for each in adapt(engine).stepped():
        for name in (plan.names[id(weight)] for weight in each.weights):
            found = plan.saved.settings(name)
            # A stage's own settings stay those of this run's stage.
            kept = {k: v for k, v in found.items() if k not in {"params", *_OF_A_STAGE}}
            if places[each.group] is None:
                settings[each.group], places[each.group] = kept, plan.saved.group_of(name)
            elif kept != settings[each.group]:
                reason = f"{name} was in another parameter group than others of its group here"
                raise _refuse(plan.saved, reason)
    return settings, places


def _schedule(plan: Resized) -> Any:
    """Return the state of the schedule, whose lists have one entry for each group of this rank."""
    ranks = [place[0] for place in plan.groups if place is not None]
    if not ranks:
        return plan.saved.common.get("lr_scheduler")
    state = plan.saved.schedule(ranks[0])
    if not isinstance(state, Mapping) or len(plan.groups) == plan.saved.groups(ranks[0]):
        return state
    states = [None if p is None else (plan.saved.schedule(p[0]), p[1]) for p in plan.groups]
    return {
        key: [value[0] if s is None else s[0][key][s[1]] for s in states]
        if isinstance(value, list) and len(value) == plan.saved.groups(ranks[0])
        else value
        for key, value in state.items()
    }


def _tensors(engine: EngineMixin) -> dict[str, Any]:
    """Return this rank's parameters, each once, and the buffers that checkpoints have."""
    with own_part():
        state = engine.module.state_dict(keep_vars=True)
    found: dict[str, Any] = dict(engine.module.named_parameters())
    held = {id(parameter) for parameter in found.values()}
    return found | {n: t for n, t in state.items() if isinstance(t, Tensor) and id(t) not in held}


@contextmanager
def _gathered_late(engine: EngineMixin) -> Iterator[None]:
    """Have ZeRO 3 spread the small weights that it keeps whole, and gather them afterwards."""
    optimizer = engine.optimizer
    for event in ("prologue", "epilogue"):
        if event == "epilogue":
            yield
        if callable(call := getattr(optimizer, f"checkpoint_event_{event}", None)):
            call()


def _equal(one: Any, other: Any) -> bool:
    tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
    return torch.equal(one, other) if tensors else bool(one == other)


def _refuse(saved: Saved, reason: str, remedy: str = _SAME) -> CheckpointError:
    return CheckpointError("checkpoint", str(saved.folder), reason, remedy)
