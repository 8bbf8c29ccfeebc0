# SPDX-License-Identifier: Apache-2.0
"""``--balance`` where ranks or the configuration disagree with it."""

import pytest
import torch
import torch.distributed as dist

from support.refusals import refuses
from wavemare.errors import ConfigError, PlanError
from wavemare.parallel.layout.layout import Layout
from wavemare.training.arguments import TrainArguments
from wavemare.training.balance import balance, read_layout
from wavemare.training.setup import Setup

PLAN = Layout(data_parallel=2, global_batch=8, shares=(5, 3))
STAGES = Layout(stages=2, cuts=(0, 2, 4), num_layers=4, global_batch=8, shares=(8,))


class LanguageModel(torch.nn.Module):
    """Some model that is no classifier."""


def balancing(folder, choice, config=None, plan=None, *, resume=False):
    if plan is not None:
        (folder / "layout.json").write_text(plan.to_json())
        choice = choice or str(folder / "layout.json")
    arguments = TrainArguments(balance=choice, output=str(folder), sequence_length=8)
    layout = read_layout(arguments, config or {}, resume=resume)
    known = {"config": config or {}, "layout": layout, "section": None, "batch": {}}
    return Setup(arguments, **known, resume=resume, rank=0, world_size=2)


def ranks_that_read(monkeypatch, *digests):
    def gather(found, own, group=None):
        found[:] = [own, *digests]

    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 1 + len(digests))
    monkeypatch.setattr(dist, "all_gather_object", gather)


def test_a_plan_on_some_machines_only_is_refused_before_anything_is_measured(monkeypatch, tmp_path):
    ranks_that_read(monkeypatch, None)
    config = {"wavemare": {"pipeline": {"stages": 2}}}
    resumed = balancing(tmp_path, "auto", config, STAGES, resume=True)
    with refuses(PlanError, "--balance", "auto") as caught:
        balance(resumed, LanguageModel())
    assert "rank 1" in str(caught.value)


def test_unlike_files_are_refused(monkeypatch, tmp_path):
    ranks_that_read(monkeypatch, "0123456789ab")
    with refuses(PlanError, "--balance", str(tmp_path / "layout.json")) as caught:
        balance(balancing(tmp_path, None, plan=PLAN), LanguageModel())
    assert "rank 1 0123456789ab" in str(caught.value)


def test_what_auto_would_drop_is_refused(monkeypatch, tmp_path):
    ranks_that_read(monkeypatch, None)
    waves = balancing(tmp_path, "auto", {"wavemare": {"wavelet": {"mode": "sync"}}})
    with refuses(ConfigError, "wavemare.wavelet.mode", "sync"):
        balance(waves, LanguageModel())
    with refuses(ConfigError, "--balance", "auto"):
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
        return PLAN

    monkeypatch.setattr("wavemare.parallel.balance.balance_replicas", measure)
    found = balancing(tmp_path, "auto", config)
    balance(found, LanguageModel())
    assert found.layout == PLAN
    assert asked == [{"zero_stage": zero, "sequence_length": 8, "dtype": dtype}]
    assert found.config["wavemare"]["balance"] == {"mean": "tokens", "shares": [5, 3]}
