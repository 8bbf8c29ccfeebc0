# SPDX-License-Identifier: Apache-2.0
"""What replicas do that have met: all of them come to the same answer."""

import pytest

from support.refusals import refuses
from wavemare.engine.local_steps.meeting import Row, Verdict, decide
from wavemare.engine.local_steps.wire import START
from wavemare.errors import LaunchError
from wavemare.parallel.layout.grid import replica_number

HERE = Row(1, 2, trains=1, gives=1, hurries=0, step=8, fragment=0, numel=5, bits=32, digest=9)
NEW = HERE._replace(trains=0, gives=0)
BEGINS = NEW._replace(step=0, fragment=START)


@pytest.mark.parametrize(
    ("rows", "verdict", "refused"),
    [
        ([HERE, HERE], Verdict.GO, []),
        ([HERE], Verdict.GO, []),
        ([NEW, HERE, HERE], Verdict.GO, []),
        ([HERE, HERE._replace(gives=0)], Verdict.GO, []),
        ([HERE._replace(gives=0), NEW], Verdict.DROP, []),
        ([HERE._replace(gives=0), NEW, HERE], Verdict.DROP, []),  # whose state NEW has is unknown
        ([HERE, HERE._replace(step=12)], Verdict.FOLLOW, []),
        ([HERE, HERE._replace(digest=8)], Verdict.FOLLOW, []),
        ([BEGINS, HERE], Verdict.FOLLOW, []),
        ([HERE, HERE._replace(model=7)], Verdict.DROP, [1]),
        ([NEW._replace(settings=7), HERE, HERE], Verdict.DROP, [0]),
        ([NEW._replace(settings=7), NEW, HERE._replace(settings=7)], Verdict.DROP, [1]),
        ([BEGINS] * 3, Verdict.GO, []),
        ([BEGINS] * 2, Verdict.WAIT, []),
        ([BEGINS, BEGINS._replace(hurries=1)], Verdict.GO, []),
        ([BEGINS, BEGINS._replace(step=3), BEGINS], Verdict.GO, []),
        ([BEGINS, BEGINS._replace(digest=8), BEGINS], Verdict.FOLLOW, []),
    ],
)
def test_replicas_agree_on_what_to_do(rows, verdict, refused):
    found, reason, those = decide(rows, replicas=3)
    assert (found, those) == (verdict, refused)
    assert bool(reason) == (verdict is not Verdict.GO)


@pytest.mark.parametrize("given", ["", "3", "-1", "x", "1.5"])
def test_a_replica_needs_its_number(monkeypatch, given):
    monkeypatch.setenv("WAVEMARE_REPLICA", "2")
    assert replica_number(3) == 2
    monkeypatch.setenv("WAVEMARE_REPLICA", given)
    with refuses(LaunchError, "WAVEMARE_REPLICA", given or None):
        replica_number(3)
