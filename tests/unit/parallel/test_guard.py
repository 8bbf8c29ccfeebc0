# SPDX-License-Identifier: Apache-2.0
"""Shares are made anew if a rank is off its prediction."""

from types import SimpleNamespace

import pytest
import torch

from wavemare.parallel.guard import STEPS, Guard
from wavemare.parallel.speed import Line, Speed

MEASURED_S = [0.1, 0.3]


def verdict_of(monkeypatch, zero_stage):
    def gather(table, own, group):
        table[:] = MEASURED_S

    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    applied = []
    engine = SimpleNamespace(
        module=torch.nn.Linear(2, 2),
        data_parallel_group=None,
        zero_optimization_stage=lambda: zero_stage,
        share_out=applied.append,
    )
    line = Line(0.0, 0.01)
    guard = Guard(engine, [Speed(line, line)] * 2, [8, 8], applied.append)
    engine.module(torch.zeros(1, 2))
    verdicts = [guard.after_step() for _ in range(STEPS)]
    assert verdicts[:-1] == [None] * (STEPS - 1)
    return verdicts[-1], applied


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_a_rank_off_its_prediction_moves_shares(monkeypatch, zero_stage):
    verdict, applied = verdict_of(monkeypatch, zero_stage)
    assert verdict.shares == (12, 4)
    assert applied == [(12, 4), (12, 4)]


def test_what_waits_for_other_ranks_moves_none(monkeypatch):
    verdict, applied = verdict_of(monkeypatch, 3)
    assert verdict.imbalance == pytest.approx(2.0)
    assert verdict.shares is None
    assert applied == []
