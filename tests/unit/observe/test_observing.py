# SPDX-License-Identifier: Apache-2.0
"""Noting steps is no reason for a training to end, and ends with the step that fails."""

from types import SimpleNamespace

import pytest

from wavemare.engine.observe.progress import PROGRESS
from wavemare.observe.events import Events, read_events
from wavemare.observe.observing import Observing
from wavemare.report.traces import read_traces

STEPS = {"first_step": 1, "last_step": 3, "settled": 0}


def test_a_step_that_raises_is_followed_no_longer(tmp_path):
    observing = Observing(Events(tmp_path, rank=0), tmp_path, 0, trace_steps=3, **STEPS)
    with observing.step(1, None):
        assert PROGRESS.follower is not None
    with pytest.raises(ValueError, match="bad batch"), observing.step(2, None):
        raise ValueError("bad batch")
    assert PROGRESS.follower is None
    with observing.step(3, None):
        pass
    observing.events.close()
    assert not (tmp_path / "timeline").exists()


def test_a_trace_that_cannot_be_written_is_left_out(tmp_path, caplog):
    (tmp_path / "timeline").write_text("somebody's own")
    train(tmp_path, first=1, last=3, trace_steps=3)
    assert PROGRESS.follower is None
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "wavemare"]
    assert f"{tmp_path / 'timeline'} cannot be written (File exists)" in warning


def train(folder, *, first, last, trace_steps, settled=0):
    events = Events(folder, rank=0)
    numbers = {"first_step": first, "last_step": last, "settled": settled}
    observing = Observing(events, folder, 0, trace_steps=trace_steps, **numbers)
    for step in range(first, last + 1):
        with observing.step(step, SimpleNamespace(stage_id=1)), PROGRESS.doing("train_batch"):
            pass
    events.close()


@pytest.mark.parametrize(
    ("first", "last", "trace_steps", "settled", "noted"),
    [
        (1, 100, 4, 0, (11, 4)),  # after the first ones, which take longer
        (1, 100, 4, 40, (41, 4)),  # after a synchronous warm-up
        (51, 100, 4, 40, (61, 4)),  # resumed
        (1, 12, 4, 0, (9, 4)),  # a short run: the last ones
        (1, 2, 4, 0, (1, 2)),  # shorter than the trace
        (1, 30, 1, 30, (30, 1)),
        (1, 30, 0, 0, None),
    ],
)
def test_the_noted_steps(tmp_path, first, last, trace_steps, settled, noted):
    train(tmp_path, first=first, last=last, trace_steps=trace_steps, settled=settled)
    assert PROGRESS.follower is None
    trace = read_traces(tmp_path)
    assert (tmp_path / "timeline").exists() == (trace is not None) == (noted is not None)
    if trace is None:
        return
    (rank,) = trace.ranks
    assert (rank.first_step, len(rank.steps)) == noted
    assert rank.stage == 1


def test_memory_and_checkpoints_are_events(tmp_path):
    events = Events(tmp_path, rank=0)
    observing = Observing(events, tmp_path, 0, trace_steps=0, first_step=1, last_step=1, settled=0)
    with observing.step(1, None):
        pass
    used = observing.note_memory(1)
    with observing.saving(1, "step-000001"):
        pass
    events.close()
    memory, checkpoint = read_events(tmp_path)
    assert memory["bytes"] == used > 2**20
    assert (checkpoint["tag"], checkpoint["step"]) == ("step-000001", 1)
    assert checkpoint["seconds"] >= 0
