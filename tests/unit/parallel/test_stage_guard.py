# SPDX-License-Identifier: Apache-2.0
"""Stages and shares are timed, and planned anew if one of them is off its prediction."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from deepspeed.runtime.pipe import schedule

from wavemare.parallel.balance import plan_stages
from wavemare.parallel.guard import STEPS, Guard
from wavemare.parallel.speed import Line, Speed
from wavemare.parallel.stage_guard import StageGuard

BATCH = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
}
# Rank stage * 2 + replica; eight layers of 1 s, forward and backward together.
TABLE = np.ones((4, 8))


class Pipeline:
    """Rank 0 of two stages of two replicas; its passes take their time on a clock of its own."""

    def __init__(self, monkeypatch, forward_s, backward_s, waited_s=0.0):
        self.now = 0.0
        self.spent = {
            schedule.ForwardPass: forward_s,
            schedule.BackwardPass: backward_s,
            schedule.SendActivation: 50.0,
        }
        self.waited_s = waited_s
        self._balance = SimpleNamespace(waited_s=0.0, timed=False) if waited_s else None
        self.methods = {instruction: self.method(instruction) for instruction in self.spent}
        self._INSTRUCTION_MAP = self.methods  # where DeepSpeed's engine looks its methods up
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def method(self, instruction):
        def run(buffer_id):
            self.now += self.spent[instruction]
            if self._balance is not None and instruction is schedule.ForwardPass:
                assert self._balance.timed
                self.now += self.waited_s
                self._balance.waited_s += self.waited_s

        return run

    def step(self):
        for method in self._INSTRUCTION_MAP.values():
            for micro in range(4):
                # Only the first pass warms up.
                self.now += 0.0 if micro else 1.0
                method(buffer_id=micro)

    def is_timed(self):
        balanced = self._balance is not None and self._balance.timed
        return balanced or self._INSTRUCTION_MAP is not self.methods


def judged(pipeline, monkeypatch, others):
    """Return the verdict after 20 steps, with the seconds that ranks 1 to 3 have found."""

    def gather(found, own):
        found[:] = [own, *others]

    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    plan = plan_stages(TABLE, BATCH, stages=2)
    assert (plan.cuts, plan.shares) == ((0, 4, 8), (4, 4))
    guard = StageGuard(pipeline, plan, TABLE, BATCH)
    verdicts = []
    for _ in range(STEPS):
        assert pipeline.is_timed()
        pipeline.step()
        verdicts.append(guard.after_step())
    assert verdicts[:-1] == [None] * (STEPS - 1)
    assert not pipeline.is_timed()
    assert guard.after_step() is None
    return verdicts[-1]


@pytest.mark.parametrize("waited_s", [0.0, 7.0])
def test_stages_as_predicted_keep_their_plan(monkeypatch, waited_s):
    pipeline = Pipeline(monkeypatch, 1.5, 3.0, waited_s)
    verdict = judged(pipeline, monkeypatch, [4.0, 4.0, 4.0])
    assert verdict.plan is None
    assert verdict.predicted_s == (4.0, 4.0)
    assert verdict.measured_s == pytest.approx((4.5, 4.0))
    assert verdict.error == pytest.approx(0.125)
    assert "stage 0: 4.5e+03 ms (predicted 4e+03)" in str(verdict)


def test_a_slow_stage_gets_fewer_layers(monkeypatch):
    # Three times as slow as measured, on both replicas: 2 layers of 3 s beside 6 of 1 s.
    verdict = judged(Pipeline(monkeypatch, 4.0, 8.0), monkeypatch, [12.0, 4.0, 4.0])
    assert verdict.error == pytest.approx(2.0)
    assert verdict.plan.cuts == (0, 2, 8)
    assert verdict.plan.shares == (4, 4)


def test_a_slow_replica_gets_fewer_samples(monkeypatch):
    # Only the first replica is slow, on both stages.
    verdict = judged(Pipeline(monkeypatch, 4.0, 8.0), monkeypatch, [4.0, 12.0, 4.0])
    assert verdict.plan.cuts == (0, 4, 8)
    assert verdict.plan.shares == (2, 6)


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
