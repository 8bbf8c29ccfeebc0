# SPDX-License-Identifier: Apache-2.0
"""Figures of the quality bench from made-up curves."""

import pytest
import torch
from torch import nn

from wavemare.engine.optim.policy import advise
from wavemare.pipeline.staleness.replay import Replay
from wavemare.simulation.quality import SYSTEMS, to_row

MEMORY = {"optimizer": 2.0, "correction": 0.0}


def run(system, seed, curve):
    loss = curve[-1][1]
    row = {"system": system, "seed": seed, "eval_loss": loss, "curve": curve}
    return {**row, "memory": MEMORY}


RUNS = [
    run("flush", 0, [[10, 4.0], [20, 2.0]]),
    run("flush", 1, [[10, 4.4], [20, 2.2]]),
    run("naive", 0, [[10, 5.0], [20, 2.2]]),
    run("naive", 1, [[10, 5.0], [20, 2.2]]),
    run("auto", 0, [[10, 3.0], [20, 1.0]]),
    run("auto", 1, [[10, 2.2], [20, 1.1]]),
]


def test_gaps_are_between_runs_of_the_same_seed():
    row = to_row("naive", RUNS, stages=8)
    assert row["gap"] == pytest.approx((0.1 + 0.0) / 2)
    assert row["own_gap"] == row["gap"]
    assert row["worst_own_gap"] == pytest.approx(0.1)
    assert row["stages"] == 8
    assert row["memory_total"] == 2.0
    assert (row["eval_loss"], row["deviation"]) == (2.2, 0)


def test_without_its_baseline_a_system_has_no_gap_to_it():
    row = to_row("auto", RUNS)
    assert row["own_gap"] is row["worst_own_gap"] is None
    assert row["deviation"] == pytest.approx(0.05)


def optimizer(name):
    return [text for text in SYSTEMS[name].settings if text.startswith("optimizer.")]


@pytest.mark.parametrize("name", SYSTEMS)
def test_each_system_has_a_synchronous_baseline_with_its_own_optimizer(name):
    baseline = SYSTEMS[name].baseline
    assert SYSTEMS[baseline].flushes
    assert SYSTEMS[baseline].baseline == baseline
    # The policy's choice stands in no setting: it makes Muon of AdamW.
    assert optimizer(baseline) == optimizer("muon" if name == "auto" else name)


def test_the_policys_baseline_has_the_optimizer_that_it_chooses():
    runs = [run("auto", 0, [[1, 2.0]]), run("flush-muon", 0, [[1, 1.0]])]
    runs.append(run("flush-soap", 0, [[1, 4.0]]))
    for micro_batches in (1, 2, 4, 8):
        row = to_row("auto", runs, stages=8, micro_batches=micro_batches)
        section = {"schedule": "pipemare", "pipemare": {"optimizer_policy": "auto"}}
        config = {"optimizer": {"type": "AdamW"}, "wavemare": {"pipeline": section}}
        chosen, _ = advise(config, stages=8, micro_batches=micro_batches)
        gaps = {"Muon": 1.0, "SOAP": -0.5}
        assert row["own_gap"] == gaps[chosen["optimizer"]["type"]]


@pytest.mark.parametrize("name", [name for name in SYSTEMS if SYSTEMS[name].place == "one-step"])
def test_gradients_one_step_late_are_the_same_however_a_batch_is_cut(name):
    def train(stages, micro_batches, late):
        torch.manual_seed(0)
        layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)]
        cut = len(layers) // stages
        replay = Replay(
            [nn.Sequential(*layers[n * cut : None if n == stages - 1 else (n + 1) * cut])
             for n in range(stages)],
            nn.functional.mse_loss,
            lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
            micro_batches,
            correction=SYSTEMS[name].correction,
            delays=[late * micro_batches] * stages,
        )  # fmt: skip
        torch.manual_seed(1)
        for _ in range(6):
            inputs, labels = torch.randn(8, 6), torch.randn(8, 2)
            size = 8 // micro_batches
            replay.step(list(zip(inputs.split(size), labels.split(size), strict=True)))
        return nn.Sequential(*layers).state_dict()

    whole = train(1, 1, late=1)
    for stages, micro_batches in ((2, 2), (2, 4), (4, 8)):
        torch.testing.assert_close(train(stages, micro_batches, late=1), whole)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(train(2, 2, late=0), whole)
