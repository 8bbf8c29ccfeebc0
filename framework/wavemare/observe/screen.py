# SPDX-License-Identifier: Apache-2.0
"""What a run shows: a panel at the start, a progress line with figures, a table at the end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from textwrap import shorten

from rich.console import Console, Group
from rich.filesize import decimal
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from wavemare.engine.launch.group import environment_rank
from wavemare.observe.lines import numbered

_CALLS = "sparse_calls_"
_WINDOW = 20  # steps to measure the speed over, so that a slow start or an evaluation fades away

_Draw = Callable[[str, Mapping[str, str], bool], None]


class Screen:
    """Drawing by global rank 0; on other ranks every method does nothing.

    On a terminal the progress line, and below it the newest figures, are redrawn in place. In a
    pipe or a file they become one plain line per log interval.

    Args:
        rank: Global rank of this process.
        console: Where to draw; by default standard output.
        clock: Seconds from any origin, never going back.
    """

    def __init__(
        self,
        *,
        rank: int,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console(highlight=False, soft_wrap=False)
        self._draws = rank == 0
        self._clock = clock

    def panel(self, title: str, groups: Mapping[str, Mapping[str, object]]) -> None:
        """Draw rows (name and value) by group, for example ``{"model": {"layers": 4}}``."""
        if not self._draws:
            return
        grid = Table.grid(padding=(0, 2))
        for _ in range(3):
            grid.add_column()
        for group, rows in groups.items():
            for index, (name, value) in enumerate(rows.items()):
                heading = Text(group if index == 0 else "", style="bold cyan")
                grid.add_row(heading, Text(name, style="dim"), Text(str(value)))
        self._console.print(Panel(grid, title=Text(title, style="bold"), expand=False))

    @contextmanager
    def progress(self, total: int, *, done: int = 0) -> Iterator[Progress]:
        """Show a progress line while the block runs; on leaving it, the last state stays."""
        if not self._draws:
            yield Progress(total, done, lambda *_: None, self._clock)
        elif self._console.is_terminal:
            with Live(console=self._console, refresh_per_second=4) as live:

                def redraw(line: str, facts: Mapping[str, str], _: bool) -> None:
                    live.update(_drawn(line, facts))

                yield Progress(total, done, redraw, self._clock)
        else:
            lines = _PlainLines(self._console)
            try:
                yield Progress(total, done, lines.draw, self._clock)
            finally:
                lines.finish()

    def note(self, text: object) -> None:
        """Print a line, above the progress line if there is one; None prints nothing."""
        if self._draws and text is not None:
            self._console.print(Text(str(text)), soft_wrap=True)

    def results(self, figures: Mapping[str, object]) -> None:
        """Draw the table at the end: figures by name, floating-point numbers with four digits."""
        if not self._draws:
            return
        table = Table(title="results", title_justify="left", title_style="bold", show_header=False)
        for _ in range(2):
            table.add_column(overflow="fold")
        for name, value in figures.items():
            parts = value.items() if isinstance(value, Mapping) else [("", value)]
            shown = [f"{k} {v:.4f}" if isinstance(v, float) else str(v) for k, v in parts]
            table.add_row(Text(name), Text(", ".join(shown).strip()))
        self._console.print(table)


def print_rank_0(text: object) -> None:
    """Print a line on global rank 0 alone; None prints nothing."""
    Screen(rank=environment_rank()).note(text)


class Progress:
    """One line on a running training, and its speed.

    Args:
        total: Optimizer steps in all.
        done: Steps done before.
        draw: Called with the line, the newest figures, and whether it must not be left out.
        clock: Seconds from any origin, never going back.
    """

    def __init__(self, total: int, done: int, draw: _Draw, clock: Callable[[], float]) -> None:
        self._total = total
        self._draw = draw
        self._clock = clock
        self._loss: float | None = None
        self._rate: float | None = None
        self._facts: Mapping[str, str] = {}
        # Seconds, steps and tokens after each of the latest steps.
        self._marks = deque([(clock(), done, 0)], maxlen=_WINDOW + 1)

    @property
    def tokens_per_second(self) -> float | None:
        """Over the last steps and all ranks; None before the first step has ended."""
        (start, _, before), (end, _, tokens) = self._marks[0], self._marks[-1]
        return (tokens - before) / (end - start) if end > start else None

    def step(self, step: int, *, tokens: int, learning_rate: float | None = None) -> None:
        """Show that a step of so many tokens, over all ranks, has ended."""
        self._rate = learning_rate
        self._marks.append((self._clock(), step, self._marks[-1][2] + tokens))
        self._draw(self._line(), self._facts, False)

    def show(self, loss: float | None, facts: Mapping[str, str]) -> None:
        """Show the mean loss and the newest figures in words; they stay until the next ones."""
        self._loss = self._loss if loss is None else loss
        self._facts = facts
        self._draw(self._line(), self._facts, True)

    def _line(self) -> str:
        (start, first, _), (end, step, _) = self._marks[0], self._marks[-1]
        parts = [f"step {step:{len(str(self._total))}d}/{self._total}"]
        parts.append("loss -" if self._loss is None else f"loss {self._loss:.4f}")
        if self._rate is not None:
            parts.append(f"lr {self._rate:.2e}")
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        if first < step < self._total:
            seconds = (self._total - step) * (end - start) / (step - first)
            parts.append(f"{timedelta(seconds=round(seconds))} left")
        return "  ".join(parts)


def live_facts(
    metrics: Mapping[str, float], *, memory_bytes: int, warnings: int, latest: str
) -> dict[str, str]:
    """Return the newest figures by subject; subjects that a run does not have are left out."""
    facts = {
        "pipeline": _pipeline(metrics),
        "collective": _collective(metrics),
        "memory": f"{decimal(memory_bytes)} on rank 0",
        "warnings": f"{warnings}, the latest: {shorten(latest, 80)}" if warnings else "",
    }
    return {subject: text for subject, text in facts.items() if text}


def _pipeline(metrics: Mapping[str, float]) -> str:
    parts = []
    if "bubble" in metrics:
        explained = metrics.get("bubble_predicted")
        share = "" if explained is None else f" ({explained:.0%} by unevenness)"
        parts.append(f"idle {metrics['bubble']:.0%}{share}")
    stale = numbered(metrics, "staleness")
    if stale:
        parts.append(f"staleness {' '.join(f'{value:.3g}' for value in stale.values())}")
    return ", ".join(parts)


def _collective(metrics: Mapping[str, float]) -> str:
    parts = []
    if "sparse_density" in metrics:
        parts.append(f"density {metrics['sparse_density']:.2%}")
    for way in ("up", "down"):
        if f"sparse_bytes_{way}" in metrics:
            parts.append(f"{way} {decimal(int(metrics[f'sparse_bytes_{way}']))}")
    parts += [
        f"{key.removeprefix(_CALLS)} x{count:.0f}"
        for key, count in sorted(metrics.items())
        if key.startswith(_CALLS)
    ]
    return ", ".join(parts)


class _PlainLines:
    """Lines for a file: important lines, and the last line however the run ends."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._held: str | None = None

    def draw(self, line: str, facts: Mapping[str, str], important: bool) -> None:
        self._held = "  ".join([line, *(f"{name}: {text}" for name, text in facts.items())])
        if important:
            self.finish()

    def finish(self) -> None:
        """Print the latest line if it has been held back."""
        if self._held is not None:
            # A line for a file or a log is never wrapped, whatever width rich assumes for it.
            self._console.print(Text(self._held), soft_wrap=True)
            self._held = None


def _drawn(line: str, facts: Mapping[str, str]) -> Group:
    """Return the progress line and below it a line for each subject."""
    subjects = (Text.assemble((f"  {name:<12}", "dim"), text) for name, text in facts.items())
    lines = [Text(line), *subjects]
    for each in lines:
        each.no_wrap, each.overflow = True, "ellipsis"
    return Group(*lines)
