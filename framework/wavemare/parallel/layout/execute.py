# SPDX-License-Identifier: Apache-2.0
"""Layouts on their way to an engine: read or compiled from annotations, agreed on by all ranks."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed import PipelineModule
from deepspeed import comm as dist

from wavemare.engine.config.resolve import SECTION, WavemareConfig, check_batch_sizes, zero_section
from wavemare.engine.config.sections import ParallelConfig
from wavemare.engine.launch.group import gather
from wavemare.errors import PlanError
from wavemare.models.convert import parameter_cost
from wavemare.parallel.experts import STACKED
from wavemare.parallel.layout.annotations import PLAN, Region, Regions, is_annotated, regions_of
from wavemare.parallel.layout.layout import Layout
from wavemare.parallel.layout.names import NamedChain, annotate, named_chain
from wavemare.pipeline.plan.partition import balanced_cuts

logger = logging.getLogger("wavemare")

_KEY = f"{SECTION}.parallel"


def layout_for(model: Any, values: dict[str, Any]) -> tuple[Layout, dict[str, Any]]:
    """Return the layout that a model is to be run by, equal on all ranks, and its configuration.

    The layout comes from the planner, from `annotate`, or is compiled from the model's annotations
    and those of ``wavemare.parallel``. ``torch.distributed`` must be initialized.

    Args:
        model: The model, whole, as given to ``wavemare.initialize``.
        values: The configuration.

    Raises:
        PlanError: There is no legal layout, there are two, or the ranks do not agree.
    """
    names = WavemareConfig.of(values).parallel
    given, annotated = getattr(model, PLAN, None), is_annotated(model)
    section = values.get(SECTION)
    if isinstance(section, Mapping):
        values = {**values, SECTION: {k: v for k, v in section.items() if k != "parallel"}}
    _check_one(names, annotated, given)
    if isinstance(model, PipelineModule):
        reason = "a PipelineModule has its stages and cuts already"
        raise PlanError("model", type(model).__name__, reason, "Give the model that it is made of")
    if names.plan is not None or given is not None:
        layout = given if given is not None else _read(names.plan)
        layout = agree(layout)
        _check_fits(layout, model)
        _tell_order(layout)
        return layout, layout.configure(values)
    if names.annotates:
        mapping = names.model_dump(exclude_unset=True, exclude={"plan"})
        annotate(model, mapping, key=_KEY)
    layout = agree(compile_layout(model, values, world_size=dist.get_world_size()))
    return layout, layout.configure(values)


def agree(layout: Layout) -> Layout:
    """Return rank 0's layout, after comparing all ranks' digests; every rank calls this.

    Raises:
        PlanError: The ranks hold different layouts.
    """
    first, *others = gather(layout)
    for rank, other in enumerate(others, 1):
        if other.digest != first.digest:
            reason = f"rank 0 has {first.digest[:12]}, rank {rank} has {other.digest[:12]}"
            remedy = "Annotate and configure the model alike on all ranks"
            raise PlanError(
                "layout", layout.digest[:12], f"the ranks' layouts differ: {reason}", remedy
            )
    return first


def _read(layout: str | dict[str, Any] | None) -> Layout:
    """Return a layout that was given as a file, which rank 0 reads, or as parsed JSON."""
    if isinstance(layout, dict):
        return Layout.from_json(json.dumps(layout))
    path = Path(str(layout))
    text = why = None
    if dist.get_rank() == 0:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not text"
    text, why = gather((text, why))[0]
    if why is not None:
        reason = f"the file cannot be read ({why})"
        raise PlanError(
            f"{_KEY}.plan", str(path), reason, "Name a file of 'wavemare layout search'"
        )
    return Layout.from_json(text)


def _tell_order(layout: Layout) -> None:
    """Remind of what only the launcher can do: start the ranks on the devices of the layout."""
    if layout.order is None or layout.order == tuple(range(layout.world_size)) or dist.get_rank():
        return
    logger.warning(
        "the layout is for ranks on the cluster's devices %s, in this order: list hosts and devices"
        " so in the hostfile and CUDA_VISIBLE_DEVICES",
        ", ".join(map(str, layout.order)),
    )


def _check_one(names: ParallelConfig, annotated: bool, given: Any) -> None:
    sources = {
        f"{_KEY}.plan": names.plan is not None,
        f"{_KEY} with names": names.annotates,
        "wavemare.annotate with a layout": given is not None,
        "annotations in the program": annotated,
    }
    found = [name for name, there in sources.items() if there]
    if len(found) > 1:
        reason = f"the layout is given by {' and by '.join(found)}"
        raise PlanError(_KEY, found[1], reason, "Use one of them")


def _check_fits(layout: Layout, model: Any) -> None:
    """Check that a layout that was made elsewhere is for this model and these processes."""
    processes = dist.get_world_size()
    if layout.world_size != processes:
        reason = f"the layout is for {layout.world_size} processes"
        raise PlanError(
            "world_size", processes, reason, f"Start {layout.world_size}, or search again"
        )
    if layout.stages > 1:
        layers = len(named_chain(model).layers)
        if layout.num_layers != layers:
            reason = f"the model has {layers} layers"
            raise PlanError(
                "num_layers", layout.num_layers, reason, "Search a layout again for this model"
            )


_STEPS = "gradient_accumulation_steps"


def compile_layout(model: Any, config: Mapping[str, Any], *, world_size: int) -> Layout:
    """Return the layout of an annotated model.

    Args:
        model: The model, whole.
        config: DeepSpeed's configuration: batch sizes, ZeRO, schedule unless annotated.
        world_size: Number of processes.

    Raises:
        PlanError: Annotations do not go together, with the configuration or with the processes.
        ConfigError: The batch sizes do not multiply.
        ModelError: The model cannot be cut or split.
    """
    ours = WavemareConfig.of(config)
    regions = regions_of(model)
    if not regions.by_module:
        reason = "none of its modules is annotated"
        raise PlanError("model", type(model).__name__, reason, "Use wavemare.annotate, or scopes")
    _check_given_once(ours, regions)
    pipeline = regions.pipeline
    cut = bool(regions.of("stage")) or pipeline is not None
    experts = _expert_ranks(regions, model)
    whole = regions.split is None or experts > 1
    chain = named_chain(model, ours.pipeline.inputs) if cut or not whole else None
    if not whole:
        assert chain is not None
        _check_split(regions, chain)
    cuts = _cuts(regions, chain) if cut and chain is not None else None
    stages = len(cuts) - 1 if cuts is not None else 1
    splits, replicas = _degrees(regions, stages, world_size, whole=whole)
    _check_expert_ranks(regions, experts, replicas)
    schedule = pipeline.schedule if pipeline is not None else None
    given = _with_micro_batches(config, pipeline)
    sizes = check_batch_sizes(given, data_world_size=replicas, stages=stages)
    shares = _shares(config, sizes["train_micro_batch_size_per_gpu"], replicas)
    return Layout(
        stages=stages,
        tensor_parallel=splits,
        data_parallel=replicas,
        expert_parallel=experts,
        cuts=cuts if stages > 1 else None,
        num_layers=len(chain.layers) if chain is not None else None,
        schedule=schedule or ours.pipeline.schedule,
        wavelet=stages == 1 and ours.wavelet.mode == "auto",
        zero_stage=int(zero_section(config).get("stage", 0)),
        recompute=_recomputes(model, config, stages),
        global_batch=sizes["train_batch_size"],
        micro_steps=sizes[_STEPS],
        shares=shares,
    )


def _expert_ranks(regions: Regions, model: Any) -> int:
    """Return over how many ranks a split divides experts; 1 if it splits layers, or there is none.

    Raises:
        PlanError: It divides the experts of some layers alone.
    """
    split = regions.split
    if split is None or not split.size:
        return 1
    experts = [
        name
        for name, module in model.named_modules()
        if STACKED == dict(module.named_parameters(recurse=False)).keys()
    ]
    inside = [name for name, own in regions.by_module.items() if own.enclosing("split")]
    roots = [name for name in inside if name.rpartition(".")[0] not in inside]
    if not experts or not set(roots) <= set(experts):
        return 1
    for name in experts:
        if name not in roots:
            reason = f"{split} at {split.place} leaves {name} whole, and experts are divided alike"
            raise PlanError("split", str(split), reason, "Split the experts of all layers or none")
    return split.size


def _check_expert_ranks(regions: Regions, experts: int, replicas: int) -> None:
    split = regions.split
    if split is not None and replicas % experts:
        reason = (
            f"{split} at {split.place} divides experts over {experts} ranks of a stage, which has "
            f"{replicas}"
        )
        remedy = f"Start processes for a multiple of {experts} replicas, or give another size"
        raise PlanError("split", str(split), reason, remedy)


def _degrees(regions: Regions, stages: int, world_size: int, *, whole: bool) -> tuple[int, int]:
    """Return splits and replicas: the processes left over, unless their number was given.

    Args:
        regions: The annotations.
        stages: Of the pipeline.
        world_size: Number of processes.
        whole: Whether layers are whole on a rank, but for experts.
    """
    split, replicas = regions.split, regions.replicas
    splits = split.size or 1 if split is not None and not whole else 1
    left = world_size // (stages * splits)
    count = replicas.size if replicas is not None and replicas.size is not None else left
    if stages * splits * count == world_size:
        return splits, count
    places = [region.place for region in (*regions.of("stage"), split, replicas) if region]
    reason = (
        f"stages x split x replicas = {stages} x {splits} x {count or 1} is not the number of "
        f"processes ({world_size})"
    )
    reason += f"; annotated at {', '.join(dict.fromkeys(places))}" if places else ""
    remedy = f"Start {stages * splits * max(count, 1)} processes, or change the annotations"
    raise PlanError("world_size", world_size, reason, remedy)


def _cuts(regions: Regions, chain: NamedChain) -> tuple[int, ...]:
    pipeline = regions.pipeline
    if regions.of("stage"):
        return _stage_cuts(regions, chain)
    assert pipeline is not None
    if pipeline.stages is None:
        reason = f"the pipeline at {pipeline.place} has no stages"
        remedy = "Annotate stages in it, or give pipeline(stages=N)"
        raise PlanError("pipeline", str(pipeline), reason, remedy)
    return balanced_cuts([parameter_cost(layer) for layer in chain.layers], pipeline.stages)


def _with_micro_batches(config: Mapping[str, Any], pipeline: Region | None) -> Mapping[str, Any]:
    micro_batches = pipeline.micro_batches if pipeline is not None else None
    if pipeline is None or micro_batches is None:
        return config
    given = config.get(_STEPS)
    if given not in (None, "auto", micro_batches):
        reason = f"{pipeline.place} has {micro_batches} micro-batches"
        raise PlanError(_STEPS, given, reason, "Leave out one of the two")
    return {**config, _STEPS: micro_batches}


def _shares(config: Mapping[str, Any], micro: int, replicas: int) -> tuple[int, ...]:
    balance = config.get("wavemare", {}).get("balance")
    given = balance.get("shares") if isinstance(balance, Mapping) else None
    return tuple(given) if isinstance(given, list) else (micro,) * replicas


def _recomputes(model: Any, config: Mapping[str, Any], stages: int) -> bool:
    if stages > 1:
        theirs = config.get("pipeline", {})
        return bool(isinstance(theirs, Mapping) and theirs.get("activation_checkpoint_interval"))
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def _check_given_once(ours: WavemareConfig, regions: Regions) -> None:
    place = regions.all[0].place
    given = {
        f"wavemare.pipeline.{name}": getattr(ours.pipeline, name)
        for name in ("stages", "partition")
        if name in ours.pipeline.model_fields_set
    }
    for name in ("tensor_parallel", "expert_parallel"):
        size = getattr(ours, name).size
        if size > 1 and (name == "tensor_parallel" or regions.split is not None):
            given[f"wavemare.{name}.size"] = size
    pipeline = regions.pipeline
    if pipeline and pipeline.schedule and "schedule" in ours.pipeline.model_fields_set:
        if ours.pipeline.schedule != pipeline.schedule:
            given["wavemare.pipeline.schedule"] = ours.pipeline.schedule
            place = pipeline.place
    for key, value in given.items():
        reason = f"the model is annotated at {place}, which decides it"
        raise PlanError(key, value, reason, "Leave out the key, or the annotation")


def _stage_cuts(regions: Regions, chain: NamedChain) -> tuple[int, ...]:
    """Return the bounds of the stages: layers without a region join the stage around them.

    Raises:
        PlanError: The stages are not consecutive layers, or a layer could belong to two.
    """
    found = [_stage_of(regions, names) for names in chain.modules]
    known = [stage for stage in found if stage is not None]
    filled: list[Region] = []
    for index, own in enumerate(found):
        stage = own
        if stage is None:
            before = filled[-1] if filled else None
            after = next((s for s in found[index:] if s is not None), None)
            if before is not None and after is not None and before.name != after.name:
                layer = ", ".join(chain.modules[index]) or f"layer {index}"
                reason = f"it is between {before} at {before.place} and {after} at {after.place}"
                raise PlanError("stage", layer, reason, "Annotate it too")
            stage = before or after or known[0]
        filled.append(stage)
    starts = [i for i, s in enumerate(filled) if i == 0 or s.name != filled[i - 1].name]
    seen: dict[str | None, Region] = {}
    for start in starts:
        stage = filled[start]
        if stage.name in seen:
            between, first = filled[start - 1], seen[stage.name]
            reason = (
                f"{between} at {between.place} is between {stage} at {first.place} and at "
                f"{stage.place}: a stage is consecutive layers"
            )
            raise PlanError("stage", stage.name, reason, "Move the modules to one side")
        seen[stage.name] = stage
    for region in regions.of("stage"):
        if region.name not in seen:
            reason = f"the stage of {region.place} holds no layer of its own"
            raise PlanError("stage", region.name, reason, "Name whole layers, or leave it out")
    return (*starts, len(filled))


def _stage_of(regions: Regions, names: Sequence[str]) -> Region | None:
    stages = [
        stage
        for name in names
        if (region := regions.by_module.get(name)) is not None
        if (stage := region.enclosing("stage")) is not None
    ]
    for stage in stages[1:]:
        first = stages[0]
        if stage.name != first.name:
            reason = (
                f"{', '.join(names)} are one layer, but {first} at {first.place} has one of them "
                f"and {stage} at {stage.place} another"
            )
            raise PlanError("stage", stage.name, reason, "Put them into one stage")
    return stages[0] if stages else None


def _check_split(regions: Regions, chain: NamedChain) -> None:
    """Check that a split holds all blocks: the ranks that share one layer share each.

    Raises:
        PlanError: A block is not split.
    """
    split = regions.split
    assert split is not None
    for index in chain.blocks:
        for name in chain.modules[index]:
            region = regions.by_module.get(name)
            own = region.enclosing("split") if region is not None else None
            if own is None:
                where = f"{name} at {region.place}" if region is not None else name
                reason = f"{split} at {split.place} leaves {where} whole, and blocks are alike"
                raise PlanError("split", str(split), reason, "Split all blocks or none")
