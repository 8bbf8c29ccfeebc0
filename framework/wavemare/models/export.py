# SPDX-License-Identifier: Apache-2.0
"""Weights out: from the stages of a pipeline, or a sharded model, to a Hugging Face folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor
from torch import distributed as dist
from transformers import PreTrainedModel

from wavemare.engine.launch.group import gather
from wavemare.engine.parts import own_part
from wavemare.errors import ModelError, WavemareError
from wavemare.files import replace_path
from wavemare.models.adapters import (
    adapter_names,
    are_merged,
    is_adapted,
    merged,
    whole_without_weights,
)
from wavemare.models.module import TransformerPipeline
from wavemare.models.quantized import has_quantized
from wavemare.models.whole import complete, gathered
from wavemare.parallel.tensor.partition import is_split


def save_pretrained(
    engine_or_module: Any,
    folder: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    merge: bool = False,
) -> None:
    """Write a Hugging Face folder that ``from_pretrained`` reads; every process calls this.

    Of a ``PeftModel`` it is the adapter's folder, unless ``merge`` asks for a whole model's. In a
    whole model no weights are quantized.

    Works for pipelines made by :func:`to_pipeline`, for models split over ranks, and for plain
    models under ZeRO stages 0 to 3. An engine is synchronized first.
    Files are written beside the target and moved into it at the end, so that a failure leaves it as
    it was; other files in it stay.

    Args:
        engine_or_module: An engine or its module.
        folder: The target, made if it does not exist.
        tokenizer: A tokenizer to save with the model.
        merge: Whether to merge a LoRA adapter into the weights.

    Raises:
        ModelError: There is no transformers model in the engine, its adapter is to be merged twice,
            or rank 0 cannot write.
    """
    model = complete(engine_or_module)
    if merge:
        _check_not_merged(model)
    saver = model.skeleton if isinstance(model, TransformerPipeline) else model
    state = gathered(model, _wanted(saver, merge))
    if isinstance(model, TransformerPipeline):
        if state is not None:
            # A 16-bit engine casts the layers; the skeleton decides what config.json says.
            saver.to(next(t.dtype for t in state.values() if t.is_floating_point()))
            state = state if is_adapted(saver) else _one_tensor_each(state, saver)
    elif is_split(model) or has_quantized(model):
        saver = whole_without_weights(model)
    failure: Exception | None = None
    if state is not None:
        try:
            if merge and is_adapted(saver):
                state, saver = merged(saver, state), saver.get_base_model()
            _write(saver, state, Path(folder), tokenizer)
        except Exception as error:  # also safetensors' own; the others wait for this rank
            failure = error
    agree_on_failure(failure, folder)


def _check_not_merged(model: Any) -> None:
    """Refuse to merge adapters that the weights already hold; all ranks raise."""
    own = are_merged(model)
    if any(gather(own)) if dist.is_initialized() else own:
        reason = "the adapter has been merged into the weights, and would be added again"
        raise ModelError("merge", True, reason, "Call unmerge_adapter() on all ranks first")


def _wanted(model: Any, merge: bool) -> set[str] | None:
    """Return the names of the weights to gather, as rank 0's model knows them; None means all."""
    names = [adapter_names(model) if is_adapted(model) and not merge else None]
    if dist.is_initialized():
        dist.broadcast_object_list(names, src=0)
    return names[0]


def _one_tensor_each(state: dict[str, Tensor], saver: PreTrainedModel) -> dict[str, Tensor]:
    """Copy tensors under several names, except for names that the configuration ties.

    Of names that share a tensor transformers saves one alone. Without ties in its configuration,
    the model that is loaded would miss the others.
    """
    tied = saver.get_expanded_tied_weights_keys(all_submodels=True)
    seen: set[int] = set()
    separate = {}
    for name, tensor in state.items():
        again = id(tensor) in seen and name not in tied
        separate[name] = tensor.clone() if again else tensor
        seen.add(id(tensor))
    return separate


def _write(saver: Any, state: dict[str, Tensor], target: Path, tokenizer: Any) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    written = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        if is_adapted(saver) and (target / _CARD).is_file():
            shutil.copy(target / _CARD, written)  # which peft completes
        with own_part():  # of the model's methods; the state is whole
            saver.save_pretrained(written, state_dict=state)
        if tokenizer is not None:
            tokenizer.save_pretrained(written)
        _move(written, target)
    finally:
        shutil.rmtree(written, ignore_errors=True)


def _move(written: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    names = {path.name for path in written.iterdir()}
    # Readers look at config.json first, so it comes last.
    for name in sorted(names, key=lambda name: (name in _FIRST_READ, name)):
        replace_path(written / name, target / name)
    if "config.json" not in names:  # an adapter, which may lie beside its base
        return
    for pattern in _OF_FORMER_MODELS:
        for stale in target.glob(pattern):
            if stale.name not in names:
                stale.unlink()


_CARD = "README.md"
_FIRST_READ = ("config.json", "adapter_config.json")
_OF_FORMER_MODELS = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)


def agree_on_failure(failure: Exception | None, folder: str | os.PathLike[str]) -> None:
    """Raise rank 0's failure on all ranks: the others would wait for it at the next collective."""
    said: tuple[str, object, str, str] | None = None
    if isinstance(failure, WavemareError):  # it says what to do
        said = failure.key, failure.value, failure.reason, failure.remedy
    elif failure is not None:
        reason = f"the model could not be saved ({failure})"
        said = "folder", os.fspath(folder), reason, "Free space or choose another folder"
    if dist.is_initialized():
        said = gather(said)[0]
    if said is not None:
        raise ModelError(*said) from failure
