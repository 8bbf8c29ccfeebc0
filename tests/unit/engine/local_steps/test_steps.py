# SPDX-License-Identifier: Apache-2.0
"""Local steps: what is refused by name, who forms a replica, and how weights are dealt."""

from types import SimpleNamespace

import pytest
import torch

from support.refusals import refuses
from wavemare.engine.config.resolve import WavemareConfig, check_config
from wavemare.engine.config.sections import LocalStepsConfig
from wavemare.engine.local_steps.steps import LocalSteps, fragments_of
from wavemare.errors import ConfigError
from wavemare.parallel.layout.grid import count_replicas

KEY = "wavemare.local_steps"
ON = {"mode": "diloco"}
BF16 = {"bf16": {"enabled": True}}
CPU = {"device": "cpu"}
PIPEMARE = {"stages": 2, "schedule": "pipemare"}


def check(local, config=None, **ours):
    given = {"train_micro_batch_size_per_gpu": 1, **(config or {})}
    check_config({**given, "wavemare": {**ours, "local_steps": local}}, world_size=4)


def zero(stage, **more):
    return {"zero_optimization": {"stage": stage, **more}}


@pytest.mark.parametrize(
    ("local", "key"),
    [
        ({"every": 8}, "every"),
        ({**ON, "every": 8, "fragments": 3}, "fragments"),
        ({**ON, "every": 8, "fragments": 2, "overlap": 5}, "overlap"),
        ({**ON, "mixing": "carry"}, "mixing"),
        ({"mode": "average", "outer": {"lr": 0.7}}, "outer"),
        ({**ON, "outer": {"momentum": 1.0}}, "outer.momentum"),
        ({**ON, "bits": 3}, "bits"),
        ({**ON, "replica": 0}, "replica"),
        ({**ON, "elastic": {"timeout_s": 9}}, "elastic"),
        ({**ON, "elastic": {"replicas": 1}}, "elastic.replicas"),
        ({**ON, "elastic": {"replicas": 2, "min_replicas": 3}}, "elastic.min_replicas"),
        ({**ON, "elastic": {"replicas": 2}, "replica": "rank"}, "replica"),
        ({**ON, "elastic": {"replicas": 2}, "warmup_steps": 1}, "warmup_steps"),
        ({**ON, "elastic": {"replicas": 2}, "copies": "device"}, "copies"),
        ({**ON, "elastic": {"replicas": 2}, "bits": 8}, "bits"),
    ],
)
def test_keys_without_effect_and_values_that_cannot_be_are_refused(local, key):
    with pytest.raises(ConfigError) as caught:
        check(local)
    assert caught.value.key == f"{KEY}.{key}"


@pytest.mark.parametrize(
    ("config", "ours", "key"),
    [
        (zero(3), {}, "zero_optimization.stage"),
        (BF16, {}, "bf16.enabled"),
        ({**zero(1), "fp16": {"enabled": True}}, {}, "fp16.enabled"),
        (zero(2, offload_optimizer=CPU), {}, "zero_optimization.offload_optimizer.device"),
        (zero(2, cpu_offload=True), {}, "zero_optimization.cpu_offload"),
        (zero(2, zenflow={"topk_ratio": 0.1}), {}, "zero_optimization.zenflow"),
        ({"optimizer": {"type": "OneBitAdam"}}, {}, "optimizer.type"),
        ({"sequence_parallel_size": 2}, {}, "sequence_parallel_size"),
        ({"tensor_parallel": {"autotp_size": 2}}, {}, "tensor_parallel.autotp_size"),
        ({"compile": {"deepcompile": True}}, {}, "compile.deepcompile"),
        ({"hybrid_engine": {"enabled": True}}, {}, "hybrid_engine.enabled"),
        ({"checkpoint": {"load_universal": True}}, {}, "checkpoint.load_universal"),
        ({"checkpoint": {"writer": {"decoupled": True}}}, {}, "checkpoint.writer.decoupled"),
        ({}, {"pipeline": PIPEMARE}, "wavemare.pipeline.schedule"),
        ({}, {"sparse_collective": {"mode": "auto"}}, "wavemare.sparse_collective.mode"),
        ({}, {"balance": {"mean": "tokens"}}, "wavemare.balance.mean"),
        ({}, {"guard": {"nonfinite": "skip"}}, "wavemare.guard.nonfinite"),
    ],
)
def test_what_replicas_cannot_go_with_is_refused_by_name(config, ours, key):
    with pytest.raises(ConfigError) as caught:
        check(ON, config, **ours)
    assert caught.value.key == key
    assert KEY in caught.value.remedy
    assert "with local steps" in caught.value.reason


def test_what_replicas_go_with_passes():
    check(ON, {**zero(2), **BF16})
    check(ON, wavelet={"mode": "sync"})
    check(ON, BF16, pipeline={"stages": 2})
    check(ON, pipeline={"stages": 2, "schedule": "zbv"}, tensor_parallel={"size": 2})
    check(ON, zero(1), expert_parallel={"size": 2})
    check({**ON, "every": 8, "fragments": 4, "overlap": 2, "mixing": "replace", "bits": 4})
    check({**ON, "every": 8, "fragments": 4, "overlap": 2, "elastic": {"replicas": 4}})


@pytest.mark.parametrize(
    ("replica", "hosts", "size"),
    [("host", "aabb", 2), ("host", "aaabbb", 3), ("rank", "aaaa", 1), (2, "aaaa", 2)],
)
def test_consecutive_ranks_form_replicas(replica, hosts, size):
    assert count_replicas(ours(replica), list(hosts)) == len(hosts) // size


def ours(replica, **sections):
    return WavemareConfig.of({"wavemare": {**sections, "local_steps": {**ON, "replica": replica}}})


@pytest.mark.parametrize(
    ("replica", "sections"),
    [
        ("rank", {"pipeline": {"stages": 2}}),
        (2, {"pipeline": {"stages": 2}, "tensor_parallel": {"size": 2}}),
        (2, {"pipeline": {"stages": 2}, "expert_parallel": {"size": 2}}),
    ],
)
def test_a_replica_holds_whole_models(replica, sections):
    with refuses(ConfigError, f"{KEY}.replica", replica):
        count_replicas(ours(replica, **sections), list("aaaabbbb"))
    assert count_replicas(ours("host", **sections), list("aaaabbbb")) == 2


@pytest.mark.parametrize(
    ("replica", "hosts"),
    [
        ("host", "aabbb"),
        ("host", "abab"),
        ("host", "aabbaa"),
        ("host", "aaaa"),
        (3, "aabb"),
        (4, "aabb"),
    ],
)
def test_unequal_hosts_and_a_single_replica_are_refused(replica, hosts):
    with refuses(ConfigError, f"{KEY}.replica", replica):
        count_replicas(ours(replica), list(hosts))


def test_a_refused_model_opens_no_link():
    module = torch.nn.Embedding(4, 2, sparse=True)
    engine = SimpleNamespace(module=module, pipeline_parallelism=False)  # and no group
    with refuses(ConfigError, "wavemare.local_steps.warmup_steps", 1):
        LocalSteps(engine, LocalStepsConfig(mode="diloco", warmup_steps=1), 1.0)


def test_parameters_are_dealt_to_fragments_by_size():
    assert fragments_of([5, 100, 7, 90, 7], 2) == [0, 0, 0, 1, 1]
    assert fragments_of([1, 2], 4) == [1, 0]
    # Of weights that several stages hold, the first are the same on each.
    assert fragments_of([5, 100, 7], 2, [0, 2, 1]) == [0, 0, 1]
