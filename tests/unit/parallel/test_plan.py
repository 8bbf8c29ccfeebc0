# SPDX-License-Identifier: Apache-2.0
"""Plans as data: what they refuse, their JSON, their hash and the configuration that runs them."""

import json
from dataclasses import replace

import pytest

from wavemare.engine.config.resolve import check_batch_sizes, check_config
from wavemare.errors import PlanError
from wavemare.parallel.layout.layout import Layout, Prediction

SHARES = Layout(
    data_parallel=4, global_batch=128, micro_steps=2, shares=(20, 20, 12, 12), zero_stage=2
)
STAGES = Layout(
    stages=2,
    tensor_parallel=2,
    data_parallel=2,
    cuts=(0, 17, 28),
    num_layers=28,
    schedule="pipemare",
    zero_stage=1,
    recompute=True,
    global_batch=48,
    micro_steps=8,
    shares=(4, 2),
    order=(7, 6, 5, 4, 3, 2, 1, 0),
    predicted=Prediction(
        step_s=0.5,
        tokens_per_s=1e4,
        stage_s=(0.03, 0.02),
        rank_s=(0.4, 0.5),
        memory_bytes=(2.0**31,) * 8,
    ),
)


APART = replace(
    STAGES,
    schedule="1f1b",
    zero_stage=0,
    slack=2,
    replica_cuts=((0, 17, 28), (0, 12, 28)),
    order=(7, 6, 5, 4, 3, 2, 1, 9),
)


@pytest.mark.parametrize("plan", [SHARES, STAGES, APART], ids=["shares", "stages", "apart"])
def test_json_round_trip(plan):
    again = Layout.from_json(plan.to_json())
    assert again == plan
    assert again.digest == plan.digest


def test_digest_is_that_of_the_plan_without_its_prediction():
    assert replace(STAGES, predicted=None).digest == STAGES.digest
    changed = {"global_batch": 96, "micro_steps": 16}
    others = [
        replace(STAGES, **changed),
        replace(STAGES, shares=(2, 4)),
        replace(STAGES, cuts=(0, 16, 28)),
        replace(STAGES, order=None),
        replace(STAGES, zero_stage=0),
        replace(STAGES, recompute=False),
        replace(STAGES, schedule="1f1b"),
    ]
    assert len({STAGES.digest, *(plan.digest for plan in others)}) == len(others) + 1
    # The hash is part of checkpoints: it must not change with the program.
    assert SHARES.digest[:16] == "7f86b7b9127328cf"
    values = json.loads(SHARES.to_json())
    for name in ("replica_cuts", "slack", "expert_parallel"):  # which earlier files lack
        del values[name]
    assert Layout.from_json(json.dumps(values)) == SHARES


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"replica_cuts": ((0, 17, 28),)}, "replica_cuts"),
        ({"replica_cuts": ((0, 12, 28), (0, 17, 28))}, "replica_cuts"),
        ({"replica_cuts": ((0, 17, 28), (0, 29, 28))}, "replica_cuts"),
        ({"replica_cuts": ((0, 17, 28), 5)}, "replica_cuts"),
        ({"zero_stage": 1}, "replica_cuts"),
        ({"schedule": "zb-h1"}, "slack"),
        ({"slack": -1}, "slack"),
        ({"expert_parallel": 3}, "expert_parallel"),
        ({"expert_parallel": 2}, "expert_parallel"),
        ({"expert_parallel": 2, "shares": (3, 3)}, "replica_cuts"),
    ],
)
def test_cuts_of_replicas_slack_and_experts_that_cannot_be(changes, key):
    with pytest.raises(PlanError) as caught:
        replace(APART, **changes)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("base", "changes", "key"),
    [
        (SHARES, {"shares": (20, 20, 12, 11), "global_batch": 126}, "shares"),
        (SHARES, {"cuts": (0, 4), "num_layers": 4}, "cuts"),
        (SHARES, {"schedule": "pipemare"}, "zero_stage"),
        (STAGES, {"schedule": "zbv"}, "schedule"),
        (STAGES, {"zero_stage": 2}, "zero_stage"),
        (STAGES, {"cuts": None}, "cuts"),
        (STAGES, {"cuts": (0, 10, 20, 28)}, "cuts"),
        (STAGES, {"cuts": (0, 17, 27)}, "cuts"),
        (STAGES, {"cuts": (0, 28, 28)}, "cuts"),
        (STAGES, {"num_layers": None}, "cuts"),
        (STAGES, {"wavelet": True}, "wavelet"),
        (SHARES, {"wavelet": True}, "wavelet"),
    ],
)
def test_refusals_name_the_key(base, changes, key):
    with pytest.raises(PlanError) as refused:
        replace(base, **changes)
    assert refused.value.key == key


def test_configuration_of_shares():
    given = {
        "train_batch_size": "auto",
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 0, "overlap_comm": False},
        "wavemare": {"pipeline": {"stages": 4, "partition": "time", "inputs": ["input_ids"]}},
    }
    config = SHARES.configure(given)
    assert given["zero_optimization"]["stage"] == 0
    assert config["bf16"] == {"enabled": True}
    assert config["zero_optimization"] == {"stage": 2, "overlap_comm": False}
    assert config["wavemare"] == {
        "pipeline": {"stages": 1, "schedule": "1f1b", "inputs": ["input_ids"]},
        "tensor_parallel": {"size": 1},
        "balance": {"shares": [20, 20, 12, 12]},
    }
    sizes = check_batch_sizes(config, data_world_size=4)
    assert sizes == {
        "train_batch_size": 128,
        "train_micro_batch_size_per_gpu": 16,
        "gradient_accumulation_steps": 2,
    }


def test_configuration_of_stages():
    plan = replace(STAGES, shares=(3, 3), predicted=None)
    config = plan.configure({"bf16": {"enabled": True}, "wavemare": {"balance": {"shares": [1]}}})
    assert config["wavemare"]["pipeline"] == {
        "stages": 2,
        "schedule": "pipemare",
        "partition": [0, 17],
    }
    assert config["pipeline"] == {"activation_checkpoint_interval": 1}
    assert "balance" not in config["wavemare"]
    check_config(config, world_size=plan.world_size)


def test_waves_of_one_stage():
    plan = Layout(tensor_parallel=2, global_batch=8, micro_steps=2, shares=(4,), wavelet=True)
    config = plan.configure({"wavemare": {"wavelet": {"mode": "off"}}})
    assert config["wavemare"]["wavelet"] == {"mode": "auto"}
    check_config(config, world_size=2)
