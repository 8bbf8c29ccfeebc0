# SPDX-License-Identifier: Apache-2.0
"""From an annotated model and a configuration to a `Layout`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wavemare.engine.config.resolve import WavemareConfig, check_batch_sizes, zero_section
from wavemare.errors import PlanError
from wavemare.models.convert import trained_parameters
from wavemare.parallel.layout.chains import NamedChain, named_chain
from wavemare.parallel.layout.layout import Layout
from wavemare.parallel.layout.regions import Region
from wavemare.parallel.layout.resolve import Regions, check_split, regions_of, stage_cuts
from wavemare.pipeline.plan.partition import balanced_cuts

__all__ = ["compile_layout", "configured", "legal_triples"]

_STEPS = "gradient_accumulation_steps"


def compile_layout(model: Any, config: Mapping[str, Any], *, world_size: int) -> Layout:
    """Return the plan of an annotated model.

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
    chain = named_chain(model, ours.pipeline.inputs) if cut or regions.split else None
    if regions.split is not None:
        assert chain is not None
        check_split(regions, chain)
    cuts = _cuts(regions, chain) if cut and chain is not None else None
    grid = _grid(regions, len(cuts) - 1 if cuts is not None else 1, world_size)
    schedule = pipeline.schedule if pipeline is not None else None
    given = _with_micro_batches(config, pipeline)
    sizes = check_batch_sizes(given, data_world_size=grid.replicas, stages=grid.stages)
    shares = _shares(config, sizes["train_micro_batch_size_per_gpu"], grid.replicas)
    waves = (
        ours.pipeline.overlap_forward_backward if grid.stages > 1 else ours.wavelet.mode == "auto"
    )
    return Layout(
        stages=grid.stages,
        tensor_parallel=grid.splits,
        data_parallel=grid.replicas,
        cuts=cuts if grid.stages > 1 else None,
        num_layers=len(chain.layers) if chain is not None else None,
        schedule=schedule or ours.pipeline.schedule,
        wavelet=waves,
        zero_stage=int(zero_section(config).get("stage", 0)),
        recompute=_recomputes(model, config, grid.stages),
        global_batch=sizes["train_batch_size"],
        micro_steps=sizes[_STEPS],
        shares=shares,
    )


def configured(plan: Layout, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration that runs a plan compiled under ``config``.

    `Layout.configure` decides also what a plan states but in part, such as the mode of the
    waves; these settings stay as they were.
    """
    result = plan.configure(config)
    given, section = config.get("wavemare", {}), result["wavemare"]
    if "wavelet" in given:
        section["wavelet"] = given["wavelet"]
    if "pipeline" in config:
        result["pipeline"] = config["pipeline"]
    return result


@dataclass(frozen=True)
class _Grid:
    stages: int
    splits: int
    replicas: int


def _grid(regions: Regions, stages: int, world_size: int) -> _Grid:
    """Return the degrees; the processes left over are replicas, unless their number was given."""
    split, replicas = regions.split, regions.replicas
    splits = split.size or 1 if split is not None else 1
    left = world_size // (stages * splits)
    count = replicas.size if replicas is not None and replicas.size is not None else left
    if stages * splits * count == world_size:
        return _Grid(stages, splits, count)
    places = [region.place for region in (*regions.of("stage"), split, replicas) if region]
    reason = (
        f"stages x split x replicas = {stages} x {splits} x {count or 1} is not the number of "
        f"processes ({world_size})"
    )
    reason += f"; annotated at {', '.join(dict.fromkeys(places))}" if places else ""
    wanted = (stages, splits, max(count, 1))
    legal = ", ".join(" x ".join(map(str, triple)) for triple in legal_triples(wanted, world_size))
    remedy = f"Start {math.prod(wanted)} processes, or use one of {legal}"
    raise PlanError("world_size", world_size, reason, remedy)


def legal_triples(
    wanted: tuple[int, int, int], world_size: int, count: int = 3
) -> list[tuple[int, int, int]]:
    """Return the degrees (P, T, D) with a product that are nearest to those wanted, nearest first.

    Near is a small sum of squared logarithms of ratios.

    Args:
        wanted: Stages, splits, replicas.
        world_size: The product.
        count: How many to return at most.
    """
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    triples = [
        (p, t, world_size // (p * t))
        for p in divisors
        for t in divisors
        if world_size % (p * t) == 0
    ]

    def distance(triple: tuple[int, int, int]) -> float:
        ratios = (have / want for have, want in zip(triple, wanted, strict=True))
        return sum(math.log(ratio) ** 2 for ratio in ratios)

    return sorted(triples, key=lambda triple: (distance(triple), triple))[:count]


def _cuts(regions: Regions, chain: NamedChain) -> tuple[int, ...]:
    pipeline = regions.pipeline
    if regions.of("stage"):
        return stage_cuts(regions, chain)
    assert pipeline is not None
    if pipeline.stages is None:
        reason = f"the pipeline at {pipeline.place} has no stages"
        remedy = "Annotate stages in it, or give pipeline(stages=N)"
        raise PlanError("pipeline", str(pipeline), reason, remedy)
    return balanced_cuts([trained_parameters(layer) for layer in chain.layers], pipeline.stages)


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
    if ours.tensor_parallel.size > 1:
        given["wavemare.tensor_parallel.size"] = ours.tensor_parallel.size
    pipeline = regions.pipeline
    if pipeline and pipeline.schedule and "schedule" in ours.pipeline.model_fields_set:
        if ours.pipeline.schedule != pipeline.schedule:
            given["wavemare.pipeline.schedule"] = ours.pipeline.schedule
            place = pipeline.place
    for key, value in given.items():
        reason = f"the model is annotated at {place}, which decides it"
        raise PlanError(key, value, reason, "Leave out the key, or the annotation")
