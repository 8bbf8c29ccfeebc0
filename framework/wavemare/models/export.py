# SPDX-License-Identifier: Apache-2.0
"""Weights out: from the stages of a pipeline, or a sharded model, to a Hugging Face folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from transformers import PreTrainedModel

from wavemare.engine.experts import is_divided
from wavemare.engine.launch.group import gather
from wavemare.errors import ModelError
from wavemare.models.adapters import adapter_names, is_adapted, merged, whole_without_weights
from wavemare.models.module import TransformerPipeline
from wavemare.parallel.experts import whole_experts
from wavemare.parallel.tensor.partition import (
    gather_weights,
    is_split,
    merged_state_dict,
    without_zero3,
)


def pipeline_state_dict(module: Any, names: set[str] | None = None) -> dict[str, Tensor] | None:
    """Gather a pipeline's weights, one tensor at a time; every process calls this.

    Args:
        module: A :class:`TransformerPipeline`, or an engine that holds one.
        names: Those to gather, the same on all processes; all if omitted.

    Returns:
        On global rank 0 the state dict of the original model, on its device ``cpu``; names that are
        tied share one tensor. None on the other ranks, of which none holds more than its stage.

    Raises:
        ModelError: There is no converted pipeline in ``module``.
    """
    pipeline = _unwrap(module)
    if not isinstance(pipeline, TransformerPipeline):
        raise _not_ours(module)
    grid = pipeline.mpu()
    if grid.get_data_parallel_rank() >= pipeline.expert_ranks:
        return None
    held = pipeline.weight_names()
    if names is not None:
        held = {name: key for name, key in held.items() if name in names}
    needed = set(held.values())
    own = {name: part for name, part in pipeline.local_weights().items() if name in needed}
    if grid.get_slice_parallel_world_size() > 1:
        own = gather_weights(own, grid.get_slice_parallel_group())
        if grid.get_slice_parallel_rank() != 0:
            return None
    if pipeline.expert_ranks > 1:
        own = {n: whole_experts(t) if is_divided(t) else t for n, t in own.items()}
        if grid.get_data_parallel_rank() != 0:
            return None
    device = next(pipeline.parameters()).device
    if pipeline.global_rank != 0:
        dist.send_object_list([[(n, t.shape, t.dtype) for n, t in own.items()]], dst=0)
        for tensor in own.values():
            dist.send(tensor.detach().to(device).contiguous(), dst=0)
        return None
    weights = {name: tensor.detach().cpu() for name, tensor in own.items()}
    for stage in range(1, pipeline.num_pipeline_stages()):
        weights |= _receive(grid.stage_to_global(stage), device)
    return {name: weights[key] for name, key in held.items()}


def save_pretrained(
    engine_or_module: Any,
    folder: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    merge: bool = False,
) -> None:
    """Write a Hugging Face folder that ``from_pretrained`` reads; every process calls this.

    Of a ``PeftModel`` it is the adapter's folder, unless ``merge`` asks for a whole model's.

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
        ModelError: There is no transformers model in the engine, or rank 0 cannot write.
    """
    model = _unwrap(engine_or_module)
    getattr(engine_or_module, "synchronize", lambda: None)()
    if isinstance(model, TransformerPipeline):
        saver = model.skeleton
        state = pipeline_state_dict(model, _wanted(saver, merge))
        if state is not None:
            # A 16-bit engine casts the layers; the skeleton decides what config.json says.
            saver.to(next(t.dtype for t in state.values() if t.is_floating_point()))
            state = state if is_adapted(saver) else _one_tensor_each(state, saver)
    elif is_split(model):
        state, saver = merged_state_dict(model), whole_without_weights(model)
        state = state if dist.get_rank() == 0 else None
    elif isinstance(model, PreTrainedModel) or is_adapted(model):
        state, saver = _gathered(model, _wanted(model, merge)), model
    else:
        raise _not_ours(engine_or_module)
    failure: Exception | None = None
    if state is not None:
        try:
            if merge and is_adapted(saver):
                state, saver = merged(saver, state), saver.get_base_model()
            _write(saver, state, Path(folder), tokenizer)
        except Exception as error:  # also safetensors' own; the others wait for this rank
            failure = error
    _agree(failure, folder)


def _unwrap(module: Any) -> Any:
    while not isinstance(module, (TransformerPipeline, PreTrainedModel)) and not is_adapted(module):
        inner = getattr(module, "module", None)
        if inner is None:
            return module
        module = inner
    return module


def _not_ours(module: Any) -> ModelError:
    return ModelError(
        "model",
        type(_unwrap(module)).__name__,
        "it is neither a transformers model nor a pipeline made by to_pipeline of one",
        "Give the transformers model inside, or use the engine's save_checkpoint",
    )


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


def _receive(source: int, device: torch.device) -> dict[str, Tensor]:
    received: list[Any] = [None]
    dist.recv_object_list(received, src=source)
    weights = {}
    for name, shape, dtype in received[0]:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(tensor, src=source)
        weights[name] = tensor.cpu()
    return weights


def _gathered(model: Any, names: set[str] | None) -> dict[str, Tensor] | None:
    """Return a model's state dict on rank 0; under ZeRO-3 one parameter is whole at a time."""
    main = not dist.is_initialized() or dist.get_rank() == 0
    state = model.state_dict(keep_vars=True)
    state = {name: tensor for name, tensor in state.items() if names is None or name in names}
    # Tied names share a tensor. Gathering is collective: all ranks go through the same list.
    whole = {
        identity: _gathered_tensor(tensor, main)
        for identity, tensor in {id(tensor): tensor for tensor in state.values()}.items()
    }
    if not main:
        return None
    return {name: whole[id(tensor)] for name, tensor in state.items()}


def _gathered_tensor(tensor: Tensor, main: bool) -> Tensor:
    if is_divided(tensor):
        return whole_experts(tensor)
    whole = without_zero3(tensor)
    return whole.cpu() if main else tensor.new_empty(0)


def _write(saver: Any, state: dict[str, Tensor], target: Path, tokenizer: Any) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    written = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
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
        os.replace(written / name, target / name)
    if "config.json" not in names:  # an adapter, which may lie beside its base
        return
    for pattern in (
        "model.safetensors",
        "model-*-of-*.safetensors",
        "model.safetensors.index.json",
        "adapter_*",
    ):
        for stale in target.glob(pattern):
            if stale.name not in names:
                stale.unlink()


_FIRST_READ = ("config.json", "adapter_config.json")


def _agree(failure: Exception | None, folder: str | os.PathLike[str]) -> None:
    """Raise rank 0's failure on all ranks: the others would wait for it at the next collective."""
    message = str(failure) if failure is not None else None
    if dist.is_initialized():
        message = gather(message)[0]
    if message is not None:
        raise ModelError(
            "folder",
            os.fspath(folder),
            f"the model could not be saved ({message})",
            "Free space or choose another folder",
        ) from failure
