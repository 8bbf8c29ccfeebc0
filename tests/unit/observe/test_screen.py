# SPDX-License-Identifier: Apache-2.0
"""What rank 0 draws, on a terminal and in a pipe."""

import io
import re

import pytest
from rich.console import Console

from wavemare.observe.screen import Progress, Screen, live_facts


class Clock:
    """Seconds that go by only when told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def draw(clock):
    """Run a function with a screen and return what was drawn."""

    def run(use, *, rank=0, terminal=False):
        file = io.StringIO()
        console = Console(file=file, force_terminal=terminal, width=80, highlight=False)
        use(Screen(rank=rank, console=console, clock=clock))
        return file.getvalue()

    return run


def train(clock, steps, *, seconds, logged=10):
    def use(screen):
        with screen.progress(steps) as progress:
            for step in range(1, steps + 1):
                clock.now += seconds
                progress.step(step, tokens=1000, learning_rate=1e-3)
                if step % logged == 0:
                    progress.show(10.0 / step, {"pipeline": f"idle {step}%"})

    return use


def test_pipe_gets_one_line_per_log_interval_and_the_last(clock, draw):
    lines = draw(train(clock, 45, seconds=0.5)).splitlines()
    shown = [int(line.split()[1].split("/")[0]) for line in lines]
    assert shown == [10, 20, 30, 40, 45]
    assert lines[0] == (
        "step 10/45  loss 1.0000  lr 1.00e-03  2,000 tokens/s  0:00:18 left  pipeline: idle 10%"
    )
    assert lines[-1].endswith("pipeline: idle 40%")
    assert all(character.isprintable() for line in lines for character in line)


def final_lines(text):
    """Return what a terminal shows in the end."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", text).splitlines()


METRICS = {"bubble": 0.41, "bubble_predicted": 0.32}
QUIET = {"memory_bytes": 3 * 2**20, "warnings": 0, "latest": ""}
METRICS |= {f"staleness_{stage}": (3 - stage) / 8 for stage in range(4)}


@pytest.mark.parametrize(
    ("facts", "shown"),
    [
        ({"collective": "word " * 40}, "  collective  " + ("word " * 13) + "…"),
        # What unevenness explains is named as in the report; all of it, in 80 columns.
        (
            {"pipeline": live_facts(METRICS, **QUIET)["pipeline"]},
            "  pipeline    idle 41% (32% by unevenness), staleness 0.375 0.25 0.125 0",
        ),
    ],
)
def test_terminal_is_readable_at_80_columns(draw, facts, shown):
    def use(screen):
        with screen.progress(10) as progress:
            progress.step(1, tokens=1)
            progress.show(1.0, facts)

    lines = final_lines(draw(use, terminal=True))
    assert max(map(len, lines)) <= 80
    assert lines[-1] == shown


def test_line_held_back_is_printed_when_the_run_breaks(clock, draw):
    def break_at_step_8(screen):
        with screen.progress(50) as progress:
            for step in range(1, 8):
                clock.now += 0.1
                progress.step(step, tokens=1)
            raise ZeroDivisionError

    def use(screen):
        with pytest.raises(ZeroDivisionError):
            break_at_step_8(screen)

    lines = draw(use).splitlines()
    assert [line.split()[1] for line in lines] == ["7/50"]


def test_a_resumed_run_shows_its_own_speed(clock, draw):
    def use(screen):
        with screen.progress(100, done=40) as progress:
            clock.now += 1.0
            progress.step(41, tokens=500)
            progress.show(2.0, {})
            assert progress.tokens_per_second == 500.0

    assert draw(use).startswith("step  41/100  loss 2.0000  500 tokens/s  0:00:59 left")


def everything(screen):
    screen.panel("title", {"model": {"layers": 4, "heads": "[2]"}, "batch": {"size": 32}})
    with screen.progress(1) as progress:
        progress.step(1, tokens=1)
        progress.show(1.0, {})
    screen.note("a [bold]note[/bold] of 100 % of the steps")
    screen.results({"loss": 1.25, "steps": 7, "memory": {"optimizer": 2.0, "correction": 0.5}})


@pytest.mark.parametrize("terminal", [False, True])
def test_other_ranks_draw_nothing(draw, terminal):
    assert draw(everything, rank=1, terminal=terminal) == ""


def test_rank_0_draws_all_and_takes_text_literally(draw):
    text = draw(everything)
    assert "a [bold]note[/bold] of 100 % of the steps" in text
    for part in "title model layers [2] batch 32 results 1.2500 steps 7 optimizer 2.0000,".split():
        assert part in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_speed_is_that_of_the_last_20_steps(clock):
    lines = []
    progress = Progress(30, 0, lambda line, *_: lines.append(line), clock)
    assert progress.tokens_per_second is None
    clock.now += 60  # a slow first step
    progress.step(1, tokens=100)
    for step in range(2, 22):
        clock.now += 0.25
        progress.step(step, tokens=100)
    assert progress.tokens_per_second == pytest.approx(400.0)
    assert lines[-1] == "step 21/30  loss -  400 tokens/s  0:00:02 left"


def test_subjects_that_a_run_does_not_have_are_left_out():
    assert live_facts({}, **QUIET) == {"memory": "3.1 MB on rank 0"}
    metrics = {
        "staleness_10": 0.0,
        "staleness_9": 0.75,
        "sparse_density": 0.042,
        "sparse_bytes_up": 2**20,
        "sparse_bytes_down": 2**21,
        "sparse_calls_pushpull": 3,
        "sparse_calls_dense": 1,
    }
    assert live_facts(metrics, memory_bytes=1, warnings=2, latest="x " * 99) == {
        "pipeline": "staleness 0.75 0",
        "collective": "density 4.20%, up 1.0 MB, down 2.1 MB, dense x1, pushpull x3",
        "memory": "1 byte on rank 0",
        "warnings": f"2, the latest: {'x ' * 37}[...]",
    }
