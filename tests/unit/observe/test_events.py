# SPDX-License-Identifier: Apache-2.0
"""Events of a rank: held back until the folder is the run's, then on disk at once."""

import json
import logging
import warnings

import pytest

from support.refusals import refuses
from wavemare.errors import DataError
from wavemare.observe.lines import Events, read_events


def lines(folder, rank):
    file = folder / "events" / f"rank_{rank:05d}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_nothing_is_written_before_the_folder_is_open(tmp_path):
    events = Events(tmp_path, rank=2, clock=lambda: 5.0)
    events.note("memory", 1, bytes=10)
    assert list(tmp_path.iterdir()) == []
    events.open()
    events.note("checkpoint", 2, tag="a", seconds=0.5)
    events.open()
    assert lines(tmp_path, 2) == [
        {"step": 1, "time": 5.0, "kind": "memory", "bytes": 10},
        {"step": 2, "time": 5.0, "kind": "checkpoint", "tag": "a", "seconds": 0.5},
    ]


def test_warnings_are_noted_and_shown(tmp_path, capsys, caplog):
    events = Events(tmp_path, rank=0, clock=lambda: 1.0)
    shown = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *rest, **named: shown.append(str(message))
        ours = warnings.showwarning
        events.listen()
        events.step = 4
        logging.getLogger("wavemare").warning("the %s is odd", "rate")
        logging.getLogger("wavemare").info("nothing to warn of")
        logging.getLogger("wavemare.engine").error("worse")
        warnings.warn("old name", DeprecationWarning, stacklevel=1)
        events.open()
        events.close()
        assert warnings.showwarning is ours
        logging.getLogger("wavemare").warning("nobody listens")
        warnings.warn("nobody listens", stacklevel=1)
    assert shown == ["old name", "nobody listens"]
    assert events.warnings == 3
    assert events.latest == "old name"
    found = [(e["step"], e["source"], e["text"]) for e in lines(tmp_path, 0)]
    assert found == [
        (4, "wavemare warning", "the rate is odd"),
        (4, "wavemare.engine error", "worse"),
        (4, "DeprecationWarning", "old name"),
    ]


def test_a_warning_that_only_python_would_show_is_shown(tmp_path, monkeypatch, capsys):
    """Python has a last resort for loggers without a handler; a listener is one."""
    logger = logging.getLogger("wavemare")
    monkeypatch.setattr(logger, "propagate", False)  # the root logger has pytest's handlers
    first, second = Events(tmp_path, rank=0), Events(tmp_path, rank=1)
    first.listen()
    second.listen()
    logger.warning("odd")
    logging.getLogger("wavemare.engine").error("worse")
    logger.info("nothing")
    assert capsys.readouterr().err == "odd\nworse\n"
    handler = logging.NullHandler()
    logger.addHandler(handler)
    logger.warning("its own way")
    logger.removeHandler(handler)
    first.close()
    second.close()
    assert capsys.readouterr().err == ""
    assert first.warnings == second.warnings == 3


def test_events_of_all_ranks_are_read_in_the_order_of_time(tmp_path):
    for rank, time in ((0, 3.0), (1, 2.0)):
        events = Events(tmp_path, rank=rank, clock=lambda time=time: time)
        events.open()
        events.note("memory", 7, bytes=rank)
        events.close()
    found = [(event["rank"], event["bytes"]) for event in read_events(tmp_path)]
    assert found == [(1, 1), (0, 0)]
    assert read_events(tmp_path / "elsewhere") == []


@pytest.mark.parametrize(
    "line", ["[]", '{"step": 1, "time": 2}', '{"step": 1, "time": 2, "kind": "party"}']
)
def test_a_line_that_is_no_event_is_named(tmp_path, line):
    file = tmp_path / "events" / "rank_00000.jsonl"
    file.parent.mkdir()
    file.write_text(f"{line}\n")
    with refuses(DataError, f"{file}:1"):
        read_events(tmp_path)
