# SPDX-License-Identifier: Apache-2.0
"""Plans in files: our own text form, and the CSV of ``torch.distributed.pipelining``.

Either may hold passes alone. torch's form (``_dump_csv`` with ``compute_only``) has a line for each
rank with a cell for each pass, ``0F0,0I0,0W0``; a cell may be empty.
"""

from __future__ import annotations

from pathlib import Path

from wavemare.errors import ConfigError, PlanError
from wavemare.pipeline.plan.lowering import lower
from wavemare.pipeline.plan.plan import COMPUTE, Action, Plan


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
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(key, str(file), error.strerror or type(error).__name__, remedy) from None
    except UnicodeDecodeError:
        raise ConfigError(key, str(file), "this is not text", remedy) from None
    if not text.strip():
        raise ConfigError(key, str(file), "it is empty", remedy)
    # White space would end the name in the plan's text.
    name = "_".join(file.stem.split())
    plan = parse_csv(text, name) if file.suffix.lower() == ".csv" else Plan.parse(text)
    passes_alone = all(action.kind in COMPUTE for actions in plan.ranks for action in actions)
    return lower(plan) if passes_alone else plan


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
        PlanError: It has another number of optimizer steps than one, or a second wave.
    """
    waved = any(action.wave for actions in plan.ranks for action in actions)
    if plan.num_steps != 1 or waved:
        reason = "a file of torch holds one optimizer step, and no second wave"
        remedy = "Give 1, and a schedule that trains without waves"
        raise PlanError("steps", plan.num_steps, reason, remedy)
    lines = [
        ",".join(str(a._replace(version=-1)) for a in actions if a.kind in COMPUTE)
        for actions in plan.ranks
    ]
    return "\n".join(lines) + "\n"
