# SPDX-License-Identifier: Apache-2.0
"""From a configuration to an engine, through DeepSpeed's own ``initialize``."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import config as stock
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.utils import groups

from wavemare.engine.config.refusals import check_shares
from wavemare.engine.config.resolve import (
    SECTION,
    WavemareConfig,
    check_batch_sizes,
    check_config,
    load_config,
    misplaced_keys,
    zero_section,
)
from wavemare.engine.config.shape import BATCH_KEYS, ZERO_WEIGHTS, is_enabled, offloads
from wavemare.engine.data_parallel import Engine
from wavemare.engine.launch.group import compiled_ops_enabled, gather
from wavemare.engine.optim.optimizers import clipping_limit, count_all_stages, take_optimizer
from wavemare.engine.optim.policy import advise, check_replaceable
from wavemare.engine.pipe.engine import DualPipeVEngine, PipelineEngine
from wavemare.engine.pipe.linked import OverlappedPipelineEngine, check_overlap
from wavemare.engine.pipe.pipemare import PipeMareEngine
from wavemare.engine.pipe.planned import PlanEngine
from wavemare.engine.seams import dispatch_to, warn_of_other_version
from wavemare.errors import ConfigError, PlanError
from wavemare.pipeline.config import PipelineConfig
from wavemare.pipeline.plan.check import check
from wavemare.pipeline.plan.files import read_plan
from wavemare.pipeline.plan.plan import Plan
from wavemare.pipeline.plan.run_plan import RunPlan, homes_of

logger = logging.getLogger("wavemare")

ENGINES: Mapping[str, Any] = {
    "DeepSpeedEngine": Engine,
    "PipelineEngine": PipelineEngine,
    "DualPipeVEngine": DualPipeVEngine,
}
"""The names that ``deepspeed.initialize`` looks up in its module, and what we put there."""

PIPELINE_ENGINES: Mapping[str, type[PipelineEngine]] = {
    "1f1b": PipelineEngine,
    **dict.fromkeys(("zb-h1", "interleaved", "zbv", "auto"), PlanEngine),
    "pipemare": PipeMareEngine,
}
"""The engine that runs each schedule of ``wavemare.pipeline.schedule``; of files `PlanEngine`."""

_IN_ARGS = ("deepspeed_config", "deepscale_config")  # the second is DeepSpeed's older name


def build_engine(
    config: dict[str, Any], *, plan: Plan | None = None, **arguments: Any
) -> tuple[Any, Any, Any, Any]:
    """Check a configuration against the processes there are, and let DeepSpeed build our engine.

    Args:
        config: The whole configuration.
        plan: That of the schedule's file; read here if omitted.
        arguments: ``deepspeed.initialize``'s other parameters, by name.

    Returns:
        Engine, optimizer, loader (or None) and scheduler (or None).

    Raises:
        ConfigError: A key or value that cannot work, before the model is touched.
        PlanError: The stages would wait for each other, or miss a pass.
    """
    warn_of_other_version()
    names = ("model", "mpu", "mesh_param", "optimizer")
    model = arguments.get("model")
    complete, ours, optimizer = resolve(config, **{name: arguments.get(name) for name in names})
    # Without our section all is as in DeepSpeed.
    staged = SECTION in config and isinstance(model, deepspeed.PipelineModule)
    if staged and count_all_stages(model) and dist.get_rank() == 0:
        _say_which_norm(complete, ours)
    arguments["optimizer"] = optimizer
    arguments["args"] = _without_config(arguments.get("args"))
    with dispatch_to(_engines(ours, model, plan)):
        result = deepspeed.initialize(config=complete, **arguments)
    _check_dispatch(result[0])
    return result


def resolve(
    config: dict[str, Any], *, model: Any, mpu: Any, mesh_param: Any, optimizer: Any
) -> tuple[dict[str, Any], WavemareConfig, Any]:
    """Check a configuration against the processes there are, and fill in what it leaves open.

    Batch sizes, the optimizer that the policy chooses, and what DeepSpeed's own choice would be
    wrong for. The configuration given stays as it is.

    Returns:
        What DeepSpeed gets, the section ``wavemare``, and the optimizer for DeepSpeed.

    Raises:
        ConfigError: A key or value that cannot work.
        PlanError: The stages would wait for each other, or miss a pass.
    """
    ours = check_config(config, world_size=dist.get_world_size())
    _refuse_removed(config)
    if dist.get_rank() == 0:
        for warning in misplaced_keys(config):
            logger.warning(warning)
    config, ours = _with_sizes(config, ours, model, mpu, mesh_param)
    check_replaceable(ours, optimizer)
    config, optimizer = take_optimizer(config, model, optimizer)
    config = _without_compiled_optimizer(_without_elastic_files(config), optimizer)
    return config, ours, optimizer


def _refuse_removed(config: Mapping[str, Any]) -> None:
    """Refuse what DeepSpeed has removed, in its words."""
    for part, given, removed in (
        ("", config, stock._REMOVED_TOP_LEVEL_CONFIG_KEYS),
        ("zero_optimization.", zero_section(config), stock._REMOVED_ZERO_CONFIG_KEYS),
    ):
        for key in sorted(given.keys() & removed.keys()):
            raise ConfigError(f"{part}{key}", given[key], removed[key].rstrip(". "), "Leave it out")


def _say_which_norm(config: Mapping[str, Any], ours: WavemareConfig) -> None:
    """Say what clips, where stock DeepSpeed with this configuration clips by another norm."""
    limit, zero = clipping_limit(config), zero_section(config).get("stage", 0)
    in_fp32 = not (is_enabled(config, "fp16") or is_enabled(config, "bf16"))
    if limit and not zero and in_fp32 and not ours.pipeline.is_asynchronous:
        logger.warning(
            "gradient_clipping = %s (DeepSpeed's default is 1.0): the norm is that of all stages; "
            "stock DeepSpeed uses the first stage's, so its losses differ. 0 disables clipping",
            limit,
        )


def read_config(args: Any = None, config: Any = None, config_params: Any = None) -> dict[str, Any]:
    """Find and load the configuration in the places where DeepSpeed looks for it.

    Raises:
        ConfigError: It is missing, given twice or not JSON.
    """
    given = config if config is not None else config_params
    in_args = next((getattr(args, n) for n in _IN_ARGS if getattr(args, n, None) is not None), None)
    if in_args is not None and given is not None:
        raise ConfigError(
            "config", str(in_args), "it is given in args and as a parameter", "Give it once"
        )
    given = in_args if given is None else given
    if given is None:
        raise ConfigError(
            "config", None, "there is no configuration", "Give config= or --deepspeed_config FILE"
        )
    return load_config(given)


def _engines(ours: WavemareConfig, model: Any, plan: Plan | None) -> Mapping[str, Any]:
    """Return `ENGINES`, with the one that the schedule asks for, and with our sections."""
    engines = {name: partial(engine, settings=ours) for name, engine in ENGINES.items()}
    schedule, overlap = ours.pipeline.schedule, ours.pipeline.overlap_forward_backward
    if overlap:
        check_overlap(model)
    stages = isinstance(model, deepspeed.PipelineModule) and not isinstance(model, DualPipeVModule)
    if schedule != "1f1b" and not stages:
        raise ConfigError(
            "wavemare.pipeline.schedule",
            schedule,
            f"{type(model).__name__} is no pipeline of one stage per rank",
            "Give a PipelineModule, or a transformers model and 2 or more stages",
        )
    plan = plan or file_plan(ours.pipeline, _pipeline_length(model, ours))
    if plan is not None:
        return {**engines, "PipelineEngine": partial(PlanEngine, settings=ours, plan=plan)}
    engine = PIPELINE_ENGINES[schedule]
    if overlap and engine is PipelineEngine:
        engine = OverlappedPipelineEngine
    return {**engines, "PipelineEngine": partial(engine, settings=ours)}


def file_plan(pipeline: PipelineConfig, num_ranks: int) -> Plan | None:
    """Return the plan in the file that is the schedule, proved; None if it is no file.

    All ranks call this, and fail alike.

    Raises:
        ConfigError: The file cannot be read.
        PlanError: It holds no plan or a wrong one, for other ranks, or not the same on all ranks.
    """
    if pipeline.file is None:
        return None
    key, plan, error = "wavemare.pipeline.schedule", None, None
    try:
        plan = read_plan(Path(pipeline.file), key)
        check(plan)
        found = hashlib.sha256(str(plan).encode()).hexdigest()[:12]
    except (ConfigError, PlanError) as failure:
        error, found = failure, str(failure)
    ranks = gather(found)
    for rank, other in enumerate(ranks):
        if other != ranks[0]:
            reason = f"the ranks' plans differ: rank 0 has {ranks[0]}, rank {rank} has {other}"
            raise PlanError(key, pipeline.schedule, reason, "Give all ranks the same file")
    if error is not None:
        raise error
    assert plan is not None
    if len(plan.ranks) != num_ranks:
        reason = f"the plan has {len(plan.ranks)} ranks, and the pipeline {num_ranks}"
        raise PlanError(key, pipeline.schedule, reason, "Make it for as many ranks")
    return plan


def _with_sizes(
    config: dict[str, Any], ours: WavemareConfig, model: Any, mpu: Any, mesh_param: Any
) -> tuple[dict[str, Any], WavemareConfig]:
    """Return the configuration with batch sizes, and with the optimizer of the policy."""
    world_size = dist.get_world_size()
    replicas = getattr(getattr(mpu, "replicas", None), "size", 1)
    shares_samples = "sequence_parallel_size" in config or config.get("tensor_parallel")
    if mpu is not None:
        data_ranks = _data_ranks_of(mpu, world_size) * replicas
    elif mesh_param is None and not shares_samples:
        data_ranks = world_size // _stages(model, ours)
    elif not ours.balance.is_active:
        # DeepSpeed counts the data ranks of its own tensor and sequence parallelism.
        return config, ours
    else:
        reason = "the ranks of DeepSpeed's own tensor and sequence parallelism share samples"
        given = ours.balance.model_dump(exclude_unset=True)
        remedy = "Leave it out, or use wavemare.tensor_parallel"
        raise ConfigError("wavemare.balance", given, reason, remedy)
    length = _pipeline_length(model, ours)
    sizes = check_batch_sizes(config, data_world_size=data_ranks, stages=length)
    check_shares(ours.balance, sizes, data_ranks)
    micro_batches = sizes["gradient_accumulation_steps"]
    stages = isinstance(model, deepspeed.PipelineModule) and not isinstance(model, DualPipeVModule)
    if stages and ours.pipeline.file is None:  # the engine compares a file's plan with the model
        _check_homes(model, ours, length)
        # Every rank checks the plans of all: all fail alike, or none.
        clips = clipping_limit(config) > 0
        settings = ours.pipeline.pipemare
        RunPlan.of(ours.pipeline, length, micro_batches, clips=clips).check(
            warmup_steps=settings.warmup_steps, drain_interval=settings.drain_interval
        )
    asynchronous = ours.pipeline.is_asynchronous
    if replicas > 1:  # of which DeepSpeed's grid knows one
        own = {BATCH_KEYS[0]: sizes[BATCH_KEYS[0]] // replicas}
        return {**config, **sizes, **own}, ours
    # DeepSpeed would complete them itself, with one micro-batch per step.
    config = config | {k: n for k, n in sizes.items() if asynchronous or config.get(k) == "auto"}
    if asynchronous:
        config, told = advise(config, stages=length, micro_batches=micro_batches)
        for line in told if dist.get_rank() == 0 else ():
            logger.warning(line)
        return config, WavemareConfig.of(config)
    if length == 1 and mpu is None:
        _check_no_grid(model)
    return config, ours


def _check_homes(model: Any, ours: WavemareConfig, length: int) -> None:
    """Refuse a model that is cut for another schedule."""
    schedule = ours.pipeline.schedule
    needed = homes_of(ours.pipeline, length)
    homes = tuple(getattr(model, "homes", range(length)))
    if homes != needed:
        raise ConfigError(
            "wavemare.pipeline.schedule",
            schedule,
            f"its stages are on the ranks {needed}, and those of the model on {homes}",
            f"Build the model as a ChunkedPipelineModule with homes={needed}, or give a "
            "transformers model",
        )


def _check_no_grid(model: Any) -> None:
    """Refuse a data-parallel engine while DeepSpeed's only process grid is another engine's."""
    replicas = getattr(groups.mpu, "replicas", None)
    if replicas is not None or groups._get_model_parallel_world_size() > 1:
        raise ConfigError(
            "model",
            type(model).__name__,
            "DeepSpeed still holds the process grid of another engine of this process",
            "Call that engine's destroy() before this one is made",
        )


def _data_ranks_of(mpu: Any, world_size: int) -> int:
    # As DeepSpeed counts them: its sequence-parallel mpu knows no data ranks.
    if hasattr(mpu, "get_data_parallel_world_size"):
        return int(mpu.get_data_parallel_world_size())
    return world_size // int(mpu.get_sequence_parallel_world_size())


def _pipeline_length(model: Any, ours: WavemareConfig) -> int:
    if not isinstance(model, deepspeed.PipelineModule):
        return ours.pipeline.stages
    return int(model.mpu().get_pipe_parallel_world_size())


def _stages(model: Any, ours: WavemareConfig) -> int:
    built = _pipeline_length(model, ours)
    if not isinstance(model, deepspeed.PipelineModule):
        return built
    grid = model.mpu()
    if "stages" in ours.pipeline.model_fields_set and ours.pipeline.stages != built:
        raise ConfigError(
            "wavemare.pipeline.stages",
            ours.pipeline.stages,
            f"the model is a PipelineModule of {built} stages",
            "Remove the key, or build the model with that number of stages",
        )
    return built * int(grid.get_slice_parallel_world_size())


def _without_compiled_optimizer(config: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """On a CPU, let torch step as DeepSpeed's FusedAdam would, without compiling that first."""
    chosen = config.get("optimizer") or {}
    parameters = chosen.get("params", {})
    if (
        optimizer is not None
        or get_accelerator().device_name() != "cpu"
        or compiled_ops_enabled()
        or offloads(zero_section(config))
        or str(chosen.get("type", "")).lower() not in ("adam", "adamw")
        or "torch_adam" in parameters
        # torch's has no such choices
        or parameters.get("bias_correction") is False
        or parameters.get("set_grad_none") is False
    ):
        return config
    config = copy.deepcopy(config)
    parameters = config["optimizer"].setdefault("params", {})
    for name in ("bias_correction", "set_grad_none"):
        parameters.pop(name, None)
    parameters.setdefault("weight_decay", 0.0)  # FusedAdam's default; torch's AdamW has another
    parameters["torch_adam"] = True
    if dist.get_rank() == 0:
        logger.info("optimizer: torch's Adam (WAVEMARE_COMPILED_OPS=1 compiles DeepSpeed's)")
    return config


def _without_elastic_files(config: dict[str, Any]) -> dict[str, Any]:
    """Save all of the optimizer: an elastic checkpoint keeps no learning rates, nor Adam's step.

    DeepSpeed reads what is saved so with ``elastic_checkpoint`` and without it.
    """
    zero = zero_section(config)
    if not zero.get("elastic_checkpoint") or zero.get("stage") == ZERO_WEIGHTS:
        return config
    return {**config, "zero_optimization": {**zero, "elastic_checkpoint": False}}


def _without_config(args: Any) -> Any:
    given = [name for name in _IN_ARGS if getattr(args, name, None) is not None]
    if given:
        args = copy.copy(args)
    for name in given:
        setattr(args, name, None)
    return args


def _check_dispatch(engine: object) -> None:
    stock = [getattr(deepspeed, name) for name in ENGINES]
    if type(engine) in stock:
        raise RuntimeError(
            f"deepspeed.initialize built its own {type(engine).__name__}: the dispatch by name "
            f"changed in deepspeed {deepspeed.__version__}"
        )
