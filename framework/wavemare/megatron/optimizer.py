# SPDX-License-Identifier: Apache-2.0
"""The state of Megatron's optimizer as a universal checkpoint of DeepSpeed, to go on from.

Megatron keeps Adam's averages and weights in fp32 under the names and in the shapes of the model's
weights, if it saves them with ``--dist-ckpt-optim-fully-reshardable`` or without its distributed
optimizer. So the tables of the weights serve three times.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import __version__ as deepspeed_version
from deepspeed.checkpoint.constants import (
    CAT_DIM,
    DS_VERSION,
    OPTIMIZER_STATE_DICT,
    PARAM,
    PARAM_GROUPS,
)
from torch import Tensor

from wavemare.engine.checkpoint.compatibility import WHOLE
from wavemare.errors import CheckpointError, WavemareError, os_errors
from wavemare.files import atomic_write_text, replace_folder, temporary_sibling
from wavemare.megatron.arrays import reading
from wavemare.megatron.distributed import Distributed, read_folder
from wavemare.megatron.keys import HEAD, HfWeights, table_of
from wavemare.megatron.store import hybrid_pattern
from wavemare.models.source import Stored

if TYPE_CHECKING:
    from wavemare.megatron.models import Opened
    from wavemare.models.source import WeightSource

LATEST = "latest_universal"
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(param|fp32_param|exp_avg|exp_avg_sq)\.")
_AVERAGES = ("exp_avg", "exp_avg_sq")
_READABLE = "fully_reshardable"
_MOST_GROUPS = 256
"""DeepSpeed reads as many parameter groups as the file has; no engine has more."""
_SPARE = 64 * 2**20  # bytes on the disk besides the weights
_PLACE = "Free space, or choose another place"
_SETTINGS = ("lr", "weight_decay")
_STEPS = ("step", "common_step")
_ANEW = (
    "Save once more with Megatron's --dist-ckpt-optim-fully-reshardable, or go on from the weights "
    "alone: wavemare convert FOLDER OUT --to hf"
)


def write_universal(opened: Opened, folder: str | os.PathLike[str]) -> str:
    """Write weights, Adam's averages, step and data position as a universal checkpoint.

    An engine with ZeRO goes on from it: ``load_checkpoint(folder)`` with the configuration's
    ``"checkpoint": {"load_universal": true}``. It may be a plain engine or a pipeline, with any
    number of ranks; layers that are split over ranks are refused.

    Args:
        opened: From `open_checkpoint`.
        folder: What ``load_checkpoint`` will get; a tag of the same name in it is replaced.

    Returns:
        The tag, ``global_step`` and the iteration.

    Raises:
        CheckpointError: There is no state of Adam that has the shapes of the weights, or the disk
            does not take it.
    """
    return write_state(OptimizerState(opened), folder)


def write_state(
    state: OptimizerState,
    folder: str | os.PathLike[str],
    progress: Callable[[str, int, int], None] = lambda what, size, total: None,
    *,
    resume: bool = False,
) -> str:
    """Write a universal checkpoint; see `write_universal`.

    Args:
        state: The weights, Adam's averages, step and data position.
        folder: What ``load_checkpoint`` will get.
        progress: Called with what is done, its bytes, and the bytes of all.
        resume: Whether to write in place, and to go on where a killed call has stopped: the caller
            knows that it wrote the same state. Otherwise the tag's folder appears at the end.

    Raises:
        CheckpointError: The disk does not take it.
    """
    folder, tag = Path(folder).expanduser(), f"global_step{state.iteration}"
    with os_errors(CheckpointError, "folder", str(folder), "it cannot be written", _PLACE):
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        into = folder / tag if resume else temporary_sibling(folder / tag)
        try:
            _check_space(state, into)
            _write_weights(state, into / "zero", _names_of_stages(state.config), progress)
            _write_rest(state, into)
            if not resume:
                replace_folder(into, folder / tag)
        except BaseException:
            if not resume:
                shutil.rmtree(into, ignore_errors=True)
                if is_new:
                    shutil.rmtree(folder, ignore_errors=True)
            raise
        atomic_write_text(folder / LATEST, tag)
    return tag


def _check_space(state: OptimizerState, into: Path) -> None:
    missing = [name for name in state.names if not (into / "zero" / name).is_dir()]
    needed = sum(state.size_of(name) for name in missing) + _SPARE
    free = shutil.disk_usage(into.parent).free
    if needed > free:
        reason = f"it needs {needed:,} bytes, and the disk has {free:,}"
        raise CheckpointError("folder", str(into.parent), reason, _PLACE)


class Written:
    """One kind of state in a universal checkpoint, as a source of weights.

    Args:
        state: What was written.
        kind: ``fp32``, ``exp_avg`` or ``exp_avg_sq``.
        folder: Of the tag.
    """

    def __init__(self, state: OptimizerState, kind: str, folder: Path) -> None:
        self._kind, self._zero = kind, folder / "zero"
        self.stored: Mapping[str, Stored] = {
            name: Stored(state.sources[kind].stored[name].shape, torch.float32)
            for name in state.names
        }

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Return a weight or its part; see `WeightSource`."""
        file = self._zero / name / f"{self._kind}.pt"
        with reading(file):
            found: Tensor = torch.load(file, weights_only=True, mmap=True)[PARAM]
        return found[index]


class OptimizerState:
    """What a Megatron checkpoint holds of its optimizer, by the names of transformers.

    Attributes:
        sources: The weights in fp32, and Adam's two averages: ``fp32``, ``exp_avg``,
            ``exp_avg_sq``.
        step: Adam's.
        iteration: Steps that were trained.
        consumed_samples: Training samples that were used.
        settings: What all parameter groups have in common of learning rate and weight decay.
        names: The weights, without those that are tied to others.
        config: Of transformers.

    Raises:
        CheckpointError: See `write_universal`.
    """

    def __init__(self, opened: Opened) -> None:
        store = opened.store
        where = str(store.step_folder)
        kept = store.common.get("content_metadata") or {}
        kind = kept.get("distrib_optim_sharding_type") if isinstance(kept, Mapping) else None
        if not store.has_optimizer:
            raise CheckpointError("optimizer", where, "it holds no state of an optimizer", _ANEW)
        found = {} if store.format != "torch_dist" else _tensors(read_folder(store.step_folder))
        if any(name not in found for name in _AVERAGES):
            said = f" ({kind})" if kind and kind != _READABLE else ""
            reason = f"its optimizer's state{said} is not in the shapes of the weights"
            raise CheckpointError("optimizer", where, reason, _ANEW)
        pattern = hybrid_pattern(store.arguments, store.run_config or {})
        centered = bool(opened.arguments.get("apply_layernorm_1p", False))

        def source(name: str) -> WeightSource:
            whole = found[name].weights(pattern)
            is_weight = name not in _AVERAGES
            return HfWeights(whole, opened.config, centered=centered and is_weight)

        masters = [source(name) for name in ("param", "fp32_param") if name in found]
        self.sources: dict[str, WeightSource] = {
            "fp32": masters[0] if masters else opened.weights,
            **{name: source(name) for name in _AVERAGES},
        }
        for name, each in self.sources.items():
            if missing := sorted(opened.weights.stored.keys() - each.stored.keys()):
                reason = f"its optimizer has no {name} of {len(missing)} weights"
                raise CheckpointError("optimizer", missing[0], reason, _ANEW)
        state = store.common.get("optimizer", {})
        steps = {int(step) for step in _values(state, _STEPS) if step is not None}
        if len(steps) != 1:
            reason = f"its optimizer has taken {sorted(steps) or 'no'} steps, where one is expected"
            raise CheckpointError("optimizer", where, reason, _ANEW)
        self.step = steps.pop()
        self.iteration = opened.iteration or 0
        self.consumed_samples = opened.consumed_samples
        self.settings = {}
        for name in _SETTINGS:
            values = list(_values(state, (name,)))
            if values and all(value == values[0] for value in values):
                self.settings[name] = values[0]
        self.config = opened.config
        tied = opened.config.tie_word_embeddings
        head = next(row for row in table_of(opened.config).outside if row.megatron == HEAD)
        self.names = [n for n in opened.weights.stored if not (tied and n in head.names)]

    def size_of(self, name: str) -> int:
        """Return the bytes of a weight's state: three tensors in fp32."""
        shape = self.sources["exp_avg"].stored[name].shape
        return len(self.sources) * torch.Size(shape).numel() * torch.float32.itemsize

    @property
    def size(self) -> int:
        """Bytes of all that is written."""
        return sum(self.size_of(name) for name in self.names)


def _tensors(whole: Distributed) -> dict[str, Distributed]:
    """Return for each kind of state its tensors, by the names of the weights."""
    found: dict[str, dict[str, str]] = {}
    for name in whole.tensors:
        if match := _STATE.match(name):
            found.setdefault(match[1], {})[name[match.end() :]] = name
    return {
        kind: Distributed(
            whole.folder,
            {own: whole.tensors[name] for own, name in names.items()},
            {own: whole.chunks[name] for own, name in names.items()},
        )
        for kind, names in found.items()
    }


def _values(state: Any, names: tuple[str, ...]) -> Iterator[Any]:
    """Yield the values of some keys, wherever they are in nested dictionaries and lists."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            if key in names:
                yield value.item() if isinstance(value, torch.Tensor) else value
            else:
                yield from _values(value, names)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _values(value, names)


def _names_of_stages(config: Any) -> dict[str, list[str]]:
    """Return what stages call the weights, by the names of the whole model; {} if it has none."""
    from wavemare.models.disk_names import empty_model
    from wavemare.models.families import family_of
    from wavemare.models.layers import TiedSpec, name_weights, spec_of

    model = empty_model(config)
    try:
        family = family_of(model)
        chain = tuple(family.chain(model, family.declared(None)))
    except WavemareError:  # a family that is not cut into stages
        return {}
    name_weights(model, chain, family.spares(model))
    found: dict[str, list[str]] = {}
    for number, layer in enumerate(chain):
        spec = spec_of(layer, chain)
        prefixes = [str(number)]
        if isinstance(spec, TiedSpec):
            prefixes.append(f"tied_modules.{spec.key}")
        for own, name in layer.weight_names.items():
            found.setdefault(name, []).extend(f"{prefix}.{own}" for prefix in prefixes)
    return found


def _write_weights(
    state: OptimizerState,
    folder: Path,
    stages: Mapping[str, list[str]],
    progress: Callable[[str, int, int], None],
) -> None:
    step = torch.tensor(float(state.step))
    for name in state.names:
        if (folder / name).is_dir():  # whole: it gets its name last
            progress("write", state.size_of(name), state.size)
            continue
        own = folder / f".{name}.partial"
        _made_anew(own)
        for kind, source in state.sources.items():
            value = source.read(name).to(torch.float32).clone(memory_format=torch.contiguous_format)
            torch.save({CAT_DIM: 0, PARAM: value}, own / f"{kind}.pt")
            progress("write", value.nbytes, state.size)
        torch.save(step, own / "step.pt")
        for other in stages.get(name, ()):
            _link(own, folder / other)
        own.rename(folder / name)


def _made_anew(folder: Path) -> None:
    if folder.exists():  # of a killed call
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _link(folder: Path, other: Path) -> None:
    """Give a folder's files a second name, or copies where the disk has no such names."""
    _made_anew(other)
    for file in folder.iterdir():
        try:
            os.link(file, other / file.name)
        except OSError:
            shutil.copyfile(file, other / file.name)


def _write_rest(state: OptimizerState, folder: Path) -> None:
    """Write what the engine reads beside the weights."""
    groups = [{**state.settings, "params": []} for _ in range(_MOST_GROUPS)]
    of_adam = {"state": {0: {"step": torch.tensor(float(state.step))}}, PARAM_GROUPS: groups}
    rest = {DS_VERSION: deepspeed_version, PARAM_GROUPS: groups, OPTIMIZER_STATE_DICT: of_adam}
    torch.save(rest, folder / "zero" / "optimizer_state.pt")
    done = state.iteration
    model = {
        "module": {},
        "optimizer": None,
        # DeepSpeed's schedulers, and those of torch that keep nothing else.
        "lr_scheduler": {"last_batch_iteration": done - 1, "last_epoch": done},
        "global_steps": done,
        "global_samples": state.consumed_samples,
        "skipped_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        DS_VERSION: deepspeed_version,
        "iteration": done,
        "consumed_train_samples": state.consumed_samples,
    }
    (folder / WHOLE).touch()
    for prefix in ("", "zero_pp_rank_0_"):  # the second is ZeRO 3's
        torch.save(model, folder / f"{prefix}mp_rank_00_model_states.pt")
