# SPDX-License-Identifier: Apache-2.0
"""``--balance`` where ranks or the configuration disagree with it."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from wavemare.errors import ConfigError, PlanError
from wavemare.parallel.guard import STEPS
from wavemare.parallel.plan import ParallelPlan
from wavemare.parallel.speed import Line, Speed
from wavemare.recipes.balancing import Balancing

PLAN = ParallelPlan(data_parallel=2, global_batch=8, shares=(5, 3))
STAGES = ParallelPlan(stages=2, cuts=(0, 2, 4), num_layers=4, global_batch=8, shares=(8,))


class LanguageModel:
    """Some model that is no classifier."""


def balancing(folder, choice, config=None, plan=None, *, resumes=False):
    if plan is not None:
        (folder / "plan.json").write_text(plan.to_json())
        choice = choice or str(folder / "plan.json")
    return Balancing(choice, config or {}, folder, resumes=resumes)


def ranks_that_read(monkeypatch, *digests):
    def gather(found, own):
        found[:] = [own, *digests]

    monkeypatch.setattr(dist, "get_world_size", lambda: 1 + len(digests))
    monkeypatch.setattr(dist, "all_gather_object", gather)


def test_a_plan_on_some_machines_only_is_refused_before_anything_is_measured(monkeypatch, tmp_path):
    ranks_that_read(monkeypatch, None)
    config = {"wavemare": {"pipeline": {"stages": 2}}}
    resumed = balancing(tmp_path, "auto", config, STAGES, resumes=True)
    with pytest.raises(PlanError, match="rank 1 none"):
        resumed.measure(LanguageModel(), {}, sequence_length=8)


def test_unlike_files_are_refused(monkeypatch, tmp_path):
    ranks_that_read(monkeypatch, "0123456789ab")
    with pytest.raises(PlanError, match="rank 1 0123456789ab"):
        balancing(tmp_path, None, plan=PLAN).measure(LanguageModel(), {}, sequence_length=8)


def test_a_mean_that_was_asked_for_is_kept(monkeypatch, tmp_path):
    ranks_that_read(monkeypatch, PLAN.digest[:12])
    for given, mean in [({}, "tokens"), ({"mean": "samples"}, "samples")]:
        found = balancing(tmp_path, None, {"wavemare": {"balance": given}}, PLAN)
        found.measure(LanguageModel(), {}, sequence_length=8)
        assert found.config["wavemare"]["balance"]["mean"] == mean


def test_waves_and_split_heads_stay_without_weights(monkeypatch, tmp_path):
    equal = replace(PLAN, shares=(4, 4))
    for plan in (replace(equal, wavelet=True, tensor_parallel=2), replace(equal, colocated=("a",))):
        ranks_that_read(monkeypatch, plan.digest[:12])
        found = balancing(tmp_path, None, plan=plan)
        found.measure(LanguageModel(), {}, sequence_length=8)
        assert "balance" not in found.config["wavemare"]


def test_what_auto_would_drop_is_refused(monkeypatch, tmp_path):
    ranks_that_read(monkeypatch, None)
    waves = balancing(tmp_path, "auto", {"wavemare": {"wavelet": {"mode": "sync"}}})
    with pytest.raises(ConfigError, match=r"wavemare\.wavelet\.mode"):
        waves.measure(LanguageModel(), {}, sequence_length=8)
    with pytest.raises(ConfigError, match="Leave out one of the two"):
        balancing(tmp_path, "auto", {"wavemare": {"parallel": {"stages": 2}}})


@pytest.mark.parametrize(
    ("config", "dtype", "zero"),
    [
        ({}, None, 0),
        ({"bf16": {"enabled": True}, "zero_optimization": True}, torch.bfloat16, 1),
        ({"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}, torch.float16, 2),
        ({"bf16": {"enabled": False}, "zero_optimization": False}, None, 0),
    ],
)
def test_speeds_are_those_of_the_jobs_own_type(monkeypatch, tmp_path, config, dtype, zero):
    ranks_that_read(monkeypatch, None)
    asked = []

    def measure(model, batch_of, batch, **options):
        asked.append(options)
        return PLAN, []

    monkeypatch.setattr("wavemare.parallel.balance.balance_replicas", measure)
    found = balancing(tmp_path, "auto", config)
    found.measure(LanguageModel(), {}, sequence_length=8)
    assert asked == [{"zero_stage": zero, "sequence_length": 8, "dtype": dtype}]
    assert found.config["wavemare"]["balance"]["shares"] == [5, 3]


class Engine:
    """Rank 0 of two, whose passes take their time on a clock of its own."""

    data_parallel_group = None

    def __init__(self, monkeypatch, sample_s):
        self.module, self.share, self.now = torch.nn.Linear(2, 2), PLAN.shares[0], 0.0
        self.sample_s = sample_s
        self.module.register_forward_hook(self.spend)
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def spend(self, *_):
        self.now += self.share * self.sample_s

    def zero_optimization_stage(self):
        return 0

    def share_out(self, shares):
        self.share = shares[0]


def watched(monkeypatch, folder, sample_s, rank=0):
    """Return a run of shares 5 and 3, and a function that trains 20 steps.

    A sample should take 3 s on rank 0 and 5 s on rank 1; it takes ``sample_s`` on rank 0.
    """

    def gather(found, own, group="default"):
        found[:] = [own, own if group == "default" else 15.0]

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    speeds = [Speed(line, line) for line in (Line(0.0, 3.0), Line(0.0, 5.0))]
    measured = "wavemare.parallel.balance.balance_replicas"
    monkeypatch.setattr(measured, lambda *_, **__: (PLAN, speeds))
    found = Balancing("auto", {}, folder, resumes=False)
    found.measure(LanguageModel(), {}, sequence_length=8)
    engine = Engine(monkeypatch, sample_s)
    found.watch(engine, lambda shares: None)

    def train():
        said = []
        for _ in range(STEPS):
            engine.module(torch.zeros(1, 2))
            said.append(found.after_step(saved=False, rank=rank))
        assert said[:-1] == [None] * (STEPS - 1)
        return said[-1]

    return found, train


@pytest.mark.parametrize("rank", [0, 1])
def test_new_shares_of_the_guard_are_written_by_one_rank(monkeypatch, tmp_path, rank):
    found, train = watched(monkeypatch, tmp_path, 1.0, rank)
    assert "new shares 7, 1" in train()
    assert found.plan == replace(PLAN, shares=(7, 1))
    file = tmp_path / "plan.json"
    assert file.exists() == (rank == 0)
    assert rank == 1 or ParallelPlan.from_json(file.read_text()) == found.plan
