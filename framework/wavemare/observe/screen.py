# SPDX-License-Identifier: Apache-2.0
"""What a run shows: a panel at the start, one progress line, a table at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from wavemare.observe.formats import format_progress
from wavemare.observe.speed import Speed

__all__ = ["Progress", "Screen"]

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
        """Draw the start-up panel.

        Args:
            title: Its heading.
            groups: Rows (name and value) by group, for example ``{"model": {"layers": 4}}``.
        """
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
        """Show a progress line while the block runs; on leaving it, the last state stays.

        Args:
            total: Optimizer steps in all.
            done: Steps done before, by the run that is resumed.

        Yields:
            The line; call its `Progress.step` after each step.
        """
        if not self._draws:
            yield Progress(total, done, _draw_nothing, self._clock)
        elif self._console.is_terminal:
            with Live(console=self._console, refresh_per_second=4) as live:
                yield Progress(
                    total,
                    done,
                    lambda line, facts, _: live.update(_drawn(line, facts)),
                    self._clock,
                )
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
        """Draw the table at the end.

        Args:
            figures: By name; floating-point numbers get four digits.
        """
        if not self._draws:
            return
        table = Table(title="results", title_justify="left", title_style="bold", show_header=False)
        for _ in range(2):
            table.add_column(overflow="fold")
        for name, value in figures.items():
            shown = f"{value:.4f}" if isinstance(value, float) else str(value)
            table.add_row(Text(name), Text(shown))
        self._console.print(table)


class Progress:
    """One line on a running training.

    Args:
        total: Optimizer steps in all.
        done: Steps done before.
        draw: Called with the line, the newest figures, and whether it must not be left out.
        clock: Seconds from any origin, never going back.
    """

    def __init__(
        self,
        total: int,
        done: int,
        draw: _Draw,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._draw = draw
        self._step = done
        self._loss: float | None = None
        self._rate: float | None = None
        self._facts: Mapping[str, str] = {}
        self._speed = Speed(clock=clock)
        self._speed.start(done)

    @property
    def tokens_per_second(self) -> float | None:
        """Over the last steps and all ranks; None before the first step has ended."""
        return self._speed.tokens_per_second

    def step(self, step: int, *, tokens: int, learning_rate: float | None = None) -> None:
        """Show that a step has ended.

        Args:
            step: Steps done.
            tokens: Tokens of this step, over all ranks.
            learning_rate: The rate that it used.
        """
        self._step, self._rate = step, learning_rate
        self._speed.advance(step, tokens)
        self._redraw(important=False)

    def show(self, loss: float | None, facts: Mapping[str, str]) -> None:
        """Show the mean loss and the newest figures of a logged step; they stay until the next.

        Args:
            loss: Of the last steps.
            facts: Figures in words by subject.
        """
        self._loss = self._loss if loss is None else loss
        self._facts = facts
        self._redraw(important=True)

    def _redraw(self, *, important: bool) -> None:
        line = format_progress(
            self._step,
            self._total,
            loss=self._loss,
            learning_rate=self._rate,
            tokens_per_second=self._speed.tokens_per_second,
            seconds_left=self._speed.seconds_left(self._total),
        )
        self._draw(line, self._facts, important)


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
    lines = [Text(line)]
    for name, text in facts.items():
        lines.append(Text.assemble((f"  {name:<12}", "dim"), text))
    for each in lines:
        each.no_wrap, each.overflow = True, "ellipsis"
    return Group(*lines)


def _draw_nothing(line: str, facts: Mapping[str, str], important: bool) -> None:
    """Stand in for drawing on the ranks that do not draw."""
