# SPDX-License-Identifier: Apache-2.0
"""Whether a run can go on from a checkpoint: its topology, its layout, its optimizer."""

from __future__ import annotations

import shlex
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed import comm as dist
from deepspeed.runtime.zero.utils import ZeRORuntimeException
from torch import Tensor

from wavemare.engine.checkpoint.files import read_file
from wavemare.engine.checkpoint.manifest import rank_file
from wavemare.engine.checkpoint.saved import (
    divides_states,
    names_another_precision,
    stock_names,
    stock_topology,
)
from wavemare.engine.config.shape import ZERO_WEIGHTS
from wavemare.engine.optim.adapter import adapt
from wavemare.engine.optim.optimizers import is_added
from wavemare.engine.optim.policy import POLICY, Written
from wavemare.engine.parts import split_weights
from wavemare.errors import CheckpointError
from wavemare.pipeline.optim.matrix_optimizer import FEEDBACK

if TYPE_CHECKING:
    from wavemare.engine.base import EngineMixin

_EXPORTED = "a model that save_pretrained exported (of an engine that has loaded the checkpoint)"
_OF_REPLICAS = {"world_size", "replicas"}
_WRAPPERS = ("optimizer", "optimizer_state_dict", "base_optimizer_state")
_COMPILED = "bias_correction"
_QUANTIZED = {"Params4bit", "Int8Weight"}
"""The classes of bitsandbytes' weights in 4 bits, and of ours in torchao's int8."""
WHOLE = "whole-tensors"
"""File in a universal checkpoint that was made from no split layers' files."""
_ADDED = {"shampoo_beta": "SOAP", "ns_steps": "Muon", "momentum_decay": "NAdam"}
_TELLING = ("betas", "eps", "momentum", *_ADDED, _COMPILED)
"""Settings by whose presence optimizers differ that would read each other's states wrongly."""
_ADAM = ["betas", "eps"]


class TopologyError(CheckpointError, ZeRORuntimeException):
    """What DeepSpeed raises where the number of ranks has changed is caught as its own, too."""


def topology(engine: EngineMixin) -> dict[str, Any]:
    """Return what a checkpoint's files depend on.

    Keys: ``world_size``, ``data``, ``pipe``, ``model`` (ranks), ``zero_stage``, and for a pipeline
    ``cuts`` (the first layer of each stage and the number of layers); ``homes`` (the rank of
    each stage) where this is not its number; ``experts`` (ranks that share them) where these are
    divided; ``replicas`` and ``fragments`` with local steps, where ``data`` counts a replica's.
    """
    parts, homes = getattr(engine.module, "parts", None), getattr(engine.module, "homes", ())
    pipe, experts = getattr(engine, "num_stages", 1), engine.settings.expert_parallel.size
    local = engine.settings.local_steps
    replicas = getattr(getattr(engine, "mpu", None), "replicas", None)
    return {
        "world_size": dist.get_world_size(),
        "data": engine.dp_world_size,
        "pipe": pipe,
        "model": engine.mp_world_size // pipe,
        "zero_stage": int(engine.zero_optimization_stage()),
        "cuts": [int(part) for part in parts] if parts is not None else None,
        **({"homes": list(homes)} if list(homes) not in ([], list(range(pipe))) else {}),
        **({"experts": experts} if experts > 1 else {}),
        **({"replicas": replicas.size, "fragments": local.fragments} if replicas else {}),
    }


def without_replicas(topology: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a topology that another number of replicas must share."""
    return {key: value for key, value in topology.items() if key not in _OF_REPLICAS}


def untied_weights(engine: EngineMixin) -> list[str]:
    """Return the weights that a pipeline holds copies of where the model has one for both."""
    return sorted(getattr(engine.module, "untied", ()))


def keeps_adam_alone(engine: EngineMixin) -> bool:
    """Return whether the optimizer's states are such as ``ds_to_universal`` converts."""
    return not is_added(getattr(engine, "basic_optimizer", None))


def check_checkpoint_fits(
    folder: Path, manifest: Mapping[str, Any], engine: EngineMixin, *, whole: bool
) -> bool:
    """Check a checkpoint of another run's engine against this one.

    With ``whole``, the optimizer's states are loaded, too; they depend on the topology. A manifest
    of an older version lacks some entries.

    Returns:
        Whether its weights and states have to be brought to other sizes.

    Raises:
        CheckpointError: It was saved by another tying of weights, or by a topology from which
            there is no way to this one.
    """
    plan, layout = manifest.get("plan"), engine.layout
    untied, own = manifest.get("untied"), untied_weights(engine)
    saved, current = manifest["topology"], topology(engine)
    sizes = [each.get("experts", 1) for each in (saved, current)]
    rows: list[tuple[object, str, str]] = [
        (
            set(untied or ()) - set(own),
            f"its untied weights are {untied}, in this run {own}",
            "Resume with the schedule that saved it (pipemare unties heads, 1f1b does not unless "
            f'"untie" is set), or go on from {_EXPORTED}',
        ),
        (
            sizes[0] != sizes[1],
            "the experts are divided over {} ranks in it, and over {} in this run".format(*sizes),
            f"Set wavemare.expert_parallel.size to {sizes[0]}, or go on from {_EXPORTED}",
        ),
        (
            "replicas" in saved and not whole,
            "its weights are those of the first replica alone, not the common ones",
            f"Load all of it with wavemare.local_steps, or go on from {_EXPORTED}",
        ),
    ]
    for refused, reason, remedy in rows:
        if refused:
            raise CheckpointError("checkpoint", str(folder), reason, remedy)
    free = _free(folder, saved, current)
    if "replicas" in current:  # synchronous training is that of one replica
        free = _OF_REPLICAS if "replicas" in saved else free | _OF_REPLICAS | {"fragments"}
    other_plan = plan is not None and layout is not None and plan["digest"] != layout.digest
    different = untied is not None and untied != own
    if whole:
        different |= other_plan or _without(saved, free) != _without(current, free)
        different |= names_another_precision(folder, bf16=engine.bfloat16_enabled())
    else:  # DeepSpeed reads the files of its own kind
        different |= (saved.get("cuts") is None) != (current["cuts"] is None)
    if not different:
        return False
    refusal = resize_refusal(saved, current) or _engine_refusal(engine)
    if refusal is not None:
        spelled = _spell(_without(saved, free)), _spell(_without(current, free))
        reason = "it was saved with the topology {}, this run has {}, and {}".format(
            *spelled, refusal
        )
        remedy = f"Resume with the same topology, or {_way_out(folder, saved, current, engine)}"
        raise TopologyError("checkpoint", str(folder), reason, remedy)
    return True


def resize_refusal(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str | None:
    """Return why a checkpoint cannot be brought to other sizes; None if it can.

    Args:
        saved: `topology` of the run that saved it; stock DeepSpeed's may lack keys.
        current: That of the run that loads it.
    """
    rows = (
        ("model", 1, "layers that ranks split (tensor_parallel) are not cut anew"),
        ("experts", 1, "experts that ranks share (expert_parallel) are not divided anew"),
        ("replicas", 0, "replicas with local_steps keep states of their own"),
    )
    for key, least, reason in rows:
        if max(int(each.get(key) or least) for each in (saved, current)) > least:
            return reason
    return None


def _engine_refusal(engine: EngineMixin) -> str | None:
    rows = (
        (engine.has_moe_layers, "DeepSpeed's MoE layers have files of their own"),
        (
            any(type(p).__name__ in _QUANTIZED for p in engine.module.parameters()),
            "quantized weights are only read as they were written",
        ),
        (engine.zero_nvme_offload_optimizer(), "the optimizer's states are on NVMe"),
    )
    return next((reason for refused, reason in rows if refused), None)


def _way_out(
    folder: Path, saved: Mapping[str, Any], current: Mapping[str, Any], engine: EngineMixin
) -> str:
    """Return how to go on from a checkpoint that a load does not bring to other sizes."""
    converts = keeps_adam_alone(engine) and engine.settings.expert_parallel.size == 1
    converts = converts and not {"replicas"} & (saved.keys() | current.keys())
    # A pipeline has other names, and without ZeRO there are no files to convert or to convert for.
    converts = converts and (saved.get("cuts") is None) == (current["cuts"] is None)
    stages = {saved["zero_stage"], current["zero_stage"]}  # ZeRO 3 reads files of its own alone
    converts = converts and (stages <= {1, 2} or stages == {ZERO_WEIGHTS})
    return _universal_remedy(folder) if converts else f"go on from {_EXPORTED}"


def stock_differs(folder: Path, engine: EngineMixin, *, whole: bool) -> bool:
    """Return whether stock DeepSpeed's checkpoint has to be brought to other sizes.

    One rank may find this where others do not: a stage has other layers.

    Raises:
        CheckpointError: There is no way from its sizes to these.
    """
    saved, current = stock_topology(folder), topology(engine)
    if saved is None:
        return False
    own = {key: current[key] for key in saved}
    free = _free(folder, saved, own)
    saved, own = (_without(each, free) for each in (saved, own))
    layers = next(folder.glob("layer_*-model_states.pt"), None) is not None
    different = layers != engine.pipeline_parallelism
    if whole and not different:
        place = dist.get_rank(group=engine.data_parallel_group), engine.checkpoint_mp_rank
        names = stock_names(folder, place) if layers else None
        held = {name for group in adapt(engine).held_names() for name in group}
        different = saved != own or (names is not None and not names <= held)
    if not different:
        return False
    refusal = resize_refusal(saved, current) or _engine_refusal(engine)
    if refusal is not None:
        reason = f"it was saved with the topology {_spell(saved)}, this run has {_spell(own)}, "
        remedy = f"Resume with the same topology, or go on from {_EXPORTED}"
        raise TopologyError("checkpoint", str(folder), reason + f"and {refusal}", remedy)
    return True


def _free(folder: Path, saved: Mapping[str, Any], current: Mapping[str, Any]) -> set[str]:
    """Return what may differ because each data rank holds all states of its weights.

    Without ZeRO they do, except in 16-bit pipelines, where DeepSpeed divides the fp32 masters.
    """
    whole = saved["zero_stage"] == current["zero_stage"] == 0 and not divides_states(folder)
    return {"world_size", "data"} if whole else set()


def _without(topology: Mapping[str, Any], keys: set[str]) -> dict[str, Any]:
    return {key: value for key, value in topology.items() if key not in keys}


def shapes(engine: EngineMixin) -> dict[str, list[int]]:
    """Return the size of each of this rank's weights, of which ZeRO 3 holds a part."""
    named = engine.module.named_parameters()
    return {name: list(getattr(weight, "ds_shape", weight.shape)) for name, weight in named}


def check_shapes(
    folder: Path, saved: Mapping[str, list[int]] | None, engine: EngineMixin, *, strict: bool
) -> None:
    """Refuse a checkpoint of a model of other sizes; those of older versions do not say.

    Raises:
        CheckpointError: A weight has another size; or, if ``strict``, is in one of the two alone.
    """
    own = shapes(engine)
    saved = own if saved is None else saved
    for name in sorted({*saved, *own}):
        theirs, ours = saved.get(name), own.get(name)
        if theirs != ours and (strict or None not in (theirs, ours)):
            reason = f"it holds another model: {name} is {theirs} in it, and {ours} in this run"
            remedy = "Give the sizes of the run that saved it (a recipe's are in its config.json)"
            raise CheckpointError("checkpoint", str(folder), reason, remedy)


def check_held(
    folder: Path, saved: list[list[str]] | None, engine: EngineMixin, *, whole: bool
) -> None:
    """Refuse optimizer states of other weights: they are read by position, as are flat masters.

    Args:
        folder: Of the checkpoint.
        saved: The names of the weights that its optimizer held, by group; None in those of older
            versions, which do not say.
        engine: Reads it.
        whole: Whether it reads the optimizer's states, too. Without them ZeRO 3 alone refuses, of
            which a weight that is frozen now is in no file that it reads.

    Raises:
        CheckpointError: This run's optimizer holds others, or holds them in another order.
    """
    own = adapt(engine).held_names()
    if saved is None or saved == own:
        return
    theirs, ours = ({name for group in groups for name in group} for groups in (saved, own))
    spread = engine.zero_optimization_partition_weights()
    if not whole and not (spread and theirs - ours):
        return
    sides = ("the checkpoint", theirs - ours), ("this run", ours - theirs)
    reason = " and ".join(
        f"in {where} alone it holds {_some(names)}" for where, names in sides if names
    )
    raise CheckpointError(
        "checkpoint",
        str(folder),
        "its optimizer held other weights: "
        + (reason or "the same ones in other groups, or in another order"),
        "Freeze the same weights and give the same parameter groups as the run that saved it, or "
        + (
            f"go on from {_EXPORTED}"
            if spread or "replicas" in topology(engine)
            else _WEIGHTS_ALONE
        ),
    )


def _some(names: set[str]) -> str:
    first, *others = sorted(names)
    return f"{first} and {len(others)} others" if others else first


def _optimizer_state(folder: Path) -> Any:
    """Return the states of the first rank's optimizer, mapped; None if there is no file."""
    patterns = ("zero/optimizer_state.pt", "*optim_states.pt", "mp_rank_*_model_states.pt")
    files = [file for pattern in patterns for file in sorted(folder.glob(pattern))]
    if not files:
        return None
    # Mapped, so that tensors are not read; the older format of torch cannot be.
    state = read_file(files[0], mmap=zipfile.is_zipfile(files[0]))
    while isinstance(state, Mapping) and (key := next((k for k in _WRAPPERS if k in state), None)):
        state = state[key]
    return state


def written_with(folder: Path, engine: EngineMixin) -> Written | None:
    """Return what the policy ``auto`` goes on with in place of its own choice; None for that one.

    Also None where it cannot: `check_optimizer` then refuses.
    """
    basic, state = getattr(engine, "basic_optimizer", None), _optimizer_state(folder)
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if basic is None or not groups or not engine.can_replace_optimizer:
        return None
    theirs, ours = _telling(groups[0]), _telling(basic.param_groups[0])
    kind = _added(theirs) or ("Adam" if theirs in (_ADAM, [*_ADAM, _COMPILED]) else None)
    if kind not in ("SOAP", "Muon", "Adam"):
        return None
    first = folder / rank_file(0)  # of the stalest stage
    own = read_file(first).get("engine", {}) if first.is_file() else {}
    written = Written(kind)
    if "correction" in own:  # else a synchronous run saved it
        # Older versions have not saved the two settings, but what they made.
        feeds_back = any(FEEDBACK in each for each in state.get("state", {}).values())
        made = own["correction"].get("mode")
        made = made if made in ("off", "predict") else "auto"
        feeds_back = own.get("error_feedback", feeds_back)
        written = Written(kind, feeds_back, own.get("correction_mode", made))
    return None if theirs == ours and engine.goes_on_as(written) else written


def check_optimizer(folder: Path, engine: EngineMixin) -> None:
    """Refuse the states of another optimizer, whoever wrote them.

    DeepSpeed's own Adam counts steps in plain numbers, which torch's takes but never moves on.

    Raises:
        CheckpointError: Another optimizer wrote it, or it is an elastic one.
    """
    basic = getattr(engine, "basic_optimizer", None)
    state = None if basic is None else _optimizer_state(folder)
    if basic is None or state is None:
        return
    if isinstance(state, list):
        reason = "it was saved with elastic_checkpoint, which keeps no learning rates"
        remedy = f"Save it without that key, or {_WEIGHTS_ALONE}"
        raise CheckpointError("checkpoint", str(folder), reason, remedy)
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if not groups:
        return
    theirs, ours = _telling(groups[0]), _telling(basic.param_groups[0])
    if theirs == ours or (not theirs and keeps_adam_alone(engine)):  # one for any Adam
        return
    remedy, kind = "Resume with the optimizer that saved it", _added(theirs)
    if kind is not None:
        remedy = f'Resume with "optimizer": {{"type": "{kind}", ...}} and the settings of that run'
    elif _added(ours) and engine.settings.pipeline.pipemare.optimizer_policy == "auto":
        remedy = f'Resume with {POLICY} "keep" and the optimizer that saved it'
    if theirs == [*ours, _COMPILED]:
        remedy = (
            'Set WAVEMARE_COMPILED_OPS=1 and leave out "torch_adam", or offload as that run did'
        )
    elif ours == [*theirs, _COMPILED]:
        remedy = 'Give "torch_adam": true in optimizer.params'
    own = f"{_name(ours)} ({type(basic).__name__})"
    reason = f"its optimizer states are those of {_name(theirs)}, but this run has {own}"
    raise CheckpointError("checkpoint", str(folder), reason, f"{remedy}, or {_WEIGHTS_ALONE}")


def count_alone(optimizer: Any) -> None:
    """Give each tensor of an optimizer a count of steps of its own after a universal load.

    DeepSpeed's ZeRO 3 gives all of them one tensor, which each would move on. DeepSpeed's own Adam
    counts in plain numbers.
    """
    if optimizer is None:
        return
    in_numbers = any(_COMPILED in group for group in optimizer.param_groups)
    for state in optimizer.state.values():
        if isinstance(step := state.get("step"), Tensor):
            state["step"] = int(step) if in_numbers else step.clone()


_WEIGHTS_ALONE = "load the weights alone (load_optimizer_states=False)"


def _telling(group: Mapping[str, Any]) -> list[str]:
    return [name for name in _TELLING if name in group]


def _added(settings: list[str]) -> str | None:
    return next((kind for setting, kind in _ADDED.items() if setting in settings), None)


def _name(settings: list[str]) -> str:
    kind = _added(settings)
    if kind is not None:
        return kind
    if _COMPILED in settings:
        return "DeepSpeed's FusedAdam or DeepSpeedCPUAdam"
    if settings == _ADAM:
        return "torch's Adam or AdamW"
    return f"an optimizer with {' and '.join(settings) or 'neither betas nor momentum'}"


def check_universal(load_dir: str, engine: EngineMixin) -> None:
    """Refuse a universal checkpoint for an optimizer whose states it cannot have.

    Raises:
        CheckpointError: The optimizer has other states than Adam's.
    """
    if not keeps_adam_alone(engine):
        name = type(engine.basic_optimizer).__name__
        reason = f"a universal checkpoint keeps only Adam's averages, and {name} has other states"
        remedy = f"Resume at the save's topology without load_universal, or go on from {_EXPORTED}"
        raise CheckpointError("checkpoint", str(load_dir), reason, remedy)


def check_whole(folder: Path, engine: EngineMixin) -> None:
    """Refuse a universal checkpoint of whole tensors for layers that are split over ranks.

    DeepSpeed would cut each in its first dimension.

    Raises:
        CheckpointError: The engine's layers are split.
    """
    if split_weights(engine.module) and (folder / WHOLE).is_file():
        reason = "its tensors are whole, and this engine's layers are split over ranks"
        remedy = "Go on without wavemare.tensor_parallel, with ZeRO or in a pipeline"
        raise CheckpointError("checkpoint", str(folder), reason, remedy)


def _universal_remedy(folder: Path) -> str:
    folders = ["--input_folder", str(folder), "--output_folder", f"{folder}_universal"]
    return (
        f"convert it with `python -m wavemare.universal {shlex.join(folders)}`, write "
        f"'{folder.name}_universal' into the file {folder.parent / 'latest_universal'} and set "
        '"checkpoint": {"load_universal": true}'
    )


def _spell(values: Mapping[str, Any]) -> str:
    return "(" + ", ".join(f"{key} {value}" for key, value in values.items()) + ")"
