# SPDX-License-Identifier: Apache-2.0
"""``wavemare.initialize``: from a model and a JSON configuration to a training engine."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import deepspeed
from deepspeed import comm as dist
from deepspeed.moe.layer import MoE
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.utils import groups
from torch import Tensor, nn

from wavemare import engine
from wavemare.engine import build_engine
from wavemare.engine.config.refusals import check_sequence_parallel
from wavemare.engine.config.resolve import SECTION, WavemareConfig, check_config
from wavemare.engine.config.shape import check_complete
from wavemare.engine.experts import forget_expert_groups
from wavemare.engine.health.watchdog import acquire
from wavemare.engine.initialize import homes_of_stages, read_config
from wavemare.engine.launch.group import gather
from wavemare.engine.observe.progress import PROGRESS
from wavemare.engine.seams import destroy_groups, hold_grid, noting_groups
from wavemare.errors import ConfigError, ModelError, PlanError
from wavemare.extras import naming_compiler
from wavemare.failure import watch_failures
from wavemare.models.deferred import is_deferred, read_weights
from wavemare.parallel import ProcessGrid
from wavemare.parallel.layout.annotations import PLAN, is_annotated
from wavemare.parallel.layout.grid import (
    count_replicas,
    is_sequence_parallel,
    process_grid,
    replicas_axis,
    same_grid,
)
from wavemare.pipeline.plan.files import GivenPlan

if TYPE_CHECKING:
    from wavemare.engine import DualPipeVEngine, Engine, PipelineEngine
    from wavemare.engine.health.watchdog import Watchdog

logger = logging.getLogger("wavemare")


def init_distributed(distributed_port: int | None = None) -> None:
    """Join the other processes of the job, under any launcher; `initialize` does so by itself.

    Exceptions that nobody catches end the process from now on with one message for all ranks, as
    `wavemare.failure` tells.

    Args:
        distributed_port: TCP port of rank 0, used only where no launcher named one.

    Raises:
        LaunchError: No launcher started this process, or the processes cannot find each other, or
            DeepSpeed is to build a part without a compiler.
    """
    watch_failures()
    with naming_compiler():
        engine.init_distributed(distributed_port)


def initialize(
    args: Any = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = deepspeed.TORCH_DISTRIBUTED_DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
    plan: GivenPlan | None = None,
) -> tuple[Engine | PipelineEngine | DualPipeVEngine, Any, Any, Any]:
    """Build a training engine; parameters, their order and results are ``deepspeed.initialize``'s.

    With ``"wavemare": {"pipeline": {"stages": N}}`` and N > 1 a transformers model becomes a
    pipeline of N stages; optimizer and parameter groups made for the whole model are reduced to
    the parameters of this rank's stage. With ``"tensor_parallel": {"size": N}`` it, or each stage,
    is split over every N consecutive ranks, in place; with ``"expert_parallel": {"size": N}`` so
    many share the experts. A model with annotations (`wavemare.annotate`, `wavemare.stage`, ...) is
    laid out by these in their place. The engines of a process share the watchdog of the first one.

    Args:
        args: Namespace with ``deepspeed_config`` (and ``local_rank``), or None with ``config``.
        model: A ``torch.nn.Module`` or ``PipelineModule``.
        optimizer: A torch optimizer, or a callable from parameters to one; else from the JSON.
        model_parameters: Parameters or groups to optimize; all of the model's if omitted.
        training_data: A dataset, for which a loader is returned.
        lr_scheduler: A scheduler, or a callable from an optimizer to one; else from the JSON.
        distributed_port: TCP port of rank 0, used only where no launcher named one.
        mpu: Megatron's ``parallel_state``, DeepSpeed's grid or a `ProcessGrid`; a pipeline's own.
        dist_init_required: Whether to initialize ``torch.distributed``; None: if it is not.
        collate_fn: For ``training_data``.
        config: Path or mapping of the JSON configuration.
        mesh_param: Shape of the (data, sequence) mesh.
        config_params: Older name of ``config``.
        plan: Not of DeepSpeed: what a pipeline's ranks do in an optimizer step, in place of
            ``wavemare.pipeline.schedule``. A `Plan`, or a function from (ranks, micro-batches) to
            one; passes alone will do.

    Returns:
        Engine, optimizer, loader (or None) and scheduler (or None).

    Raises:
        ConfigError: A key or value that cannot work, before the model is touched.
        ModelError: The model is an engine already, or cannot be laid out so.
        PlanError: Annotations that do not go together, with the model or with the processes.
        LaunchError: No launcher started this process, or DeepSpeed finds no compiler for a part.
    """
    watch_failures()
    _refuse_engine(model)
    values = read_config(args, config, config_params)
    check_complete(values)
    ours = WavemareConfig.of(values)
    with _watched(ours, watches=SECTION in values) as (watchdog, made):
        if dist_init_required is not False:
            init_distributed(distributed_port)
        if watchdog is not None and dist.is_initialized():
            watchdog.meet()
        result = _build(
            values,
            ours,
            model=model,
            optimizer=optimizer,
            model_parameters=model_parameters,
            lr_scheduler=lr_scheduler,
            mpu=mpu,
            args=args,
            training_data=training_data,
            dist_init_required=dist_init_required,
            collate_fn=collate_fn,
            mesh_param=mesh_param,
            given=config if config is not None else config_params,
            plan=plan,
            made=made,
        )
    result[0].watchdog = watchdog
    return result


def _refuse_engine(model: Any) -> None:
    """Refuse a second engine around an engine, which would train by two optimizers.

    Raises:
        ModelError: The model is an engine.
    """
    if isinstance(model, deepspeed.DeepSpeedEngine):
        reason = "it is an engine already, which steps the optimizer that it was built with"
        remedy = "Go on with it; or give another model, as one that save_pretrained has written"
        raise ModelError("model", type(model).__name__, reason, remedy)


@contextmanager
def _watched(ours: WavemareConfig, *, watches: bool) -> Iterator[tuple[Watchdog | None, list[Any]]]:
    """Give the watchdog, if there is one, and a list for process groups; undo both on errors."""
    watchdog = acquire(ours.watchdog) if watches and ours.watchdog.enabled else None
    made: list[Any] = []
    try:
        with naming_compiler(), PROGRESS.doing("initialize"):
            yield watchdog, made
            if watchdog is not None:  # DeepSpeed has made groups
                watchdog.extend_deadline()
    except BaseException:
        if watchdog is not None:
            watchdog.release(notify=False)
        destroy_groups(made)
        raise


def _build(
    values: dict[str, Any],
    ours: WavemareConfig,
    *,
    model: Any,
    **arguments: Any,
) -> tuple[Any, Any, Any, Any]:
    """Build the engine of a model, which says from then on what it is; see `hand_over`."""
    if not isinstance(model, nn.Module) or "transformers" not in sys.modules:
        result = _laid_out(values, ours, model=model, check=lambda module: None, **arguments)
    else:
        from wavemare.models.adapters import make_ready
        from wavemare.models.whole import hand_over, handing_over

        make_ready(model)
        with handing_over(model) as check:
            result = _laid_out(values, ours, model=model, check=check, **arguments)
        hand_over(model, result[0])
    if isinstance(result[0].module, deepspeed.PipelineModule):
        result[0].gather_weights = _gather_weights
    return result


def _gather_weights(engine: Any, exclude_frozen: bool) -> dict[str, Tensor] | None:
    from wavemare.models.whole import for_a_file

    return for_a_file(engine, exclude_frozen)


def _laid_out(
    values: dict[str, Any],
    ours: WavemareConfig,
    *,
    model: Any,
    check: Callable[[Any], None],
    optimizer: Any,
    model_parameters: Any,
    lr_scheduler: Any,
    mpu: Any,
    given: Any,
    plan: GivenPlan | None,
    made: list[Any],
    **arguments: Any,
) -> tuple[Any, Any, Any, Any]:
    """Lay the model out as the configuration says, and build its engine.

    The list gets the process groups that only this engine knows of; it destroys them.
    """
    layout = None
    if isinstance(model, deepspeed.PipelineModule):
        _check_cut(ours)
    if ours.parallel.given or is_annotated(model) or hasattr(model, PLAN):
        layout, values = _by_layout(model, values)
        ours = WavemareConfig.of(values)
    if mpu is not None and is_sequence_parallel(mpu):
        check_sequence_parallel(values, ours, getattr(model, "num_stages", ours.pipeline.stages))
    replicas, local = 1, ours.local_steps
    if local.mode != "off":
        check_config(values, world_size=dist.get_world_size())
        replicas = _replicas(ours, model, mpu or arguments["mesh_param"])
    if max(ours.tensor_parallel.size, ours.expert_parallel.size) > 1:
        check_config(values, world_size=dist.get_world_size())
        model, mpu, optimizer, model_parameters = _shared(
            ours, model, mpu, optimizer, model_parameters, replicas, made
        )
    if ours.pipeline.stages > 1 and not isinstance(model, deepspeed.PipelineModule):
        check_config(values, world_size=dist.get_world_size())
        homes = homes_of_stages(values, ours, plan)
        with noting_groups(made):
            whole, model = model, _converted(model, ours, homes, replicas)
        # An untied head is trained wherever the embedding that it was tied to was meant to be.
        copies = {id(whole.get_parameter(n)): p for n, p in model.untied_parameters().items()}
        optimizer, model_parameters = _of_this_stage(
            model, optimizer, model_parameters, lr_scheduler, copies
        )
    check(model)
    if mpu is not None:
        with noting_groups(made):
            mpu = process_grid(mpu)
        if isinstance(model, deepspeed.PipelineModule):
            same_grid(mpu, model.mpu())
            mpu = None  # DeepSpeed takes the module's own
    if "megatron.core" in sys.modules:
        from wavemare.megatron.core import prepare_core

        prepare_core(model, mpu)
    if local.mode != "off":
        with noting_groups(made):
            staged = isinstance(model, deepspeed.PipelineModule)
            mpu = mpu if staged else mpu or ProcessGrid.of(replicas=replicas)
            (model.mpu() if staged else mpu).replicas = replicas_axis(local, replicas)
    _read_late(model)
    result = build_engine(
        values,
        plan=plan,
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        lr_scheduler=lr_scheduler,
        mpu=mpu,
        **arguments,
    )
    engine = result[0]
    hold_grid(engine.mpu, engine, made)
    engine.layout = layout
    if engine.config == given:
        engine.config = given  # as with DeepSpeed the caller's own, where nothing was filled in
    return result


def _read_late(model: Any) -> None:
    """Read the weights that a rank has not read yet; ranks must find equal ones in their files."""
    if not isinstance(model, nn.Module) or not is_deferred(model):
        return
    read_weights(model)
    from wavemare.parallel.tensor.partition import check_equal_weights, is_split, split_embedding

    if is_split(model):
        check_equal_weights(model, split_embedding(model).group)


def _by_layout(model: Any, values: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a model's `Layout`, and the configuration that runs it."""
    from wavemare.parallel.layout.execute import layout_for

    layout, values = layout_for(model, values)
    if layout.recompute and layout.stages == 1:
        if not hasattr(model, "gradient_checkpointing_enable"):
            reason = f"{type(model).__name__} has no gradient checkpointing to be turned on"
            raise PlanError(
                "recompute", True, reason, "Checkpoint in the model, and leave it out of the layout"
            )
        model.gradient_checkpointing_enable()
    if dist.get_rank() == 0:
        logger.info("%s", layout)
    return layout, values


def _converted(model: Any, ours: WavemareConfig, homes: Sequence[int], replicas: int) -> Any:
    from transformers import PreTrainedModel

    from wavemare.models import to_pipeline
    from wavemare.models.adapters import base_of

    if not isinstance(base_of(model), PreTrainedModel):
        raise ConfigError(
            "wavemare.pipeline.stages",
            ours.pipeline.stages,
            f"{type(model).__name__} is neither a transformers model nor a PipelineModule",
            "Cut its layers into a PipelineModule, as docs/own-model.md and "
            "recipes/examples/own_model.py do, or give 1 stage",
        )
    return to_pipeline(
        model,
        num_stages=ours.pipeline.stages,
        partition=ours.pipeline.partition,
        inputs=ours.pipeline.inputs,
        dynamic_shape=ours.pipeline.dynamic_shape,
        untie=ours.pipeline.unties,
        homes=homes,
        replicas=replicas,
    )


def _check_cut(ours: WavemareConfig) -> None:
    """Refuse what says how a model becomes a pipeline, of one that is a pipeline already."""
    for name in sorted(ours.pipeline.model_fields_set & {"partition", "inputs", "untie"}):
        raise ConfigError(
            f"wavemare.pipeline.{name}",
            getattr(ours.pipeline, name),
            "the model is a PipelineModule, which is cut into stages already",
            "Leave it out, or give the transformers model itself",
        )


def _replicas(ours: WavemareConfig, model: Any, mpu: Any) -> int:
    """Return how many replicas of local steps this job has; all ranks agree, or fail alike."""
    key, settings = "wavemare.local_steps", ours.local_steps
    if mpu is not None or any(isinstance(module, MoE) for module in model.modules()):
        reason = "the ranks of a replica are those that the configuration names"
        remedy = "Leave out mpu, mesh_param and DeepSpeed's layers of experts"
        raise ConfigError(f"{key}.mode", settings.mode, reason, remedy)
    if isinstance(model, DualPipeVModule):
        reason = "DeepSpeed's DualPipeV was not tried with replicas"
        raise ConfigError(f"{key}.mode", settings.mode, reason, "Use the schedule zbv")
    if isinstance(model, deepspeed.PipelineModule) and not settings.elastic.replicas:
        reason = "a PipelineModule is cut for all ranks before it is known which are a replica"
        remedy = f"Give a transformers model, or make each replica a job of its own ({key}.elastic)"
        raise ConfigError(f"{key}.mode", settings.mode, reason, remedy)
    found = gather((settings.model_dump_json(), socket.gethostname()))
    for rank, (other, _) in enumerate(found):
        if other != found[0][0]:
            reason = f"rank {rank} has {other} instead"
            raise ConfigError(key, found[0][0], reason, "Give all ranks the same configuration")
    return count_replicas(ours, [host for _, host in found])


def _shared(
    ours: WavemareConfig,
    model: Any,
    mpu: Any,
    optimizer: Any,
    parameters: Any,
    replicas: int,
    made: list[Any],
) -> tuple[Any, Any, Any, Any]:
    """Split the layers of a model over ranks, and divide its experts.

    Returns:
        Model, ``mpu``, optimizer and parameters; the latter three as given where no layers are
        split.
    """
    tensor, experts = ours.tensor_parallel.size, ours.expert_parallel.size
    stages, group = ours.pipeline.stages, None
    if tensor > 1:
        _check_alone("tensor_parallel", mpu)
    if experts > 1:
        from wavemare.parallel.experts import check_experts, split_experts

        _check_alone("expert_parallel", mpu, optimizer)
        check_experts(model, experts)  # before it changes
    if tensor > 1:
        from wavemare.parallel.tensor.split import split_model

        with noting_groups(made):
            mesh = ProcessGrid.of(tensor=tensor, replicas=replicas)
        group = mesh.get_model_parallel_group()
        wholes = dict(model.named_parameters(remove_duplicate=False))
        model = split_model(model, group, experts=experts == 1)
        parts = {id(p): model.get_parameter(name) for name, p in wholes.items()}
        optimizer, parameters = _of_parts(parts, optimizer, parameters)
        mpu = mesh if stages == 1 else None  # a pipeline's is its grid
    if experts > 1:
        forget_expert_groups(experts, replicas * stages)
        # DeepSpeed's engine looks for them there. Each stage of each replica has its own.
        groups._create_expert_and_data_parallel(experts, pp_size=replicas * stages)
        sharing = groups._get_expert_parallel_group(f"ep_size_{experts}")
        model = split_experts(model, sharing, group)
    return model, mpu, optimizer, parameters


def _check_alone(section: str, mpu: Any, optimizer: Any = None) -> None:
    """Check that nobody else has the weights, or the groups, of a model that is to be split."""
    if hasattr(optimizer, "param_groups"):
        reason = "it was made for all experts, of which each rank gets some"
        remedy = "Name the optimizer in the JSON, or give a function"
        raise ConfigError("optimizer", type(optimizer).__name__, reason, remedy)
    if mpu is not None:
        key = f"wavemare.{section}.size"
        reason = "the ranks that share a model are given twice"
        raise ConfigError(key, type(mpu).__name__, reason, f"Leave out mpu, or {key}")


def _of_parts(parts: Mapping[int, Any], optimizer: Any, parameters: Any) -> tuple[Any, Any]:
    """Let what was made for whole weights hold this rank's parts in their places.

    Args:
        parts: The rank's part by the identity of the whole weight.
        optimizer: As given to `initialize`; changed in place.
        parameters: As given to `initialize`.
    """

    def of_group(group: Any) -> Any:
        if not isinstance(group, Mapping):
            return parts.get(id(group), group)
        chosen = group["params"]
        chosen = [chosen] if isinstance(chosen, Tensor) else chosen
        return {**group, "params": [parts.get(id(p), p) for p in chosen]}

    if hasattr(optimizer, "param_groups"):
        _regroup(optimizer, [of_group(group) for group in optimizer.param_groups])
    if parameters is not None:
        parameters = [of_group(one) for one in parameters]
    return optimizer, parameters


def _regroup(optimizer: Any, groups: list[Any]) -> None:
    """Give an optimizer other groups, with weights that are parts or copies of its own.

    Some optimizers make states for the weights that they are given (Adagrad), others in a step.

    Args:
        optimizer: Changed in place.
        groups: With the weights of this rank, perhaps none.

    Raises:
        ConfigError: It has states that parts or copies cannot have.
    """
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    held = {id(p): p for group in groups for p in group["params"]}
    new = [p for p in held.values() if id(p) not in given]
    fresh: Mapping[Any, Any] = {}
    if optimizer.state and new:
        states = optimizer.state.values()
        steps = [state.get("step") if isinstance(state, Mapping) else None for state in states]
        try:
            if any(step is None or float(step) for step in steps):
                raise TypeError("it has stepped")
            made = type(optimizer)([{**g} for g in groups if g["params"]], **optimizer.defaults)
        except (TypeError, ValueError) as error:
            reason = f"its state is that of whole weights, of which ranks get parts ({error})"
            remedy = "Give a function from parameters to an optimizer, or name one in the JSON"
            raise ConfigError("optimizer", type(optimizer).__name__, reason, remedy) from None
        fresh = made.state
    optimizer.param_groups[:] = groups
    for left in [p for p in optimizer.state if isinstance(p, Tensor) and id(p) not in held]:
        del optimizer.state[left]
    optimizer.state.update({p: fresh[p] for p in new if p in fresh})


def _of_this_stage(
    module: Any, optimizer: Any, parameters: Any, lr_scheduler: Any, copies: Mapping[int, Any]
) -> tuple[Any, Any]:
    """Reduce what was made for the whole model to this stage's parameters, which are the same.

    Args:
        module: The stage.
        optimizer: As given to `initialize`.
        parameters: As given to `initialize`.
        lr_scheduler: As given to `initialize`.
        copies: By the identity of a parameter a copy of it that the stage trains as well.
    """
    local = {id(parameter) for parameter in module.parameters()}

    def keep(chosen: Iterable[Any]) -> list[Any]:
        chosen = [chosen] if isinstance(chosen, Tensor) else list(chosen)
        kept = [parameter for parameter in chosen if id(parameter) in local]
        return kept + [copies[id(p)] for p in chosen if id(p) in copies]

    if hasattr(optimizer, "param_groups"):
        groups = [{**group, "params": keep(group["params"])} for group in optimizer.param_groups]
        if len(groups) > 1 and lr_scheduler is not None and not callable(lr_scheduler):
            raise ConfigError(
                "lr_scheduler",
                type(lr_scheduler).__name__,
                "it was made for all parameter groups, of which a stage may have but some",
                "Give a function from an optimizer to a scheduler, or name one in the JSON",
            )
        _regroup(optimizer, groups)  # also those without weights here: ranks count alike
    if parameters is not None:
        parameters = list(parameters)
        if parameters and isinstance(parameters[0], dict):
            parameters = [{**group, "params": keep(group["params"])} for group in parameters]
        else:
            parameters = keep(parameters)
    return optimizer, parameters
