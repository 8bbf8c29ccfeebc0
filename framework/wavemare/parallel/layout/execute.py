# SPDX-License-Identifier: Apache-2.0
"""Plans on their way to an engine: found, agreed on by all ranks, made a configuration."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed import PipelineModule
from deepspeed import comm as dist

from wavemare.engine.config.resolve import SECTION, WavemareConfig
from wavemare.engine.config.sections import ParallelConfig
from wavemare.errors import PlanError
from wavemare.parallel.layout.annotations import PLAN, is_annotated
from wavemare.parallel.layout.compile import compile_layout
from wavemare.parallel.layout.layout import Layout
from wavemare.parallel.layout.names import annotate, named_chain

__all__ = ["agree", "layout_for"]

logger = logging.getLogger("wavemare")

_KEY = f"{SECTION}.parallel"


def layout_for(model: Any, values: dict[str, Any]) -> tuple[Layout, dict[str, Any]]:
    """Return the plan that a model is to be run by, equal on all ranks, and its configuration.

    The plan comes from the planner, from `annotate`, or is compiled from the model's annotations
    and those of ``wavemare.parallel``. ``torch.distributed`` must be initialized.

    Args:
        model: The model, whole, as given to ``wavemare.initialize``.
        values: The configuration.

    Raises:
        PlanError: There is no legal plan, there are two, or the ranks do not agree.
    """
    names = WavemareConfig.of(values).parallel
    given, annotated = getattr(model, PLAN, None), is_annotated(model)
    values = _without_section(values)
    _check_one(names, annotated, given)
    _check_model(model)
    if names.plan is not None or given is not None:
        plan = given if given is not None else _read(names.plan)
        plan = agree(plan)
        _check_fits(plan, model)
        _tell_order(plan)
        return plan, plan.configure(values)
    if names.annotates:
        mapping = names.model_dump(exclude_unset=True, exclude={"plan"})
        annotate(model, mapping, key=_KEY)
    plan = agree(compile_layout(model, values, world_size=dist.get_world_size()))
    return plan, plan.configure(values)


def agree(plan: Layout) -> Layout:
    """Return rank 0's plan, after comparing all ranks' digests; every rank calls this.

    Raises:
        PlanError: The ranks hold different plans.
    """
    text: list[Any] = [plan.to_json()]
    dist.broadcast_object_list(text, src=0)
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, plan.digest)
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            reason = f"rank 0 has {digests[0][:12]}, rank {rank} has {digest[:12]}"
            remedy = "Annotate and configure the model alike on all ranks"
            raise PlanError("plan", plan.digest[:12], f"the ranks' plans differ: {reason}", remedy)
    return Layout.from_json(text[0])


def _read(plan: str | dict[str, Any] | None) -> Layout:
    """Return a plan that was given as a file, which rank 0 reads, or as parsed JSON."""
    if isinstance(plan, dict):
        return Layout.from_json(json.dumps(plan))
    path = Path(str(plan))
    message: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            message = [path.read_text(encoding="utf-8"), None]
        except (OSError, UnicodeDecodeError) as error:
            message = [None, getattr(error, "strerror", None) or "it is not text"]
    dist.broadcast_object_list(message, src=0)
    if message[1] is not None:
        reason = f"the file cannot be read ({message[1]})"
        raise PlanError(f"{_KEY}.plan", str(path), reason, "Name a file of 'wavemare plan search'")
    return Layout.from_json(message[0])


def _tell_order(plan: Layout) -> None:
    """Remind of what only the launcher can do: start the ranks on the devices of the plan."""
    if plan.order is None or plan.order == tuple(range(plan.world_size)) or dist.get_rank():
        return
    logger.warning(
        "the plan is for ranks on the cluster's devices %s, in this order: list hosts and devices "
        "so in the hostfile and CUDA_VISIBLE_DEVICES",
        ", ".join(map(str, plan.order)),
    )


def _without_section(values: dict[str, Any]) -> dict[str, Any]:
    section = values.get(SECTION)
    if not isinstance(section, Mapping) or "parallel" not in section:
        return values
    return {**values, SECTION: {k: v for k, v in section.items() if k != "parallel"}}


def _check_one(names: ParallelConfig, annotated: bool, given: Any) -> None:
    sources = {
        f"{_KEY}.plan": names.plan is not None,
        f"{_KEY} with names": names.annotates,
        "wavemare.annotate with a plan": given is not None,
        "annotations in the program": annotated,
    }
    found = [name for name, there in sources.items() if there]
    if len(found) > 1:
        reason = f"the layout is given by {' and by '.join(found)}"
        raise PlanError(_KEY, found[1], reason, "Use one of them")


def _check_model(model: Any) -> None:
    if isinstance(model, PipelineModule):
        reason = "a PipelineModule has its stages and cuts already"
        raise PlanError("model", type(model).__name__, reason, "Give the model that it is made of")


def _check_fits(plan: Layout, model: Any) -> None:
    """Check that a plan that was made elsewhere is for this model and these processes."""
    processes = dist.get_world_size()
    if plan.world_size != processes:
        reason = f"the plan is for {plan.world_size} processes"
        raise PlanError("world_size", processes, reason, f"Start {plan.world_size}, or plan again")
    if plan.stages > 1:
        layers = len(named_chain(model).layers)
        if plan.num_layers != layers:
            reason = f"the model has {layers} layers"
            raise PlanError("num_layers", plan.num_layers, reason, "Plan again for this model")
