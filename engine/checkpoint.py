"""Checkpoints in DeepSpeed's own file layout that are complete or absent.

DeepSpeed writes its files into a folder of a temporary name, each rank adds the state of its
random generators, rank 0 lists all files in ``wavemare.json``, and only then the folder gets its
name. Stock DeepSpeed, ``zero_to_fp32`` and ``ds_to_universal`` read such a folder as their own.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path, PurePath
from typing import Any, cast

import numpy
import torch
from deepspeed import comm as dist
from deepspeed.checkpoint.constants import (
    PIPELINE_REPLICATED_PARAMETER_PATTERNS,
    UNIVERSAL_CHECKPOINT_INFO,
    UNIVERSAL_CHECKPOINT_VERSION_KEY,
    UNIVERSAL_CHECKPOINT_VERSION_VALUE,
)

from wavemare.engine.manifest import FORMAT, MANIFEST, read_manifest, resolve_tag
from wavemare.engine.matrix_partitions import is_added
from wavemare.errors import CheckpointError
from wavemare.files import atomic_write_text, replace_folder

__all__ = ["CheckpointMixin"]


class CheckpointMixin:
    """Adds whole-or-nothing writing, verification and exact resume to a DeepSpeed engine."""

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] = {},
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save as ``deepspeed.DeepSpeedEngine.save_checkpoint``; every rank must call it.

        The folder ``save_dir/tag`` appears at the end, complete; a failure before that leaves an
        older folder of the same name and ``latest`` as they were.
        """
        engine: Any = self
        self.settle()
        tag = str(tag if tag is not None else f"global_step{engine.global_steps}")
        state = {**_universal_information(engine), **client_state}
        if engine.checkpoint_engine.is_decoupled():  # writes in the background, renames nothing
            return super().save_checkpoint(  # type: ignore[misc]
                save_dir, tag, state, save_latest, exclude_frozen_parameters
            )
        folder = Path(save_dir)
        partial = str(PurePath(tag).with_name(f".{PurePath(tag).name}.partial"))
        if _writes_folder(engine):
            shutil.rmtree(folder / partial, ignore_errors=True)  # left by a run that died
        dist.barrier()
        super().save_checkpoint(  # type: ignore[misc]
            save_dir, partial, state, False, exclude_frozen_parameters
        )
        own = {**_random_state(), "engine": engine.rank_state()}
        torch.save(own, folder / partial / _rank_file(engine.global_rank))
        dist.barrier()
        if _writes_folder(engine):
            manifest = _manifest(engine, folder / partial)
            atomic_write_text(folder / partial / MANIFEST, json.dumps(manifest, indent=1))
            replace_folder(folder / partial, folder / tag)
            if save_latest:
                atomic_write_text(folder / "latest", tag)
        dist.barrier()
        return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, Any]:
        """Load as ``deepspeed.DeepSpeedEngine.load_checkpoint``, after verifying the folder.

        At the topology of the save, training goes on exactly as it would have without the stop.

        Raises:
            CheckpointError: The folder is missing, a file in it was cut short, or it was saved by
                another topology and is not a universal checkpoint; or it is one, and the optimizer
                has states that it does not keep.
        """
        engine: Any = self
        universal = engine.load_universal_checkpoint()
        if universal:
            _check_universal(load_dir, engine)
        manifest = None
        if not universal:
            tag = resolve_tag(load_dir, tag)
            manifest = read_manifest(Path(load_dir) / tag) if tag is not None else None
        whole = load_optimizer_states and not load_module_only
        if manifest is not None:
            _check_heads(Path(load_dir) / str(tag), manifest.get("plan"), engine.parallel_plan)
            _check_ties(Path(load_dir) / str(tag), manifest.get("untied"), _untied(engine))
        if manifest is not None and whole:
            folder, convertible = Path(load_dir) / str(tag), _keeps_adam_alone(engine)
            _check_plan(folder, manifest.get("plan"), engine.parallel_plan, convertible)
            _check_topology(folder, manifest["topology"], topology(engine), convertible)
        result = super().load_checkpoint(  # type: ignore[misc]
            load_dir,
            tag,
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
            custom_load_fn=custom_load_fn,
        )
        if manifest is not None and whole and manifest["topology"] == topology(engine):
            own = torch.load(
                Path(load_dir) / str(tag) / _rank_file(engine.global_rank),
                weights_only=True,
                map_location="cpu",
            )
            _restore_random_state(own)
            engine.load_rank_state(own.get("engine", {}))
        if result[1]:
            result[1].pop(UNIVERSAL_CHECKPOINT_INFO, None)  # for ds_to_universal, not the client
        return result

    def settle(self) -> None:
        """Finish what is under way between two steps, so that the engine can be saved."""

    def rank_state(self) -> dict[str, Any]:
        """Return what this rank's next step needs beside weights, optimizer and random state."""
        return {}

    def load_rank_state(self, state: dict[str, Any]) -> None:
        """Take over a state of `rank_state`."""


def _universal_information(engine: Any) -> dict[str, Any]:
    """Return what ``ds_to_universal`` asks of the client: which weights stand on several stages."""
    if hasattr(engine.module, UNIVERSAL_CHECKPOINT_INFO):
        return {}  # tensor parallelism has put its own there
    if not _keeps_adam_alone(engine):
        return {}  # without it ds_to_universal refuses states that it would drop
    information = {
        UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_CHECKPOINT_VERSION_VALUE,
        PIPELINE_REPLICATED_PARAMETER_PATTERNS: [r"tied_modules\..*"],
    }
    return {UNIVERSAL_CHECKPOINT_INFO: information}


def topology(engine: Any) -> dict[str, Any]:
    """Return what a checkpoint's files depend on.

    Keys: ``world_size``, ``data``, ``pipe``, ``model`` (ranks), ``zero_stage``, and for a pipeline
    ``cuts`` (the first layer of each stage and the number of layers).
    """
    parts = getattr(engine.module, "parts", None)
    pipe = getattr(engine, "num_stages", 1)
    return {
        "world_size": dist.get_world_size(),
        "data": engine.dp_world_size,
        "pipe": pipe,
        "model": engine.mp_world_size // pipe,
        "zero_stage": int(engine.zero_optimization_stage()),
        "cuts": [int(part) for part in parts] if parts is not None else None,
    }


def _check_universal(load_dir: str, engine: Any) -> None:
    """Refuse a universal checkpoint for an optimizer whose states it cannot have."""
    if not _keeps_adam_alone(engine):
        raise CheckpointError(
            "checkpoint",
            str(load_dir),
            "a universal checkpoint keeps Adam's averages alone, and "
            f"{type(engine.basic_optimizer).__name__} has other states",
            "Resume at the topology of the save without load_universal, or go on from a model "
            "that save_pretrained exported",
        )


def _keeps_adam_alone(engine: Any) -> bool:
    """Return whether the optimizer's states are such as ``ds_to_universal`` converts."""
    return not is_added(getattr(engine, "basic_optimizer", None))


def _check_plan(
    folder: Path, saved: dict[str, Any] | None, plan: Any, convertible: bool = True
) -> None:
    """Refuse a checkpoint of another plan; one that was saved or is loaded without any has none."""
    if saved is None or plan is None or saved["digest"] == plan.digest:
        return
    raise CheckpointError(
        "checkpoint",
        str(folder),
        f"it was saved under the plan {saved['digest']}, this run has {plan.digest}",
        f"Resume with the same plan, which stands in {MANIFEST}, or "
        f"{_universal_remedy(folder, convertible)}",
    )


def _check_heads(folder: Path, saved: dict[str, Any] | None, plan: Any) -> None:
    """Refuse a checkpoint whose output heads are split over the data ranks and here not."""
    theirs = list(saved["layout"]["colocated"]) if saved is not None else []
    own = list(plan.colocated) if plan is not None else []
    if theirs != own:
        raise CheckpointError(
            "checkpoint",
            str(folder),
            f"in it the heads {theirs} are split over the data ranks, in this run {own}",
            "Resume with the same plan, or go on from a model that save_pretrained exported",
        )


def _untied(engine: Any) -> list[str]:
    """Return the weights that a pipeline holds copies of where the model has one for both."""
    return sorted(getattr(engine.module, "untied", ()))


def _check_ties(folder: Path, saved: list[str] | None, current: list[str]) -> None:
    """Refuse a checkpoint of stages that tie other weights; older ones do not say."""
    if saved is None or saved == current:
        return
    raise CheckpointError(
        "checkpoint",
        str(folder),
        f"the weights with copies of their own are {saved} in it, in this run {current}",
        "Resume with the schedule that saved it (pipemare unties heads, 1f1b does not unless "
        '"untie" is set), or go on from a model that save_pretrained exported',
    )


def _check_topology(
    folder: Path, saved: dict[str, Any], current: dict[str, Any], convertible: bool = True
) -> None:
    if saved["zero_stage"] == current["zero_stage"] == 0:
        # Every replica holds everything, so that their number does not matter.
        free = {"world_size", "data"}
        saved = {key: value for key, value in saved.items() if key not in free}
        current = {key: value for key, value in current.items() if key not in free}
    if saved == current:
        return
    raise CheckpointError(
        "checkpoint",
        str(folder),
        f"it was saved by the topology {_spell(saved)}, this run has {_spell(current)}",
        f"Resume with the same topology, or {_universal_remedy(folder, convertible)}",
    )


def _universal_remedy(folder: Path, convertible: bool) -> str:
    if not convertible:
        return "go on from a model that save_pretrained exported"
    return (
        "convert it with 'python -m "
        f"deepspeed.checkpoint.ds_to_universal --input_folder {folder} --output_folder "
        f"{folder}_universal' (needs ZeRO 1 or higher), write "
        f"'{folder.name}_universal' into the file latest_universal and set "
        '"checkpoint": {"load_universal": true}'
    )


def _spell(values: Mapping[str, Any]) -> str:
    return "(" + ", ".join(f"{key} {value}" for key, value in values.items()) + ")"


def _manifest(engine: Any, folder: Path) -> dict[str, Any]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    plan = engine.parallel_plan
    layout = json.loads(plan.to_json()) if plan is not None else None
    return {
        "format": FORMAT,
        "versions": {name: version(name) for name in ("wavemare", "deepspeed", "torch")},
        "global_steps": engine.global_steps,
        "topology": topology(engine),
        "untied": _untied(engine),
        "plan": None if plan is None else {"digest": plan.digest, "layout": layout},
        "files": {path.relative_to(folder).as_posix(): path.stat().st_size for path in files},
    }


def _writes_folder(engine: Any) -> bool:
    return bool((engine.local_rank if engine.use_node_local_storage() else engine.global_rank) == 0)


def _rank_file(rank: int) -> str:
    return f"wavemare_rank_{rank:05d}_state.pt"


def _random_state() -> dict[str, Any]:
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    kind, keys, *rest = cast(tuple[Any, ...], numpy.random.get_state())
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(numpy.int64)), *rest),
    }
    if accelerator.device_name() != "cpu":
        state["device"] = accelerator.get_rng_state()
    return state


def _restore_random_state(state: Mapping[str, Any]) -> None:
    from deepspeed.accelerator import get_accelerator

    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype(numpy.uint32), *rest))
    if "device" in state:
        get_accelerator().set_rng_state(state["device"])
