# SPDX-License-Identifier: Apache-2.0
"""Plans from outside: files, and what the caller of an engine gives.

A file has our own text form, or the CSV of ``torch.distributed.pipelining``. Either may hold passes
alone. torch's form (``_dump_csv`` with ``compute_only``) has a line for each rank with a cell for
each pass, ``0F0,0I0,0W0``; a cell may be empty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from wavemare.errors import ConfigError, PlanError
from wavemare.pipeline.plan.check import check
from wavemare.pipeline.plan.lowering import lower
from wavemare.pipeline.plan.plan import COMPUTE, Action, Kind, Plan

GivenPlan = Plan | Callable[[int, int], Plan]
"""A plan, or a function of (length of the pipeline in ranks, micro-batches per step)."""


def plan_of(given: GivenPlan, num_ranks: int, micro_batches: int, key: str = "plan") -> Plan:
    """Return the plan that a caller gives, whole and proved.

    A plan of passes alone is completed by `lower`. Where no rank has the action `NORM`, each gets
    it between `REDUCE` and `STEP`.

    Args:
        given: A plan of one optimizer step, or a function that makes one.
        num_ranks: Length of the pipeline.
        micro_batches: Per optimizer step.
        key: What names the plan, for errors.

    Raises:
        PlanError: It is no plan, is wrong (see `check`), or is made for other numbers.
    """
    plan = given if isinstance(given, Plan) else _called(given, num_ranks, micro_batches, key)
    found = len(plan.ranks), plan.micro_batches, plan.num_steps
    if found != (needed := (num_ranks, micro_batches, 1)):
        raise PlanError(
            key,
            plan.schedule,
            f"its ranks, micro-batches and steps are {found}, and the pipeline has {needed}",
            "Make the plan for these numbers",
        )
    plan = _lowered_if_passes_alone(plan)
    if not plan.has_norms:
        plan = replace(plan, ranks=tuple(map(_with_norm, plan.ranks)))
    check(plan)
    return plan


def _called(given: object, num_ranks: int, micro_batches: int, key: str) -> Plan:
    """Return what a function makes."""
    remedy = "Give a Plan, or a function (ranks, micro_batches) -> Plan"
    if not callable(given):
        raise PlanError(key, given, "this is neither a plan nor a function", remedy)
    name = getattr(given, "__qualname__", repr(given))
    try:
        plan = given(num_ranks, micro_batches)
    except PlanError:
        raise
    except Exception as error:
        reason = f"{name}({num_ranks}, {micro_batches}) raised {type(error).__name__}: {error}"
        raise PlanError(key, name, reason, remedy) from error
    if not isinstance(plan, Plan):
        reason = f"{name}({num_ranks}, {micro_batches}) returned {type(plan).__name__}"
        raise PlanError(key, name, reason, remedy)
    return plan


def _with_norm(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    found: list[Action] = []
    for action in actions:
        found.append(action)
        if action.kind is Kind.REDUCE:
            found.append(action._replace(kind=Kind.NORM))
    return tuple(found)


def _lowered_if_passes_alone(plan: Plan) -> Plan:
    """Return a plan with everything beside its passes, if it holds passes alone.

    Plans with ``send_slots=0`` are old ones with sends that block. Their passes are kept, and the
    rest is made anew.

    Raises:
        PlanError: See `lower`.
    """
    if plan.send_slots and any(a.kind not in COMPUTE for actions in plan.ranks for a in actions):
        return plan
    passes = tuple(tuple(a for a in actions if a.kind in COMPUTE) for actions in plan.ranks)
    return lower(replace(plan, ranks=passes))


def read_plan(file: Path, key: str) -> Plan:
    """Read a plan, and complete it if it holds passes alone.

    Args:
        file: Its name ends in ``.csv`` if it is torch's form.
        key: What names the file, for errors.

    Raises:
        ConfigError: The file cannot be read.
        PlanError: It holds no plan.
    """
    remedy = "Name a file with the text that 'wavemare plan show --text' prints, or torch's .csv"
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(key, str(file), error.strerror or type(error).__name__, remedy) from None
    except UnicodeDecodeError:
        raise ConfigError(key, str(file), "this is not text", remedy) from None
    if not text.strip():
        raise ConfigError(key, str(file), "it is empty", remedy)
    if text.lstrip().startswith("{"):
        reason = "it is JSON, such as a layout of 'wavemare layout search', and no order of passes"
        raise PlanError(
            key, str(file), reason, f"{remedy}; recipes take a layout as --balance FILE"
        )
    plan = parse_csv(text, file.stem) if file.suffix.lower() == ".csv" else Plan.parse(text)
    return _lowered_if_passes_alone(plan)


def parse_csv(text: str, schedule: str) -> Plan:
    """Return the passes of torch's form, as one optimizer step.

    Args:
        text: The file.
        schedule: Name of the plan.

    Raises:
        PlanError: A cell is no action.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    cells = [[cell.strip() for cell in line.split(",")] for line in lines]
    ranks = tuple(tuple(Action.parse(cell) for cell in row if cell) for row in cells)
    homes = {action.stage: rank for rank, actions in enumerate(ranks) for action in actions}
    # Of a stage that does nothing the plan's check says so.
    placed = tuple(homes.get(stage, 0) for stage in range(len(homes)))
    numbers = [action.micro_batch for rank in ranks for action in rank]
    return Plan(schedule, len(homes), 1 + max(numbers, default=0), 1, ranks, homes=placed)


def to_csv(plan: Plan) -> str:
    """Return a plan's passes in torch's form.

    Raises:
        PlanError: It has another number of optimizer steps than one.
    """
    if plan.num_steps != 1:
        reason = "a file of torch holds one optimizer step"
        raise PlanError("steps", plan.num_steps, reason, "Give 1, and a schedule that trains")
    lines = [
        ",".join(str(a._replace(version=-1)) for a in actions if a.kind in COMPUTE)
        for actions in plan.ranks
    ]
    return "\n".join(lines) + "\n"
