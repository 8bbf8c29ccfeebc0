# SPDX-License-Identifier: Apache-2.0
"""A Megatron checkpoint of any format, as one source of weights under canonical names.

Read this file first; `names.py` says what the names are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from wavemare.errors import CheckpointError
from wavemare.files import read_json
from wavemare.megatron.arrays import DAMAGED, reading
from wavemare.megatron.distributed import FP8_HISTORY, METADATA, Distributed, read_folder
from wavemare.megatron.pickles import attributes, plain, read_plain
from wavemare.megatron.rank_files import open_rank_files
from wavemare.models.source import WeightSource

LATEST = "latest_checkpointed_iteration.txt"
_LATEST_OF_BRIDGE = "latest_train_state.pt"
_TRAIN_STATE = "train_state.pt"
_DESCRIPTION = "metadata.json"
_OF_NEMO = ("weights", "model_weights")
_ITERATION = re.compile(r"iter_(\d{1,18})")
_NAME_IT = "Name the folder that Megatron's --save names, or an iter_NNNNNNN in it"
_SAVE_ANEW = "Load it with the Megatron that saved it, and save it with --ckpt-format torch_dist"
_OF_RANKS = ("args", "optimizer", "rng_state", "rerun_state_machine")


@dataclass
class Store:
    """A checkpoint. Nothing but its description has been read.

    Attributes:
        weights: By canonical names.
        format: torch_dist, torch or fsdp_dtensor.
        step_folder: The folder of the iteration.
        iteration: Steps that were trained; None if nothing says it.
        arguments: Megatron's, as far as the checkpoint has them; those of them that are objects of
            Megatron's own classes are `Inert`.
        run_config: Megatron-Bridge's ``run_config.yaml``.
        common: What else it holds beside tensors: plain values.
        tokenizer: The folder of a tokenizer beside the weights.
        raw: Tensors by the names of the files, the optimizer's included.
        has_optimizer: Whether it holds the state of an optimizer.
    """

    weights: WeightSource
    format: str
    step_folder: Path
    iteration: int | None
    arguments: dict[str, Any]
    run_config: dict[str, Any] | None
    common: Mapping[str, Any]
    tokenizer: Path | None
    raw: WeightSource
    has_optimizer: bool
    _find_fp8: Callable[[], bool] = field(repr=False)

    @cached_property
    def lost_fp8(self) -> bool:
        """Whether it has a history of FP8 scales, which only Transformer Engine can read."""
        return self._find_fp8()


def open_store(folder: str | Path, *, num_attention_heads: int | None = None) -> Store:
    """Open a Megatron checkpoint of any format.

    Args:
        folder: What Megatron's ``--load`` would be, or the folder of one iteration.
        num_attention_heads: For files of legacy models that do not say it.

    Raises:
        CheckpointError: There is none, it is damaged, or it is of a format that is not read.
    """
    step, said = find_step(folder)
    if any(step.glob("mp_rank_*")):
        return _open_rank_files(step, said, num_attention_heads)
    return _open_distributed(step, said)


def find_step(folder: str | Path) -> tuple[Path, int | None]:
    """Return the folder of an iteration, and the iteration that its name says.

    Raises:
        CheckpointError: There is none, or the note of the newest names one that is absent.
    """
    folder = Path(os.path.expanduser(folder))
    if not folder.is_dir():
        reason, remedy = "there is no such folder", _NAME_IT
        if folder.exists():
            reason, remedy = "it is no folder", f"Name the folder that it lies in: {folder.parent}"
            remedy = f"Unpack it with tar -xf {folder.name}" if folder.suffix == ".nemo" else remedy
        raise CheckpointError("checkpoint", str(folder), reason, remedy)
    with reading(folder):
        for step in (folder, *(folder / name for name in _OF_NEMO)):
            if _is_step(step):
                return step, _number(step.name)
        text, found = _latest(folder), _steps(folder)
    there = f"Name one that is there, such as {found[-1]}" if found else _NAME_IT
    if text is None:
        raise CheckpointError("checkpoint", str(folder), f"there is no file {LATEST}", there)
    step = folder / ("release" if text == "release" else f"iter_{int(text):07}")
    if not step.is_dir():
        reason = f"{LATEST} names {step.name}, which is absent"
        raise CheckpointError("checkpoint", str(folder), reason, there)
    if not _is_step(step):
        reason = f"it holds no checkpoint: neither {_DESCRIPTION} nor mp_rank_*"
        raise CheckpointError("checkpoint", str(step), reason, DAMAGED)
    return step, _number(step.name)


def kind_of(folder: str | Path) -> str:
    """Tell what a folder holds by the names in it: hf, engine (DeepSpeed's and ours) or megatron.

    Raises:
        CheckpointError: It is none of these, or there is no such folder.
    """
    folder = Path(os.path.expanduser(folder))
    if not folder.is_dir():
        find_step(folder)  # which says what to do
    with reading(folder):
        is_megatron = _has_marks(folder)
        weights = ("*.safetensors", "pytorch_model*.bin")
        if (folder / "config.json").is_file():
            # One that was put beside a checkpoint of Megatron's is no model.
            if not is_megatron or any(any(folder.glob(each)) for each in weights):
                return "hf"
        marks = ("*model_states.pt", "*optim_states.pt", "layer_*-model_*.pt")
        if (folder / "latest").is_file() or (folder / "zero").is_dir():
            return "engine"
        if any(any(folder.glob(mark)) for mark in marks):
            return "engine"
    if not is_megatron:
        reason = "it has neither config.json nor the files of a Megatron checkpoint"
        raise CheckpointError("checkpoint", str(folder), reason, "Name the folder of a checkpoint")
    return "megatron"


def _has_marks(folder: Path) -> bool:
    steps = (folder, *(folder / name for name in _OF_NEMO))
    notes = (folder / LATEST, folder / _LATEST_OF_BRIDGE)
    return (
        any(note.is_file() for note in notes)
        or any(_is_step(step) for step in steps)
        or bool(_steps(folder))
    )


def _is_step(folder: Path) -> bool:
    marks = (METADATA, _DESCRIPTION, "common.pt")
    return any((folder / mark).is_file() for mark in marks) or any(folder.glob("mp_rank_*"))


def _steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if _ITERATION.fullmatch(path.name))


def _number(name: str) -> int | None:
    found = _ITERATION.fullmatch(name)
    return int(found[1]) if found else None


def _latest(folder: Path) -> str | None:
    """Return what names the newest iteration; None if nothing does."""
    if (folder / LATEST).is_file():
        text = (folder / LATEST).read_text(encoding="utf-8", errors="replace").strip()[:80]
        if text != "release" and not re.fullmatch("[0-9]{1,18}", text):
            reason = f"{LATEST} says {text!r} where a number or 'release' is expected"
            raise CheckpointError("checkpoint", str(folder), reason, _NAME_IT)
        return text
    if (folder / _LATEST_OF_BRIDGE).is_file():
        step = _numbers(read_plain(folder / _LATEST_OF_BRIDGE)).get("step")
        if isinstance(step, int):
            return str(step)
    return None


def _numbers(state: Any) -> dict[str, Any]:
    """Return a dictionary with its tensors of one element as numbers."""
    if not isinstance(state, Mapping):
        return {}
    return {
        str(name): value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for name, value in state.items()
    }


def _open_rank_files(step: Path, said: int | None, heads: int | None) -> Store:
    files = open_rank_files(step, heads)
    with reading(step):
        common = {n: plain(value) for n, value in files.content.items() if n not in _OF_RANKS}
        arguments = plain(attributes(files.content.get("args")))

    def find_fp8() -> bool:
        return any(mark in content for content in files.extra_states() for mark in FP8_HISTORY)

    return Store(
        weights=files.weights,
        format="torch",
        step_folder=step,
        iteration=_iteration(step, said, common),
        arguments={**arguments, **files.parallelism},
        run_config=None,
        common=common,
        tokenizer=_tokenizer(step),
        raw=files.weights,
        has_optimizer="optimizer" in files.content,
        _find_fp8=find_fp8,
    )


def _open_distributed(step: Path, said: int | None) -> Store:
    form = _format(step)
    stored = read_folder(step)
    if form == "fsdp_dtensor" and not any(name.startswith("model.") for name in stored.tensors):
        reason = f"there is no {_DESCRIPTION}, which Megatron writes last"
        raise CheckpointError("checkpoint", str(step), reason, DAMAGED)
    common = _common(step, stored)
    with reading(step):
        arguments = plain(attributes(common.pop("args", None)))
    if (step / _TRAIN_STATE).is_file():
        common["train_state"] = _numbers(read_plain(step / _TRAIN_STATE))
    config = _run_config(step / "run_config.yaml")
    return Store(
        weights=stored.weights(hybrid_pattern(arguments, config or {})),
        format=form,
        step_folder=step,
        iteration=_iteration(step, said, common),
        arguments=arguments,
        run_config=config,
        common=common,
        tokenizer=_tokenizer(step),
        raw=stored.raw(),
        has_optimizer=stored.has_optimizer,
        _find_fp8=stored.lost_fp8,
    )


def _tokenizer(step: Path) -> Path | None:
    folders = (step / "tokenizer", step.parent / "tokenizer")
    return next((folder for folder in folders if folder.is_dir()), None)


def _format(step: Path) -> str:
    described = (step / METADATA).is_file()
    if not (step / _DESCRIPTION).is_file():
        if described:
            return "fsdp_dtensor"
        reason = f"there is neither {_DESCRIPTION} nor {METADATA}"
        raise CheckpointError("checkpoint", str(step), reason, DAMAGED)
    said = read_json(step / _DESCRIPTION, CheckpointError, "checkpoint", DAMAGED)
    backend = said.get("sharded_backend") if isinstance(said, dict) else None
    if backend != "torch_dist":
        reason = f"its format is {str(backend)[:40]!r}, where torch_dist, torch and fsdp_dtensor"
        reason += " are read"
        raise CheckpointError("checkpoint", str(step), reason, _SAVE_ANEW)
    if not described:
        raise CheckpointError("checkpoint", str(step), f"there is no {METADATA}", DAMAGED)
    return "torch_dist"


def _common(step: Path, stored: Distributed) -> dict[str, Any]:
    """Return what a checkpoint holds beside tensors."""
    if (step / "common.pt").is_file():
        found = read_plain(step / "common.pt")
    elif any(name.startswith("common_state/") for name in stored.objects):
        found = {}
        for name in sorted(stored.objects):
            if name.startswith("common_state/"):
                content = stored.object(name)
                with reading(step, name):
                    found |= content[0] if isinstance(content, list) else content
    else:
        plain_names = ("args", "iteration", "checkpoint_version")
        found = {name: stored.object(name) for name in plain_names if name in stored.objects}
    if not isinstance(found, dict):
        raise CheckpointError("checkpoint", str(step), "its common state is damaged", DAMAGED)
    return found


def _iteration(step: Path, said: int | None, common: Mapping[str, Any]) -> int | None:
    trained = _numbers(common.get("train_state")).get("step")
    inside = [n for n in (common.get("iteration"), trained) if isinstance(n, int)]
    numbers = {n for n in (said, *inside) if n is not None}
    if len(numbers) > 1:
        reason = f"its folder is {step.name}, but its common state says iteration {inside[0]}"
        raise CheckpointError("checkpoint", str(step), reason, DAMAGED)
    return numbers.pop() if numbers else None


def hybrid_pattern(arguments: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return ``--hybrid-layer-pattern`` as far as a checkpoint says it; else an empty text."""
    model = config.get("model")
    for source in (arguments, model if isinstance(model, Mapping) else {}):
        for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
            if isinstance(source.get(name), str):
                return str(source[name])
    return ""


def _run_config(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    import yaml

    class Loader(yaml.SafeLoader):
        """Makes plain values of what other tags name."""

    def inert(loader: Any, _: str, node: Any) -> Any:
        if isinstance(node, yaml.MappingNode):
            return loader.construct_mapping(node, deep=True)
        if isinstance(node, yaml.SequenceNode):
            return loader.construct_sequence(node, deep=True)
        return loader.construct_scalar(node)

    Loader.add_multi_constructor("", inert)
    with reading(path):
        found = yaml.load(path.read_text(encoding="utf-8"), Loader)
    return found if isinstance(found, dict) else {}
