# SPDX-License-Identifier: Apache-2.0
"""Ranks that stop, die, leave or wait for data: noticed in time, told on one rank, none left."""

import time

import pytest

nightly = pytest.mark.nightly
PROGRAM = "faults.py"
TIMEOUT_S = 3.0


def reports(finished):
    """Return the reports of the ranks that could write one."""
    return sorted(path.name for path in (finished.folder / "watchdog").glob("rank_*.txt"))


def told(finished, words):
    """Return the ranks that print some words; a summary is for one of them."""
    return [rank for rank, output in enumerate(finished.outputs) if words in output]


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("fault", "engine", "codes", "suspect", "count"),
    [
        ("stop", "data", [124, -9], "does not answer", 1),
        pytest.param("stop", "1f1b", [124, -9], "does not answer", 1, marks=nightly),
        pytest.param("stop", "waves", [124, -9], "does not answer", 1, marks=nightly),
        ("receive", "pipemare", [124, 124], "(recv) for", 2),
        pytest.param("receive", "data", [124, 124], "the data loader (recv) for", 2, marks=nightly),
        ("kill", "pipemare", [1, -9], "without a word: killed, or out of memory? (its last", 1),
        pytest.param("exit", "data", [1, 0], "ended without a word", 1, marks=nightly),
    ],
)
def test_the_rank_that_holds_up_the_others_is_named(launch, fault, engine, codes, suspect, count):
    finished = launch(PROGRAM, fault, engine, "--timeout", TIMEOUT_S, own=True)
    assert finished.codes == codes, finished.outputs
    # The last stage of an asynchronous pipeline reads ahead, and so holds up a later step.
    waits_for_each_other = (fault, engine) == ("receive", "data")
    suspected = "no single rank" if waits_for_each_other else "rank 1 ("
    assert told(finished, f"suspect: {suspected}") == [0], finished.outputs
    assert suspect in finished.outputs[0]
    assert len(reports(finished)) == count
    if fault == "kill":  # rank 0 stays while launchers, once a second, look for the one that ended
        report = finished.folder / "watchdog" / "rank_00000.txt"
        assert time.time() - report.stat().st_mtime > 2


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("engine", "place"),
    [
        ("data", "the data loader"),
        pytest.param("1f1b", "load of micro-batch 0", marks=nightly),
        pytest.param("pipemare", "the data loader", marks=nightly),  # it reads ahead of its step
    ],
)
def test_a_rank_that_computes_is_never_ended(launch, engine, place):
    """Nor by the limits of torch's own process groups, which here would be shorter."""
    finished = launch(PROGRAM, "loader", engine, "--timeout", TIMEOUT_S, own=True).check()
    lines = [line for line in finished.outputs[0].splitlines() if line.startswith("watchdog")]
    assert lines
    for line in lines:  # a slow machine may take so long that it is told again
        assert line.startswith("watchdog: rank 0 (")
        assert " waits in " in line
        assert "; rank 1 (" in line
        assert f" computes in {place}" in line
        assert "faults.py" in line
    assert not told(finished, "suspect")
    assert not reports(finished)


@pytest.mark.world_size(2)
def test_a_rank_that_is_killed_with_half_a_message_sent_is_noticed(launch):
    """gloo waits for the other half, without end."""
    finished = launch(PROGRAM, "half", "data", "--timeout", 500, own=True)
    assert finished.codes == [124, -9], finished.outputs
    assert not finished.ended_by_harness
    assert told(finished, "suspect: rank 1 (") == [0], finished.outputs
    assert "has ended without a word" in finished.outputs[0]
    assert "watchdog: rank 0 has waited for" in finished.outputs[0]


@nightly
@pytest.mark.world_size(2)
def test_a_rank_whose_data_ends_early_is_named(launch):
    finished = launch(PROGRAM, "batches", "data", "--timeout", TIMEOUT_S, own=True)
    # The connection breaks when rank 1 has left, unless rank 0's patience ends before.
    assert finished.codes in ([1, 0], [124, 0]), finished.outputs
    assert told(finished, "suspect: rank 1 (") == [0], finished.outputs
    ways = ("has ended by itself, after step 4", "in the script's own code")
    assert any(way in finished.outputs[0] for way in ways)


@pytest.mark.world_size(3)
@nightly
@pytest.mark.parametrize(("fault", "code"), [("stop", 124), ("kill", 1)])
@pytest.mark.parametrize("rank", [0, 2])
def test_any_of_three_ranks_is_found(launch, fault, code, rank):
    """Also rank 0, with which the store of the process group goes."""
    options = ["--timeout", TIMEOUT_S, "--rank", rank]
    finished = launch(PROGRAM, fault, "data", *options, ranks=3, own=True)
    assert finished.codes[rank] == -9
    assert sorted(finished.codes) == [-9, code, code], finished.outputs
    tellers = told(finished, f"suspect: rank {rank} (")
    assert len(tellers) == 1
    if (fault, rank) != ("kill", 2):  # else the first that has noticed it tells it
        assert tellers == [1 if rank == 0 else 0]
    if fault == "stop":
        assert len(reports(finished)) == 2
        # Without the store each rank says for itself where it waits.
        assert told(finished, "watchdog: rank 2 has waited for") == [2] * (rank == 0)
