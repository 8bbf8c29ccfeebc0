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


@pytest.mark.parametrize(
    ("section", "config", "key"),
    [
        ({}, zero(3), "zero_optimization.stage"),
        ({}, BF16, "bf16.enabled"),
        ({"tensor_parallel": {"size": 4}}, {}, "wavemare.expert_parallel.size"),
        ({"parallel": {"split": 2}}, {}, "wavemare.parallel"),
        ({"balance": {"mean": "tokens"}}, {}, "wavemare.balance.mean"),
        (
            {"sparse_collective": {"mode": "auto", **COMPRESSOR}},
            {},
            "wavemare.sparse_collective.compressor",
        ),
        ({}, {"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size"),
        ({}, {"sequence_parallel_size": 2}, "sequence_parallel_size"),
        (
            {},
            zero(1, offload_optimizer={"device": "cpu"}),
            "zero_optimization.offload_optimizer.device",
        ),
        ({"expert_parallel": {"size": 3}}, {}, "wavemare.expert_parallel.size"),
    ],
)
def test_what_is_not_tested_with_divided_experts(section, config, key):
    error = refusal({"expert_parallel": {"size": 2}, **section}, config)
    assert error.key == key
    assert "size" in error.remedy or "stage" in error.remedy


@pytest.mark.parametrize(
    ("tensor", "experts", "stages", "world_size"), [(4, 2, 1, 8), (2, 3, 1, 6), (2, 3, 2, 12)]
)
def test_experts_are_shared_by_whole_split_models(tensor, experts, stages, world_size):
    def section(size):
        sizes = {"tensor_parallel": {"size": tensor}, "expert_parallel": {"size": size}}
        return {**sizes, "pipeline": {"stages": stages}}

    error = refusal(section(experts), {}, world_size=world_size)
    assert error.key == "wavemare.expert_parallel.size"
    offered = [int(size) for size in re.findall(r"\d+", error.remedy)]
    assert offered
    for size in offered:
        check(section(size), {}, world_size=world_size)


@pytest.mark.parametrize("seconds", [0, float("inf")])
def test_a_time_limit_is_a_positive_number(seconds):
    error = refusal({"watchdog": {"timeout_s": seconds}}, {})
    assert error.key == "wavemare.watchdog.timeout_s"


@pytest.mark.parametrize(
    ("guard", "config", "key"),
    [
        ({"nonfinite": "skip"}, FP16, "nonfinite"),
        ({"nonfinite": "maybe"}, {}, "nonfinite"),
        ({"max_skips": 3}, {}, "max_skips"),
        ({"nonfinite": "skip", "max_skips": 0}, {}, "max_skips"),
        ({"checksum": True}, {}, "checksum"),
    ],
)
def test_guards_that_would_have_no_effect(guard, config, key):
    assert refusal({"guard": guard}, config).key == f"wavemare.guard.{key}"


@pytest.mark.parametrize(
    ("section", "config", "key", "reason"),
    [
        ({"mode": "snyc"}, {}, "wavemare.wavelet.mode", "Did you mean 'sync'?"),
        ({"mod": "sync"}, {}, "wavemare.wavelet.mod", "does not exist"),
        (
            {"mode": "sync"},
            {"flops_profiler": {"enabled": True}},
            "flops_profiler.enabled",
            "whole forward passes",
        ),
    ],
)
def test_what_waves_do_not_go_with(section, config, key, reason):
    error = refusal({"wavelet": section}, config)
    assert error.key == key
    assert reason in str(error)


@pytest.mark.parametrize(
    ("config", "key", "reason"),
    [
        ({"pipeline": {"pipe_partitioned": True}}, "pipeline.pipe_partitioned", "whole tensors"),
        ({"pipeline": {"grad_partitioned": True}}, "pipeline.grad_partitioned", "whole tensors"),
        (FP16, "fp16.enabled", "one rank alone"),
        ({"flops_profiler": {"enabled": True}}, "flops_profiler.enabled", "never shows"),
        (zero(2), "zero_optimization.stage", "pipeline"),
    ],
)
def test_what_split_stages_do_not_go_with(config, key, reason):
    error = refusal(SPLIT, config)
    assert error.key == key
    assert reason in str(error)


@pytest.mark.parametrize(
    ("pipeline", "config", "key"),
    [
        ({}, zero(2), "zero_optimization.stage"),
        ({}, {"expert_parallel": {"enabled": True}}, "expert_parallel.enabled"),
        ({}, {"compile": {"deepcompile": True}}, "compile.deepcompile"),
        ({"pipemare": {}}, {}, "wavemare.pipeline.pipemare"),
        ({"chunks": 2}, {}, "wavemare.pipeline.chunks"),
        ({"schedule": "zbv", "memory_limit": "1x"}, {}, "wavemare.pipeline.memory_limit"),
        ({"schedule": "auto", "memory_limit": "4 apples"}, {}, "wavemare.pipeline.memory_limit"),
    ],
)
def test_what_schedules_do_not_go_with(pipeline, config, key):
    planned = {"schedule": "zb-h1", "stages": 2, **pipeline}
    assert refusal({"pipeline": planned}, config).key == key


def test_split_stages_need_enough_ranks():
    error = refusal(SPLIT, {}, world_size=6)
    assert error.key == "wavemare.tensor_parallel.size"
    assert "times the 2 pipeline stages" in str(error)


def test_what_balance_does_not_go_with():
    error = refusal({"balance": {"shares": [1, 1]}, "wavelet": {"mode": "sync"}}, {})
    assert error.key == "wavemare.balance.shares"
    assert "alike on all ranks" in str(error)
    assert "shares" in str(refusal({"balance": {"share": [1]}}, {}))
    curriculum = {"data_sampling": {"curriculum_learning": {"enabled": True}}}
    error = refusal({"balance": {"shares": [1, 1]}}, {"data_efficiency": curriculum})
    assert "it makes equal shares" in error.reason


WITHOUT_SUMS = {
    "zero_optimization.stage": zero(3),
    "zero_optimization.offload_optimizer.device": zero(2, offload_optimizer={"device": "cpu"}),
    "zero_optimization.cpu_offload": zero(2, cpu_offload=True),
    "zero_optimization.zenflow": zero(2, zenflow={"topk_ratio": 0.1}),
    "tensor_parallel.autotp_size": {"tensor_parallel": {"autotp_size": 2}},
    "sequence_parallel_size": {"sequence_parallel_size": 2},
    "expert_parallel.enabled": {"expert_parallel": {"enabled": True}},
    "compile.deepcompile": {"compile": {"deepcompile": True}},
    "hybrid_engine.enabled": {"hybrid_engine": {"enabled": True}},
}


@pytest.mark.parametrize("key", WITHOUT_SUMS)
def test_the_sparse_collective_needs_sums_of_gradients(key):
    config = WITHOUT_SUMS[key]
    assert refusal({"sparse_collective": {"mode": "pushpull"}}, config).key == key
    check({"sparse_collective": {"mode": "off"}}, config)


@pytest.mark.parametrize(
    ("section", "config", "key", "reason"),
    [
        ({"mode": "off", **COMPRESSOR}, {}, "compressor", "it has no effect"),
        ({"block": 64}, {}, "block", "mode is 'off'"),
        (
            {"mode": "auto", "hierarchical": True},
            zero(1),
            "hierarchical",
            "no effect on the reduce-scatters of ZeRO 1",
        ),
        ({"mode": "packed"}, {}, "mode", "does not sum in the order of the ranks"),
        ({"mode": "allgather"}, zero(2), "mode", "reduce-scatters, which ZeRO 2"),
    ],
)
def test_sparse_settings_that_contradict_each_other(section, config, key, reason):
    error = refusal({"sparse_collective": section}, config)
    assert error.key == f"wavemare.sparse_collective.{key}"
    assert reason in str(error)


@pytest.mark.parametrize("dtype", ["float16", "half", "bfloat16"])
def test_a_guard_does_not_go_with_a_loss_scaler(dtype):
    guard, autocast = {"guard": {"nonfinite": "stop"}}, {"enabled": True, "dtype": dtype}
    assert refusal(guard, FP16).key == "wavemare.guard.nonfinite"
    if dtype == "bfloat16":
        check(guard, {"torch_autocast": autocast})
    else:
        assert refusal(guard, {"torch_autocast": autocast}).key == "wavemare.guard.nonfinite"


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


def test_a_skipped_step_would_lose_what_a_compressor_has_sent():
    sparse = {"sparse_collective": {"mode": "pushpull", **COMPRESSOR}}
    error = refusal({**sparse, "guard": {"nonfinite": "skip"}}, {})
    assert error.key == "wavemare.guard.nonfinite"


@pytest.mark.parametrize("scale", [{}, {"loss_scale": 0}, {"loss_scale": 128}, {"enabled": 1}])
def test_residuals_cannot_go_with_steps_that_overflow(scale):
    sparse = {"sparse_collective": {"mode": "pushpull", **COMPRESSOR}}
    assert refusal(sparse, {"fp16": {"enabled": True, **scale}}).key == "fp16.enabled"


@pytest.mark.parametrize(
    ("section", "config"),
    [
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
        ({**SPARSE, "guard": {"nonfinite": "stop"}}, {}),
        (SPARSE, zero(2, offload_optimizer={"device": "none"})),
        (SPARSE, {"zero_optimization": True}),
        (SPARSE, {"sequence_parallel_size": 1, "tensor_parallel": {"autotp_size": 1}}),
        (SPARSE, FP16),
        (SPARSE, {"expert_parallel": {"enabled": False}}),
        ({"sparse_collective": {"mode": "pushpull", **COMPRESSOR}}, {}),
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
]


@pytest.mark.parametrize(("section", "values", "key"), REMOVED)
def test_what_was_removed_is_refused_by_its_key(section, values, key):
    error = refusal({section: values}, {})
    assert (error.key, error.value) == (f"wavemare.{section}.{key}", values[key])


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
