# SPDX-License-Identifier: Apache-2.0
"""Sections that do not go together, or would have no effect, are refused by name."""

import re

import pytest

from wavemare.engine.config.refusals import check_sequence_parallel
from wavemare.engine.config.resolve import WavemareConfig, check_config
from wavemare.errors import ConfigError

FP16 = {"fp16": {"enabled": True}}
BF16 = {"bf16": {"enabled": True}}
UNMANAGED = {"managed_gradient_accumulation": False}
SPLIT = {"pipeline": {"stages": 2}, "tensor_parallel": {"size": 2}}
COMPRESSOR = {"compressor": {"type": "block_topk"}}
SPARSE = {"sparse_collective": {"mode": "pushpull"}}


def zero(stage, **more):
    return {"zero_optimization": {"stage": stage, **more}}


def check(section, config, world_size=4):
    config = {"train_micro_batch_size_per_gpu": 1, **config, "wavemare": section}
    return check_config(config, world_size=world_size)


def refusal(section, config, **more):
    with pytest.raises(ConfigError) as caught:
        check(section, config, **more)
    assert caught.value.remedy
    return caught.value


def experts(**section):
    return {"expert_parallel": {"size": 2}, **section}


APART = [[0, 2], [0, 3]]
"""First layers of the stages of two replicas."""


def planned(**keys):
    return {"pipeline": {"schedule": "zb-h1", "stages": 2, **keys}}


def sparse(mode="pushpull", **keys):
    return {"sparse_collective": {"mode": mode, **keys}}


PROFILER = {"flops_profiler": {"enabled": True}}
AUTOTP = {"tensor_parallel": {"autotp_size": 2}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
EXPERTS = {"expert_parallel": {"enabled": True}}
CURRICULUM = {"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True}}}}
SHARES = {"balance": {"shares": [1, 1]}}
STAGE, OF_GUARD, OF_SPARSE = (
    "zero_optimization.stage",
    "wavemare.guard.nonfinite",
    "wavemare.sparse_collective",
)
WITHOUT_SUMS = [
    (zero(3), STAGE),
    (zero(2, **OFFLOAD), "zero_optimization.offload_optimizer.device"),
    (zero(2, cpu_offload=True), "zero_optimization.cpu_offload"),
    (zero(2, zenflow={"topk_ratio": 0.1}), "zero_optimization.zenflow"),
    (AUTOTP, "tensor_parallel.autotp_size"),
    ({"sequence_parallel_size": 2}, "sequence_parallel_size"),
    (EXPERTS, "expert_parallel.enabled"),
    ({"compile": {"deepcompile": True}}, "compile.deepcompile"),
    ({"hybrid_engine": {"enabled": True}}, "hybrid_engine.enabled"),
]
REFUSED = [
    (experts(), zero(3), STAGE),
    (experts(), BF16, "bf16.enabled"),
    (experts(tensor_parallel={"size": 4}), {}, "wavemare.expert_parallel.size"),
    (experts(parallel={"split": 2}), {}, "wavemare.parallel"),
    (experts(balance={"mean": "tokens"}), {}, "wavemare.balance.mean"),
    (experts(**sparse("auto", **COMPRESSOR)), {}, f"{OF_SPARSE}.compressor"),
    (experts(), AUTOTP, "tensor_parallel.autotp_size"),
    (experts(), {"sequence_parallel_size": 2}, "sequence_parallel_size"),
    (experts(), zero(1, **OFFLOAD), "zero_optimization.offload_optimizer.device"),
    (experts(expert_parallel={"size": 3}), {}, "wavemare.expert_parallel.size"),
    ({"watchdog": {"timeout_s": 0}}, {}, "wavemare.watchdog.timeout_s"),
    ({"watchdog": {"timeout_s": float("inf")}}, {}, "wavemare.watchdog.timeout_s"),
    ({"guard": {"nonfinite": "skip"}}, FP16, OF_GUARD),
    ({"guard": {"nonfinite": "stop"}}, FP16, OF_GUARD),
    ({"guard": {"nonfinite": "maybe"}}, {}, OF_GUARD),
    ({"guard": {"max_skips": 3}}, {}, "wavemare.guard.max_skips"),
    ({"guard": {"nonfinite": "skip", "max_skips": 0}}, {}, "wavemare.guard.max_skips"),
    ({"guard": {"checksum": True}}, {}, "wavemare.guard.checksum"),
    ({**sparse(**COMPRESSOR), "guard": {"nonfinite": "skip"}}, {}, OF_GUARD),
    ({"wavelet": {"mode": "snyc"}}, {}, "wavemare.wavelet.mode"),
    ({"wavelet": {"mod": "sync"}}, {}, "wavemare.wavelet.mod"),
    ({"wavelet": {"mode": "sync"}}, PROFILER, "flops_profiler.enabled"),
    (SPLIT, {"pipeline": {"pipe_partitioned": True}}, "pipeline.pipe_partitioned"),
    (SPLIT, {"pipeline": {"grad_partitioned": True}}, "pipeline.grad_partitioned"),
    (SPLIT, FP16, "fp16.enabled"),
    (SPLIT, PROFILER, "flops_profiler.enabled"),
    (SPLIT, zero(2), STAGE),
    (planned(), zero(2), STAGE),
    (planned(), EXPERTS, "expert_parallel.enabled"),
    (planned(), {"compile": {"deepcompile": True}}, "compile.deepcompile"),
    (planned(pipemare={}), {}, "wavemare.pipeline.pipemare"),
    (planned(chunks=2), {}, "wavemare.pipeline.chunks"),
    (planned(schedule="pipemare", slack=1), {}, "wavemare.pipeline.slack"),
    (planned(schedule="zbv", slack=1), {}, "wavemare.pipeline.slack"),
    (planned(partition=APART), zero(1), STAGE),
    (planned(partition=APART), BF16, "bf16.enabled"),
    (planned(partition=APART, schedule="pipemare"), {}, "wavemare.pipeline.schedule"),
    (experts(**planned(partition=APART)), {}, "wavemare.expert_parallel.size"),
    (planned(schedule="zbv", memory_limit="1x"), {}, "wavemare.pipeline.memory_limit"),
    (planned(schedule="auto", memory_limit="4 apples"), {}, "wavemare.pipeline.memory_limit"),
    ({**SHARES, "wavelet": {"mode": "sync"}}, {}, "wavemare.balance.shares"),
    ({"balance": {"share": [1]}}, {}, "wavemare.balance.share"),
    (SHARES, CURRICULUM, "data_efficiency.data_sampling.curriculum_learning.enabled"),
    *((sparse(), config, key) for config, key in WITHOUT_SUMS),
    (sparse("off", **COMPRESSOR), {}, f"{OF_SPARSE}.compressor"),
    ({"sparse_collective": {"block": 64}}, {}, f"{OF_SPARSE}.block"),
    (sparse("auto", hierarchical=True), zero(1), f"{OF_SPARSE}.hierarchical"),
    (sparse("packed"), {}, f"{OF_SPARSE}.mode"),
    (sparse("allgather"), zero(2), f"{OF_SPARSE}.mode"),
    *(
        (sparse(**COMPRESSOR), {"fp16": {"enabled": True, **scale}}, "fp16.enabled")
        for scale in ({}, {"loss_scale": 0}, {"loss_scale": 128}, {"enabled": 1})
    ),
    *(
        (
            {"guard": {"nonfinite": "stop"}},
            {"torch_autocast": {"enabled": True, "dtype": dtype}},
            OF_GUARD,
        )
        for dtype in ("float16", "half")
    ),
]


@pytest.mark.parametrize(("section", "config", "key"), REFUSED)
def test_what_does_not_go_together_is_refused_by_its_key(section, config, key):
    assert refusal(section, config).key == key


def test_split_stages_need_enough_ranks():
    assert refusal(SPLIT, {}, world_size=6).key == "wavemare.tensor_parallel.size"


@pytest.mark.parametrize(
    ("tensor", "size", "stages", "world_size"), [(4, 2, 1, 8), (2, 3, 1, 6), (2, 3, 2, 12)]
)
def test_experts_are_shared_by_whole_split_models(tensor, size, stages, world_size):
    def section(number):
        sizes = {"tensor_parallel": {"size": tensor}, "expert_parallel": {"size": number}}
        return {**sizes, "pipeline": {"stages": stages}}

    error = refusal(section(size), {}, world_size=world_size)
    assert error.key == "wavemare.expert_parallel.size"
    offered = [int(found) for found in re.findall(r"\d+", error.remedy)]
    assert offered
    for other in offered:
        check(section(other), {}, world_size=world_size)


AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "float16"}}


@pytest.mark.parametrize(
    ("section", "config", "key"),
    [
        ({"pipeline": {"stages": 2}}, {}, "torch_autocast.dtype"),
        ({"pipeline": {"stages": 2, "schedule": "zbv"}}, zero(1), "torch_autocast.dtype"),
        ({"tensor_parallel": {"size": 2}}, {}, "torch_autocast.dtype"),
        ({"expert_parallel": {"size": 2}}, {}, "torch_autocast.dtype"),
        ({"pipeline": {"stages": 2, "schedule": "pipemare"}}, {}, "torch_autocast.enabled"),
        ({"tensor_parallel": {"size": 2}}, zero(1), None),
        ({"wavelet": {"mode": "sync"}}, {}, None),
        ({}, {}, None),
    ],
)
def test_a_loss_scaler_of_torch_sees_the_weights_of_one_rank(section, config, key):
    if key is None:
        check(section, {**config, **AUTOCAST})
        return
    error = refusal(section, {**config, **AUTOCAST})
    assert error.key == key
    if key == "torch_autocast.dtype":  # what the remedy names goes with it
        (named,) = re.findall('"(.+)"', error.remedy)
        check(section, {**config, "torch_autocast": {"enabled": True, "dtype": named}})


@pytest.mark.parametrize("half", [FP16, BF16, AUTOCAST])
def test_experts_of_deepspeed_are_divided_by_more_than_one_rank(half):
    experts = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
    key = refusal({}, {**half, **experts}).key
    assert key.split(".")[0] in half
    for alone in ({"autoep_size": 1}, {}):  # every rank has all of them
        check({}, {**half, "expert_parallel": {"enabled": True, **alone}})


@pytest.mark.parametrize("name", ["gradient_predivide_factor", "prescale_gradients"])
@pytest.mark.parametrize("section", [{}, {"wavelet": {"mode": "sync"}}, SPARSE])
def test_gradients_are_divided_before_the_sum_only_where_deepspeed_can(section, name):
    value = {"gradient_predivide_factor": 2.0, "prescale_gradients": True}[name]
    assert refusal(section, {name: value, **zero(2)}).key == name
    for stage in map(int, re.findall(r"\d", refusal(section, {name: value, **zero(2)}).remedy)):
        check(section, {name: value, **zero(stage)})
    check(section, {name: value, "gradient_allreduce_op": "SUM", **zero(2)})
    check(section, {name: value, **zero(2, reduce_scatter=False)})
    if section is not SPARSE:
        assert refusal(section, {name: value, **zero(3)}).key == name


@pytest.mark.parametrize(
    ("section", "config"),
    [
        *((sparse("off"), config) for config, _ in WITHOUT_SUMS),
        (
            {"guard": {"nonfinite": "stop"}},
            {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        ),
        ({"guard": {"nonfinite": "off"}}, FP16),
        ({"guard": {}}, FP16),
        ({"guard": {"nonfinite": "skip", "max_skips": 1}}, {}),
        ({"pipeline": {"schedule": "pipemare", "stages": 2}}, {}),
        ({"pipeline": {"schedule": "zb-h1", "stages": 2}}, {**BF16, **zero(1)}),
        *[({"wavelet": {"mode": mode}}, zero(n)) for mode in ("auto", "sync") for n in range(4)],
        (SPLIT, {}),
        (SPLIT, BF16),
        (SPLIT, zero(1)),
        ({"balance": {"shares": [1, 1]}, "pipeline": {"stages": 2}}, zero(1)),
        ({"balance": {"shares": [1, 1, 1, 1], "mean": "tokens"}}, zero(3)),
        ({"balance": {}, "wavelet": {"mode": "sync"}}, {}),
        ({**sparse(), "guard": {"nonfinite": "stop"}}, {}),
        (sparse(), zero(2, offload_optimizer={"device": "none"})),
        (sparse(), {"zero_optimization": True}),
        (sparse(), {"sequence_parallel_size": 1, "tensor_parallel": {"autotp_size": 1}}),
        (sparse(), FP16),
        (sparse(), {"expert_parallel": {"enabled": False}}),
        (sparse(**COMPRESSOR), {}),
    ],
)
def test_what_goes_together_passes(section, config):
    check(section, config)


def test_what_ranks_that_share_sequences_do_not_go_with():
    check_sequence_parallel(zero(3), WavemareConfig.of({}), 1)
    sizes = dict.fromkeys(("pipeline.stages", "tensor_parallel.size", "expert_parallel.size"), 2)
    others = {"balance.mean": "tokens", "wavelet.mode": "sync", "sparse_collective.mode": "auto"}
    for key, value in (sizes | others).items():
        section, name = key.split(".")
        ours = WavemareConfig.of({"wavemare": {section: {name: value}}})
        for stage, refused in ((1, "zero_optimization.stage"), (3, f"wavemare.{key}")):
            with pytest.raises(ConfigError) as caught:
                check_sequence_parallel(zero(stage), ours, ours.pipeline.stages)
            assert refused.startswith(caught.value.key)


def test_ranks_of_a_model_are_its_stages_times_their_parts():
    assert check(SPLIT, {}).model_ranks == 4
    assert check(SPLIT, {}, world_size=8).model_ranks == 4


REMOVED = [
    ("pipeline", {"overlap_forward_backward": True}, "overlap_forward_backward"),
    ("pipeline", {"schedule": "auto", "memory_limit": "4GB"}, "memory_limit"),
    ("wavelet", {"mode": "model_parallel"}, "mode"),
    ("wavelet", {"mode": "sync", "compile": True}, "compile"),
    ("wavelet", {"compile": "yes"}, "compile"),
    ("sparse_collective", {"mode": "streaming"}, "mode"),
    ("sparse_collective", {"mode": "auto", "known_rows": "check"}, "known_rows"),
    (
        "sparse_collective",
        {"mode": "auto", "compressor": {"type": "block_topk_ratio"}},
        "compressor.type",
    ),
]


@pytest.mark.parametrize(("section", "values", "key"), REMOVED)
def test_what_was_removed_is_refused_by_its_key(section, values, key):
    error = refusal({section: values}, {})
    given = values
    for name in key.split("."):
        given = given[name]
    assert (error.key, error.value) == (f"wavemare.{section}.{key}", given)


def test_removed_keys_that_change_nothing_are_passed_over():
    section = {
        "pipeline": {"stages": 2, "overlap_forward_backward": False},
        "wavelet": {"mode": "off", "compile": False},
    }
    given = {name: dict(values) for name, values in section.items()}
    ours = check(section, {})
    assert ours == check({"pipeline": {"stages": 2}}, {})
    assert section == given  # the caller's stays as it is
    assert check({"pipeline": {"schedule": "auto", "memory_limit": "0.5x"}}, {})
