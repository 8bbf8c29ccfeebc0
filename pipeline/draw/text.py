# SPDX-License-Identifier: Apache-2.0
"""Plans as a grid of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from wavemare.pipeline.clock.clock import execute
from wavemare.pipeline.plan.plan import COMPUTE, Kind, Plan

_IDLE = ".."
_STEP_MARK = "*"
_GAP = " "


def grid(plan: Plan, *, width: int = 80) -> str:
    """Draw a plan with one tick for each pass, whatever its duration.

    ``F3`` is the forward pass of micro-batch 3, ``B3`` its backward pass, ``B3*`` a pass before an
    optimizer step, ``..`` an idle tick; ``2F3`` names the stage where ranks have several.

    Args:
        plan: With its messages.
        width: Characters in a line; a wider grid is folded into blocks.

    Returns:
        Lines without trailing spaces, the last one without a line feed.

    Raises:
        PlanError: The plan never ends.
    """
    several = any(len({action.stage for action in actions}) > 1 for actions in plan.ranks)
    rows: list[dict[int, str]] = []
    times = execute(plan, lambda kind, _: int(kind in COMPUTE), lambda _: 0)
    for actions, ends in zip(plan.ranks, times, strict=True):
        row: dict[int, str] = {}
        for (kind, stage, micro_batch, _), end in zip(actions, ends, strict=True):
            if kind in COMPUTE:
                row[int(end) - 1] = f"{stage if several else ''}{kind.value}{micro_batch}"
            elif kind is Kind.STEP and row:
                # Stages on one rank step together.
                row[max(row)] = row[max(row)].removesuffix(_STEP_MARK) + _STEP_MARK
        rows.append(row)
    ticks = range(max((tick + 1 for row in rows for tick in row), default=0))
    labels = ["tick", *(f"rank {rank}" for rank in range(len(rows)))]
    texts = [[row.get(tick, _IDLE) for tick in ticks] for row in rows]
    return "\n".join(_fold(labels, [list(map(str, ticks)), *texts], width))


def _fold(labels: Sequence[str], columns: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    label_size = max(map(len, labels)) + len(_GAP)
    size = max((len(text) for column in columns for text in column), default=0)
    num_ticks = len(columns[0])
    per_block = max(1, (width - label_size) // (size + len(_GAP)))
    for first in range(0, max(num_ticks, 1), per_block):
        if first:
            yield ""
        for label, texts in zip(labels, columns, strict=True):
            cells = (f"{_GAP}{text:<{size}}" for text in texts[first : first + per_block])
            yield f"{label:<{label_size - len(_GAP)}}{''.join(cells)}".rstrip()
