# SPDX-License-Identifier: Apache-2.0
"""Weights out: from the stages of a pipeline, or a sharded model, to a Hugging Face folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor
from torch import distributed as dist
from transformers import PreTrainedModel

from wavemare.errors import ModelError
from wavemare.models.module import TransformerPipeline
from wavemare.parallel.experts import whole_experts
from wavemare.parallel.tensor.partition import (
    gather_weights,
    is_split,
    merged_state_dict,
    whole_without_weights,
)


def pipeline_state_dict(module: Any) -> dict[str, Tensor] | None:
    """Gather a pipeline's weights, one tensor at a time; every process calls this.

    Args:
        module: A :class:`TransformerPipeline`, or an engine that holds one.

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
    if grid.get_data_parallel_rank() != 0:
        return None
    own = pipeline.local_weights()
    if grid.get_slice_parallel_world_size() > 1:
        own = gather_weights(own, grid.get_slice_parallel_group())
        if grid.get_slice_parallel_rank() != 0:
            return None
    if pipeline.global_rank != 0:
        dist.send_object_list([[(n, t.shape, t.dtype) for n, t in own.items()]], dst=0)
        for tensor in own.values():
            dist.send(tensor.detach().contiguous(), dst=0)
        return None
    weights = {name: tensor.detach().cpu() for name, tensor in own.items()}
    device = next(pipeline.parameters()).device
    for stage in range(1, pipeline.num_pipeline_stages()):
        weights |= _receive(grid.stage_to_global(stage), device)
    return {name: weights[held] for name, held in pipeline.weight_names().items()}


def save_pretrained(
    engine_or_module: Any, folder: str | os.PathLike[str], *, tokenizer: Any = None
) -> None:
    """Write a Hugging Face folder that ``from_pretrained`` reads; every process calls this.

    Works for pipelines made by :func:`to_pipeline`, for models split over ranks, and for plain
    models under ZeRO stages 0 to 3. Gradients that an asynchronous engine holds are applied first.
    Files are written beside the target and moved into it at the end, so that a failure leaves it as
    it was; other files in it stay.

    Args:
        engine_or_module: An engine or its module.
        folder: The target, made if it does not exist.
        tokenizer: A tokenizer to save with the model.

    Raises:
        ModelError: There is no transformers model in the engine, or rank 0 cannot write.
    """
    model = _unwrap(engine_or_module)
    drain = getattr(engine_or_module, "drain", None)
    if drain is not None:
        drain()
    if isinstance(model, TransformerPipeline):
        state, saver = pipeline_state_dict(model), model.skeleton
        if state is not None:
            # A 16-bit engine casts the layers; the skeleton decides what config.json says.
            saver.to(next(t.dtype for t in state.values() if t.is_floating_point()))
            state = _one_tensor_each(state, saver)
    elif is_split(model):
        state, saver = merged_state_dict(model), whole_without_weights(model)
        state = state if dist.get_rank() == 0 else None
    elif isinstance(model, PreTrainedModel):
        state, saver = _gathered(model), model
    else:
        raise _not_ours(engine_or_module)
    failure: Exception | None = None
    if state is not None:
        try:
            _write(saver, state, Path(folder), tokenizer)
        except Exception as error:  # also safetensors' own; the others wait for this rank
            failure = error
    _agree(failure, folder)


def _unwrap(module: Any) -> Any:
    while not isinstance(module, (TransformerPipeline, PreTrainedModel)):
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
        "Give the transformers model inside (of PEFT's what merge_and_unload returns), or use the "
        "engine's save_checkpoint",
    )


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


def _gathered(model: PreTrainedModel) -> dict[str, Tensor] | None:
    """Return a model's state dict on rank 0; under ZeRO-3 one parameter is whole at a time."""
    main = not dist.is_initialized() or dist.get_rank() == 0
    state = model.state_dict(keep_vars=True)
    # Tied names share a tensor. Gathering is collective: all ranks go through the same list.
    whole = {
        identity: _gathered_tensor(tensor, main)
        for identity, tensor in {id(tensor): tensor for tensor in state.values()}.items()
    }
    if not main:
        return None
    return {name: whole[id(tensor)] for name, tensor in state.items()}


def _gathered_tensor(tensor: Tensor, main: bool) -> Tensor:
    if "expert_group" in vars(tensor):
        return whole_experts(tensor)
    if not hasattr(tensor, "ds_id"):
        return tensor.detach()
    with deepspeed.zero.GatheredParameters([tensor]):
        return tensor.detach().cpu().clone() if main else tensor.new_empty(0)


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
    for name in sorted(names, key=lambda name: (name == "config.json", name)):
        os.replace(written / name, target / name)
    for pattern in (
        "model.safetensors",
        "model-*-of-*.safetensors",
        "model.safetensors.index.json",
    ):
        for stale in target.glob(pattern):
            if stale.name not in names:
                stale.unlink()


def _agree(failure: Exception | None, folder: str | os.PathLike[str]) -> None:
    """Raise rank 0's failure on all ranks: the others would wait for it at the next collective."""
    message = [str(failure) if failure is not None else None]
    if dist.is_initialized():
        dist.broadcast_object_list(message, src=0)
    if message[0] is not None:
        raise ModelError(
            "folder",
            os.fspath(folder),
            f"the model could not be saved ({message[0]})",
            "Free space or choose another folder",
        ) from failure
