# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

import pytest
import torch

from wavemare.comm.config import LOOSE_MODES, SparseCollectiveConfig
from wavemare.comm.executors import EXECUTOR_TYPES
from wavemare.engine.config import WavemareConfig, check_config
from wavemare.engine.sparse_attach import attach_sparse_gradients
from wavemare.errors import ConfigError

COMPRESSOR = {"compressor": {"type": "block_topk"}}

REFUSED = {
    "zero_optimization.stage": {"zero_optimization": {"stage": 3}},
    "zero_optimization.offload_optimizer": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    },
    "zero_optimization.zenflow": {
        "zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}
    },
    "tensor_parallel.autotp_size": {"tensor_parallel": {"autotp_size": 2}},
    "sequence_parallel_size": {"sequence_parallel_size": 2},
    "expert_parallel.enabled": {"expert_parallel": {"enabled": True}},
    "compile.deepcompile": {"compile": {"deepcompile": True}},
    "hybrid_engine.enabled": {"hybrid_engine": {"enabled": True}},
}


def sections(mode="pushpull", **others):
    return {"wavemare": {"sparse_collective": {"mode": mode, **others}}}


@pytest.mark.parametrize("key", REFUSED)
def test_what_it_cannot_go_with_is_refused_by_name(key):
    with pytest.raises(ConfigError) as caught:
        check_config({**REFUSED[key], **sections()}, world_size=2)
    assert caught.value.key == key
    check_config({**REFUSED[key], **sections("off")}, world_size=2)


OURS = {
    "compressor": ({"mode": "off", **COMPRESSOR}, {}, "it has no effect"),
    "block": ({"block": 64}, {}, "mode is 'off'"),
    "hierarchical": (
        {"mode": "auto", "hierarchical": True},
        {"zero_optimization": {"stage": 1}},
        "no effect on the reduce-scatters of ZeRO 1",
    ),
    "mode": ({"mode": "sparcml"}, {}, "does not sum in the order of the ranks"),
}


@pytest.mark.parametrize("key", OURS)
def test_what_has_no_effect_or_contradicts_itself_is_named(key):
    section, rest, reason = OURS[key]
    with pytest.raises(ConfigError, match=reason) as caught:
        check_config({**rest, "wavemare": {"sparse_collective": section}}, world_size=2)
    assert caught.value.key == f"wavemare.sparse_collective.{key}"


def test_the_loose_modes_are_those_of_the_executors():
    loose = {name for name, kind in EXECUTOR_TYPES.items() if not kind.deterministic}
    assert loose == LOOSE_MODES


def test_a_skipped_step_would_lose_what_a_compressor_has_sent():
    ours = sections(**COMPRESSOR)["wavemare"]
    with pytest.raises(ConfigError) as caught:
        check_config({"wavemare": {**ours, "guard": {"nonfinite": "skip"}}}, world_size=2)
    assert caught.value.key == "wavemare.guard.nonfinite"
    check_config({"wavemare": {**ours, "guard": {"nonfinite": "stop"}}}, world_size=2)


@pytest.mark.parametrize(
    "allowed",
    [
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}},
        {"zero_optimization": True},
        {"sequence_parallel_size": 1, "tensor_parallel": {"autotp_size": 1}},
        {"fp16": {"enabled": True}},
        {"expert_parallel": {"enabled": False}},
    ],
)
def test_what_changes_nothing_about_reductions_is_let_through(allowed):
    check_config({**allowed, **sections()}, world_size=2)


@pytest.mark.parametrize("scale", [{}, {"loss_scale": 0}, {"loss_scale": 128}, {"enabled": 1}])
def test_residuals_cannot_go_with_steps_that_overflow(scale):
    config = {"fp16": {"enabled": True, **scale}}
    with pytest.raises(ConfigError) as caught:
        check_config({**config, **sections(**COMPRESSOR)}, world_size=2)
    assert caught.value.key == "fp16.enabled"


def test_the_sections_have_the_defaults_of_no_change():
    ours = WavemareConfig.of({})
    assert ours.sparse_collective.mode == "off"
    assert ours.watchdog.timeout_s == 300


@pytest.mark.parametrize("seconds", [0, -1, float("inf")])
def test_a_time_limit_is_a_positive_number(seconds):
    with pytest.raises(ConfigError) as caught:
        WavemareConfig.of({"wavemare": {"watchdog": {"timeout_s": seconds}}})
    assert caught.value.key == "wavemare.watchdog.timeout_s"


def engine(module=None, **changes):
    values = {"zero": 0, "fp16": False, "bf16": False, "experts": False, "sequence": 1, **changes}
    return SimpleNamespace(
        module=module or torch.nn.Linear(2, 2),
        has_moe_layers=values["experts"],
        sequence_parallel_size=values["sequence"],
        zero_optimization_stage=lambda: values["zero"],
        fp16_enabled=lambda: values["fp16"],
        bfloat16_enabled=lambda: values["bf16"],
    )


def refusal(engine):
    with pytest.raises(ConfigError) as caught:
        attach_sparse_gradients(engine, SparseCollectiveConfig(mode="pushpull"), 1.0)
    return caught.value


def test_experts_and_shared_samples_are_refused():
    assert "experts" in refusal(engine(experts=True)).reason
    refused = refusal(engine(sequence=2))
    assert "sequence" in refused.reason
    assert (refused.key, refused.value) == ("wavemare.sparse_collective.mode", "pushpull")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"zero": 1}, "zero_optimization.stage"),
        ({"zero": 2}, "zero_optimization.stage"),
        ({"fp16": True}, "fp16.enabled"),
        ({"bf16": True}, "bf16.enabled"),
    ],
)
def test_sparse_gradients_are_refused_where_the_optimizer_flattens_them(changes, key):
    module = torch.nn.Sequential(torch.nn.Embedding(3, 2, sparse=True))
    refused = refusal(engine(module, **changes))
    assert refused.key == key
    assert "0.weight" in refused.reason
