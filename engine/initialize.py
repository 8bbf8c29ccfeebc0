# SPDX-License-Identifier: Apache-2.0
"""From a configuration to an engine, through DeepSpeed's own ``initialize``."""

from __future__ import annotations

import copy
import logging
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import config as stock
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.utils import groups
from torch import nn

from wavemare.engine.config.refusals import check_shares, refuse_split
from wavemare.engine.config.resolve import (
    SECTION,
    WavemareConfig,
    check_batch_sizes,
    check_config,
    load_config,
    misplaced_keys,
    refuse_misspelt_section,
    zero_section,
)
from wavemare.engine.config.shape import BATCH_KEYS, ZERO_WEIGHTS, is_enabled
from wavemare.engine.data_parallel import Engine
from wavemare.engine.experts import forget_expert_groups
from wavemare.engine.launch.group import gather
from wavemare.engine.optim.optimizers import (
    clipping_limit,
    ratio_keeping_scheduler,
    take_optimizer,
    without_compiled_optimizer,
)
from wavemare.engine.optim.policy import advise, check_replaceable, is_policys
from wavemare.engine.pipe.chunks import check_shared
from wavemare.engine.pipe.engine import PipelineEngine
from wavemare.engine.pipe.plans import agreed_plan
from wavemare.engine.pipe.spare import with_spare
from wavemare.engine.pipe.staged import DualPipeVEngine
from wavemare.engine.seams import (
    dispatch_to,
    finding_recorders,
    import_muon,
    warn_of_other_version,
)
from wavemare.errors import ConfigError, ModelError, WavemareError
from wavemare.pipeline.plan.files import GivenPlan
from wavemare.pipeline.plan.run_plan import RunPlan

logger = logging.getLogger("wavemare")

ENGINES: Mapping[str, Any] = {
    "DeepSpeedEngine": Engine,
    "PipelineEngine": PipelineEngine,
    "DualPipeVEngine": DualPipeVEngine,
}
"""The names that ``deepspeed.initialize`` looks up in its module, and what we put there."""

_IN_ARGS = ("deepspeed_config", "deepscale_config")  # the second is DeepSpeed's older name


def build_engine(
    config: dict[str, Any], *, plan: GivenPlan | None = None, **arguments: Any
) -> tuple[Any, Any, Any, Any]:
    """Check a configuration against the processes there are, and let DeepSpeed build our engine.

    Args:
        config: The whole configuration.
        plan: Of a pipeline, in place of the configuration's schedule; see `PipelineEngine`.
        arguments: ``deepspeed.initialize``'s other parameters, by name.

    Returns:
        Engine, optimizer, loader (or None) and scheduler (or None).

    Raises:
        ConfigError: A key or value that cannot work, before the model is touched.
        PlanError: The stages would wait for each other, or miss a pass.
    """
    warn_of_other_version()
    import_muon()
    names = ("model", "mpu", "mesh_param", "optimizer")
    model = arguments.get("model")
    given = {name: arguments.get(name) for name in names}
    complete, ours, optimizer = resolve(config, plan=plan, **given)
    # Without our section all is as in DeepSpeed.
    if SECTION in config and isinstance(model, deepspeed.PipelineModule) and dist.get_rank() == 0:
        _say_which_norm(complete, ours, model.mpu().get_pipe_parallel_world_size())
    by_caller = [arguments.get(name) for name in ("optimizer", "lr_scheduler")]
    if SECTION in config and by_caller == [None, None]:
        arguments["lr_scheduler"] = ratio_keeping_scheduler(config)
    arguments["optimizer"] = optimizer
    arguments["model_parameters"] = with_spare(model, complete, arguments)
    arguments["args"] = _without_config(arguments.get("args"))
    replaces_experts = is_enabled(config, "expert_parallel")
    if replaces_experts:
        forget_expert_groups(config["expert_parallel"].get("autoep_size", 1), 1)
    with (
        dispatch_to(_engines(config, ours, model, plan)),
        finding_recorders() if replaces_experts else nullcontext(),
        _naming_experts(config),
    ):
        result = deepspeed.initialize(config=complete, **arguments)
    _check_dispatch(result[0])
    return result


@contextmanager
def _naming_experts(config: Mapping[str, Any]) -> Iterator[None]:
    """Say of an error which section asks for the experts that DeepSpeed does not find."""
    try:
        yield
    except ValueError as error:
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, WavemareError) or "auto_ep" not in Path(frames[-1].filename).name:
            raise
        remedy = (
            "Change that, or use wavemare.expert_parallel, which divides the experts of mixtral, "
            "qwen2_moe and qwen3_moe, also beside LoRA"
        )
        section = config.get("expert_parallel")
        raise ConfigError("expert_parallel", section, str(error).rstrip("."), remedy) from error


def resolve(
    config: dict[str, Any],
    *,
    model: Any,
    mpu: Any,
    mesh_param: Any,
    optimizer: Any,
    plan: GivenPlan | None = None,
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
    _refuse_scalars(config, model)
    _refuse_types(config, ours, model)
    refuse_misspelt_section(config)
    if dist.get_rank() == 0:
        for warning in misplaced_keys(config):
            logger.warning(warning)
    check_replaceable(ours, optimizer)
    config, ours = _with_sizes(config, ours, model, mpu, mesh_param, plan, optimizer)
    replicas = ours.local_steps.mode != "off"
    config, optimizer = take_optimizer(config, model, optimizer, replicas=replicas)
    stage = zero_section(config).get("stage")
    if stage in (1, 2) and optimizer is None and config.get("optimizer") is None:
        reason = "it divides what an optimizer keeps, and there is none"
        remedy = 'Give an optimizer with the model, or "stage": 0 to evaluate alone'
        raise ConfigError("zero_optimization.stage", stage, reason, remedy)
    config = without_compiled_optimizer(_without_elastic_files(config), optimizer)
    return config, ours, optimizer


def _refuse_removed(config: Mapping[str, Any]) -> None:
    """Refuse what DeepSpeed has removed, in its words."""
    for part, given, removed in (
        ("", config, stock._REMOVED_TOP_LEVEL_CONFIG_KEYS),
        ("zero_optimization.", zero_section(config), stock._REMOVED_ZERO_CONFIG_KEYS),
    ):
        for key in sorted(given.keys() & removed.keys()):
            raise ConfigError(f"{part}{key}", given[key], removed[key].rstrip(". "), "Leave it out")


def _refuse_scalars(config: Mapping[str, Any], model: Any) -> None:
    """Refuse weights of no dimension under ZeRO 3, which views them as bytes to cut them."""
    if zero_section(config).get("stage") != ZERO_WEIGHTS or not isinstance(model, nn.Module):
        return
    name = next((name for name, own in model.named_parameters() if own.dim() == 0), None)
    if name is not None:
        raise ModelError(
            name,
            "a weight of no dimension",
            "ZeRO 3 cannot cut it",
            "Give it one dimension, as torch.zeros(1) has, or use ZeRO 1 or 2",
        )


def _refuse_types(config: Mapping[str, Any], ours: WavemareConfig, model: Any) -> None:
    """Refuse weights of a type, such as float64, that DeepSpeed reduces with ZeRO only.

    Raises:
        ModelError: A weight has such a type, and its gradient would be reduced; on all ranks.
    """
    half = any(is_enabled(config, name) for name in ("bf16", "fp16"))
    sparse = ours.sparse_collective.mode != "off"
    if half or sparse or zero_section(config).get("stage", 0) or not isinstance(model, nn.Module):
        return
    ranks = _stages(model, ours)  # of one pipeline, with those that split its layers
    if ranks > 1 and dist.get_world_size() == ranks:
        return  # nothing is reduced: there is one replica
    known = get_accelerator().supported_dtypes()
    trained = ((n, p) for n, p in model.named_parameters() if p.requires_grad)
    own = next(((n, str(p.dtype)) for n, p in trained if p.dtype not in known), None)
    for found in gather(own) if dist.is_initialized() else [own]:  # stages have unlike layers
        if found is not None:
            reason = "DeepSpeed reduces no gradients of this type without ZeRO"
            remedy = "Use ZeRO 1, or call model.float() before initialize"
            raise ModelError(found[0], found[1], reason, remedy)


def _say_which_norm(config: Mapping[str, Any], ours: WavemareConfig, stages: int) -> None:
    """Say what clips, where stock DeepSpeed with this configuration clips by another norm."""
    limit, zero = clipping_limit(config), zero_section(config).get("stage", 0)
    in_fp32 = not (is_enabled(config, "fp16") or is_enabled(config, "bf16"))
    if stages > 1 and limit and not zero and in_fp32 and not ours.pipeline.is_asynchronous:
        default = "" if "gradient_clipping" in config else ", DeepSpeed's default"
        logger.warning(
            "note: gradients are clipped to norm %s%s, by the norm of all stages. Stock DeepSpeed "
            "takes the first stage's, so its losses differ. To clip nothing: "
            '"gradient_clipping": 0.',
            limit,
            default,
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


def _engines(
    config: Mapping[str, Any], ours: WavemareConfig, model: Any, plan: GivenPlan | None
) -> Mapping[str, Any]:
    """Return `ENGINES` with our sections, and the pipeline's with the plan that was given."""
    engines = {name: partial(engine, settings=ours) for name, engine in ENGINES.items()}
    schedule = ours.pipeline.schedule
    stages = isinstance(model, deepspeed.PipelineModule) and not isinstance(model, DualPipeVModule)
    if (schedule != "1f1b" or plan is not None) and not stages:
        raise ConfigError(
            "wavemare.pipeline.schedule" if plan is None else "plan",
            schedule if plan is None else type(plan).__name__,
            f"{type(model).__name__} is no pipeline of one stage per rank",
            "Give a PipelineModule, or a transformers model and 2 or more stages",
        )
    given = config if is_policys(config) else None
    pipeline = partial(PipelineEngine, settings=ours, plan=plan, given=given)
    return {**engines, "PipelineEngine": pipeline}


def _with_sizes(
    config: dict[str, Any],
    ours: WavemareConfig,
    model: Any,
    mpu: Any,
    mesh_param: Any,
    plan: GivenPlan | None,
    optimizer: Any,
) -> tuple[dict[str, Any], WavemareConfig]:
    """Return the configuration with batch sizes, and with the optimizer of the policy."""
    world_size = dist.get_world_size()
    grid = model.mpu() if isinstance(model, deepspeed.PipelineModule) else mpu
    replicas = getattr(getattr(grid, "replicas", None), "size", 1)
    shares_samples = config.get("sequence_parallel_size", 1) > 1 or config.get("tensor_parallel")
    if mpu is not None:
        data_ranks = _data_ranks_of(mpu, world_size) * replicas
    elif mesh_param is None and not shares_samples:
        data_ranks = world_size * _jobs(ours) // _stages(model, ours)
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
    if stages:
        clips = clipping_limit(config) > 0
        run = agreed_plan(ours.pipeline, length, micro_batches, clips=clips, plan=plan)
        _check_homes(model, run)
        _check_tied(model)
        if SECTION in config:
            check_shared(model._layer_specs, model.stage_owner)
        if not run.is_asynchronous and run.whole.is_split:
            refuse_split(config, "plan" if plan is not None else "wavemare.pipeline.schedule")
    asynchronous = ours.pipeline.is_asynchronous
    if replicas > 1:  # of which DeepSpeed's grid knows one
        own = {BATCH_KEYS[0]: sizes[BATCH_KEYS[0]] // replicas}
        return {**config, **sizes, **own}, ours
    # DeepSpeed would complete them itself, with one micro-batch per step.
    config = config | {k: n for k, n in sizes.items() if asynchronous or config.get(k) == "auto"}
    if asynchronous:
        config, advice = advise(
            config, stages=length, micro_batches=micro_batches, optimizer=optimizer
        )
        advice.tell()
        return config, WavemareConfig.of(config)
    if length == 1 and mpu is None:
        _check_no_grid(model)
    return config, ours


def homes_of_stages(
    config: Mapping[str, Any], ours: WavemareConfig, plan: GivenPlan | None
) -> tuple[int, ...]:
    """Return for each stage of a model that is not cut yet its rank; all ranks fail alike.

    Raises:
        ConfigError: Batch sizes do not multiply, or there are two plans.
        PlanError: The plan is wrong.
    """
    data_ranks = max(dist.get_world_size() // ours.model_ranks, 1) * _jobs(ours)
    sizes = check_batch_sizes(config, data_world_size=data_ranks)
    micro_batches = sizes["gradient_accumulation_steps"]
    return agreed_plan(
        ours.pipeline, ours.pipeline.stages, micro_batches, clips=False, plan=plan
    ).homes


def _check_tied(model: Any) -> None:
    """Refuse a sparse embedding that stages share: they would add rows to a whole matrix."""
    shared = [
        key
        for key, comm in model.tied_comms.items()
        if len(comm["ranks"]) > 1 and getattr(comm["module"], "sparse", False)
    ]
    keys = sorted({key for keys in gather(shared) for key in keys})
    if keys:
        raise ModelError(
            "TiedLayerSpec",
            keys[0],
            "several stages share this Embedding(sparse=True), and another layer's gradient of its "
            "weight is dense",
            "Leave out sparse=True, or cut the model so that one stage has all layers of this key",
        )


def _check_homes(model: Any, run: RunPlan) -> None:
    """Refuse a model that is cut for another schedule."""
    homes = tuple(getattr(model, "homes", range(run.num_stages)))
    if homes != run.homes:
        name = run.schedule if run.plan is None else run.plan.schedule
        raise ConfigError(
            "wavemare.pipeline.schedule",
            name,
            f"its stages are on the ranks {run.homes}, and those of the model on {homes}",
            f"Build the model as a ChunkedPipelineModule with homes={run.homes}, or give a "
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


def _jobs(ours: WavemareConfig) -> int:
    """Return how many jobs train the model, each a replica that comes and goes."""
    return max(ours.local_steps.elastic.replicas, 1)


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
