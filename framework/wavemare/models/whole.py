# SPDX-License-Identifier: Apache-2.0
"""The whole model's weights, wherever the ranks hold them: every way of saving asks for them here.

One tensor is gathered at a time. Only rank 0 keeps what it gets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn
from torch import distributed as dist
from transformers import PreTrainedModel

from wavemare.engine.base import EngineMixin
from wavemare.engine.experts import expert_group
from wavemare.engine.launch.group import gather
from wavemare.engine.parts import (
    HOOKS,
    SPLIT,
    PassedOver,
    layout_of,
    lift,
    mark,
    mark_of,
    own_part,
    part_of,
    restore,
)
from wavemare.engine.pipe.chunks import numbered_layers
from wavemare.errors import ModelError
from wavemare.models.adapters import is_adapted
from wavemare.models.module import TransformerPipeline
from wavemare.models.quantized import dequantized, without_statistics
from wavemare.parallel.tensor.hooks import hooks_of_parts, refuse_late_hooks
from wavemare.parallel.tensor.partition import (
    gather_parts,
    is_split,
    partition_of,
    split_embedding,
    without_zero3,
)

_CHECKPOINT = "Call the engine's save_checkpoint"


def whole_state_dict(
    engine_or_model: Any, names: Collection[str] | None = None
) -> dict[str, Tensor] | None:
    """Gather the whole model's weights on rank 0, one tensor at a time; every process calls this.

    Works for plain models, also with ZeRO 1 to 3, for models that are split over ranks, for divided
    experts and for pipelines, with adapters and without. An engine is synchronized first.

    Args:
        engine_or_model: An engine. Of a transformers model it may also be the engine's module, or
            the model that was given to ``initialize``.
        names: Those to gather, the same on all processes; all if omitted.

    Returns:
        On global rank 0 the state dict that the model would have in one process, on the device
        ``cpu``; names that are tied share one tensor. Quantized weights are in their former type,
        and there is nothing beside them. Of a ``PipelineModule`` of your own these are
        the names that ``torch.nn.Sequential`` gives to the same layers. None on the other ranks.

    Raises:
        ModelError: Its weights cannot be gathered, or it is no transformers model and no engine.
    """
    if isinstance(engine_or_model, EngineMixin) and _transformers_model(engine_or_model) is None:
        return gathered(_own_model(engine_or_model), names)
    return gathered(complete(engine_or_model), names)


def gathered(model: Any, names: Collection[str] | None = None) -> dict[str, Tensor] | None:
    """Gather what `complete` has returned, as `whole_state_dict` does."""
    if isinstance(model, PipelineModule):
        return _of_stages(model, names)
    with own_part():
        state = without_statistics(model.state_dict(keep_vars=True))
    if names is not None:
        state = {name: tensor for name, tensor in state.items() if name in names}
    whole = _whole(state, split_embedding(model).group if is_split(model) else None)
    return whole if _is_first() else None


def complete(engine_or_model: Any) -> Any:
    """Return the model or pipeline that has all weights, over all ranks; synchronize its engine.

    Raises:
        ModelError: There is no transformers model, or its weights cannot be gathered.
    """
    model = _transformers_model(engine_or_model)
    if model is None:
        raise ModelError(
            "model",
            type(getattr(engine_or_model, "module", engine_or_model)).__name__,
            "it is neither a transformers model nor a pipeline made by to_pipeline of one",
            "Give the transformers model inside. Of a model of your own, torch.save what "
            "wavemare.models.whole_state_dict(engine) gives (docs/own-model.md)",
        )
    noted, engine = mark_of(model), engine_or_model
    if noted is not None:
        engine = noted.engine() or engine_or_model
        if noted.part.remedy:
            raise noted.part.error("save_pretrained", model)
        if noted.part.is_cut and not isinstance(model, TransformerPipeline):
            if engine is engine_or_model:
                remedy = "Save it before the engine is dropped"
                raise ModelError("model", type(model).__name__, noted.part.reason, remedy)
            model = _transformers_model(engine)
    getattr(engine, "synchronize", lambda: None)()
    return model


def _transformers_model(module: Any) -> Any:
    """Return the transformers model, or the pipeline of one, in an engine; None without."""
    inner = module
    while inner is not None:
        if isinstance(inner, (TransformerPipeline, PreTrainedModel)) or is_adapted(inner):
            return inner
        inner = getattr(inner, "module", None)
    return None


def _own_model(engine: EngineMixin) -> nn.Module:
    """Return an engine's module, which is none of transformers'; synchronize the engine.

    Raises:
        ModelError: Layers or experts are divided in a form that only DeepSpeed knows.
    """
    module, part = engine.module, part_of(engine)
    found = (part.reason, part.remedy) if part is not None and part.remedy else None
    if isinstance(module, PipelineModule):
        if module.mpu().get_slice_parallel_world_size() > 1:
            found = "its layers are split over ranks, in a form of their own", _CHECKPOINT
        if any(getattr(layer, "ep_size", 1) > 1 for layer in module.modules()):
            found = "DeepSpeed has divided its experts over the ranks", _CHECKPOINT
    for refused in gather(found):  # stages have unlike layers
        if refused is not None:
            raise ModelError("whole_state_dict", type(module).__name__, *refused)
    engine.synchronize()
    return module


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _whole(state: Mapping[str, Tensor], group: Any) -> dict[str, Tensor]:
    """Gather weights; all ranks that share one call this, in the same order.

    Args:
        state: The rank's own, by name. Names may share a tensor.
        group: The ranks that split layers; None if none do.

    Returns:
        Whole tensors on the first rank of those that share each. The others' are of no use.
    """
    found: dict[int, Tensor] = {}
    for part in state.values():
        if not isinstance(part, Tensor):  # what a module adds by get_extra_state
            found[id(part)] = part
        elif id(part) not in found:
            whole = _whole_tensor(part, group)
            found[id(part)] = part.new_empty(0) if whole is None else _on_cpu(whole)
    return {name: found[id(part)] for name, part in state.items()}


def _on_cpu(tensor: Tensor) -> Tensor:
    """Return a copy, which later steps do not change."""
    return tensor.detach().clone() if tensor.device.type == "cpu" else tensor.cpu()


def _whole_tensor(part: Tensor, group: Any) -> Tensor | None:
    """Return a whole tensor on the first rank of those that share it; else, if at all, a part."""
    own = without_zero3(dequantized(part))
    partition = partition_of(part)
    if partition is not None:
        parts = gather_parts(own, group)
        own = partition.whole(parts) if parts else own.new_empty(0)
    experts = expert_group([part])
    if experts is None and group is not None and dist.get_rank(group):
        return None
    if experts is not None:
        parts = gather_parts(own, experts)
        own = torch.cat(parts) if parts else own.new_empty(0)
    return own


def _of_stages(pipeline: PipelineModule, names: Collection[str] | None) -> Any:
    grid, (mine, held) = pipeline.mpu(), _held(pipeline)
    if grid.get_data_parallel_rank() >= getattr(pipeline, "expert_ranks", 1):
        return None
    replicas = getattr(grid, "replicas", None)
    if replicas is not None and dist.get_rank() != replicas.first:  # all have the same weights
        return None
    if names is not None:
        held = {name: key for name, key in held.items() if name in names}
    needed = set(held.values())
    own = {name: part for name, part in mine.items() if name in needed}
    splits = grid.get_slice_parallel_world_size() > 1
    own = _whole(own, grid.get_slice_parallel_group() if splits else None)
    if grid.get_slice_parallel_rank() != 0 or grid.get_data_parallel_rank() != 0:
        return None
    device = torch.device(get_accelerator().current_device_name())
    if pipeline.global_rank != 0:
        tensors = {name: value for name, value in own.items() if isinstance(value, Tensor)}
        shapes = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
        others = {name: value for name, value in own.items() if name not in tensors}
        dist.send_object_list([shapes, others], dst=0)
        for tensor in tensors.values():
            dist.send(tensor.to(device).contiguous(), dst=0)
        return None
    for stage in range(1, pipeline.num_pipeline_stages()):
        own |= _receive(grid.stage_to_global(stage), device)
    return {name: own[key] for name, key in held.items()}


def _held(pipeline: PipelineModule) -> tuple[Mapping[str, Tensor], Mapping[str, str]]:
    """Return this rank's weights, and for each name of the whole model's the key of its weight.

    Every process calls this. Layers of the caller's own are named as by ``torch.nn.Sequential``.

    Raises:
        ModelError: Some stage has weights that the whole model has not.
    """
    if isinstance(pipeline, TransformerPipeline):
        for name in (name for part in gather(pipeline.unnamed_weights()) for name in part):
            reason = "it came after initialize, as by torch.nn.utils.prune or parametrize"
            remedy = "Take it back first (prune.remove, remove_parametrizations); or do it before"
            raise ModelError("weights", name, reason, f"{remedy} initialize")
        return pipeline.local_weights(), pipeline.weight_names()
    own: dict[str, Tensor] = {}
    for number, layer in numbered_layers(pipeline):
        own |= without_statistics(layer.state_dict(prefix=f"{number}.", keep_vars=True))
    names = dict.fromkeys(name for part in gather(list(own)) for name in part)
    return own, {name: name for name in sorted(names, key=lambda name: int(name.split(".")[0]))}


def _receive(source: int, device: torch.device) -> dict[str, Tensor]:
    received: list[Any] = [None, None]
    dist.recv_object_list(received, src=source)
    shapes, weights = received
    for name, shape, dtype in shapes:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(tensor, src=source)
        weights[name] = tensor.cpu()
    return weights


def for_a_file(engine: Any, exclude_frozen: bool) -> dict[str, Tensor] | None:
    """Gather an engine's weights as `whole_state_dict`, without frozen ones if so asked."""
    model = complete(engine) if _transformers_model(engine) is not None else _own_model(engine)
    if not exclude_frozen:
        return gathered(model)
    own: Mapping[str, Any]
    names: Mapping[str, str]
    if isinstance(model, PipelineModule):
        own, names = _held(model)
    else:
        with own_part():
            own = without_statistics(model.state_dict(keep_vars=True))
        names = {name: name for name in own}
    frozen = [n for n, w in own.items() if isinstance(w, nn.Parameter) and not w.requires_grad]
    left_out = {name for part in gather(frozen) for name in part}
    return gathered(model, {name for name, key in names.items() if key not in left_out})


# --- before and after initialize ------------------------------------------------------------------


@contextmanager
def handing_over(model: Any) -> Iterator[Callable[[Any], None]]:
    """Give a model to the engine that is built inside, as it was before an earlier engine had it.

    Afterwards it says by itself what does not work any more. Nothing changes if the building fails.

    Args:
        model: The caller's.

    Yields:
        To be called with the module that the engine will train, before anything is built of it.

    Raises:
        ModelError: An earlier engine has trained some layers on each rank, and this one has others.
    """
    found = lift(model)

    def check(module: Any) -> None:
        for former in found.values():
            if former.part.is_cut and former.layout != layout_of(module):
                raise ModelError(
                    "model",
                    type(model).__name__,
                    f"an earlier engine has cut it: {former.part.reason}, and the others are old",
                    "Give the same stages and cuts again, or load what save_pretrained writes",
                )

    try:
        yield check
    except BaseException:
        restore(found)
        raise


def hand_over(model: Any, engine: Any) -> None:
    """Let the caller's model and the engine's module say what they are, and the engine gather.

    Args:
        model: What the caller has given to ``initialize``.
        engine: What was made of it.
    """
    part, module = part_of(engine), engine.module
    if part is None:
        return
    ours = isinstance(module, (TransformerPipeline, PreTrainedModel)) or is_adapted(module)
    # What a stage calls stays callable: layers may be models themselves.
    called = set(module.modules()) if part.is_cut else set()
    held = [m for m in model.modules() if isinstance(m, PreTrainedModel) or is_adapted(m)]
    held = [m for m in held if m not in called] + ([module] if ours else [])
    inner = set(getattr(module, "passed_over", ())).difference(held)
    mark(held, engine, part)
    mark(inner, engine, part, ways=HOOKS if part.is_cut else ())
    for each, ways in hooks_of_parts(module).items():
        mark([each], engine, SPLIT, ways=ways)
    refuse_late_hooks(module)
    if part.is_cut:
        engine.passed_over = PassedOver([m for m in (*held, *inner) if m is not module])
    if ours and not part.remedy:
        engine.gather_weights = for_a_file


def weight_sizes(model: Any) -> tuple[dict[str, int], int]:
    """Return the sizes of a model's weights by name, and together without those of embeddings."""
    modules = model.named_modules()
    embeddings = {f"{name}.weight" for name, m in modules if isinstance(m, torch.nn.Embedding)}
    sizes = {n: getattr(p, "ds_numel", p.numel()) for n, p in model.named_parameters()}
    return sizes, sum(size for name, size in sizes.items() if name not in embeddings)
