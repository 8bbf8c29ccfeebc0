# SPDX-License-Identifier: Apache-2.0
"""The configuration is checked before anything is built, and each message says what to do."""

import base64
import json
from types import SimpleNamespace

import pytest
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
from hypothesis import given
from hypothesis import strategies as st

from support.refusals import refuses
from wavemare.engine.config.resolve import (
    WavemareConfig,
    check_batch_sizes,
    check_config,
    load_config,
)
from wavemare.engine.initialize import read_config
from wavemare.errors import ConfigError


def error_of(function, *args, **kwargs):
    """Return the error, which must say all that its reader needs."""
    with pytest.raises(ConfigError) as caught:
        function(*args, **kwargs)
    error = caught.value
    for part in (error.key, error.reason, error.remedy):
        assert part
        assert part in str(error)
    assert not error.reason.endswith(".")
    assert not error.remedy.endswith(".")
    return error


def nested(key, value):
    """Return our section with a value under a key of dots."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return {"wavemare": value}


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("pipeline.input", "'inputs'"),
        ("pipeline.pipemare.warmup", "'warmup_steps'"),
        ("pipeline.pipemare.lr_rescheduling.xyz", "Valid names are 'anneal_steps', 'enabled'"),
    ],
)
def test_an_unknown_key_names_the_nearest_valid_one_or_all(key, hint):
    error = error_of(WavemareConfig.of, nested(key, 1))
    assert (error.key, error.value) == (f"wavemare.{key}", 1)
    assert hint in error.remedy


def pipemare(pipemare=None, config=None, **pipeline):
    """A configuration of the asynchronous schedule, with additions to its sections."""
    pipeline = {"schedule": "pipemare", "stages": 2, **pipeline}
    if pipemare is not None:
        pipeline["pipemare"] = pipemare
    return {**(config or {}), "wavemare": {"pipeline": pipeline}}


def refusal(config):
    return error_of(check_config, config, world_size=2)


def test_the_asynchronous_schedule_has_defaults_that_work():
    pipeline = check_config(pipemare(), world_size=4).pipeline
    assert pipeline.schedule == "pipemare"
    assert pipeline.pipemare.discrepancy_correction.mode == "auto"
    assert not pipeline.pipemare.lr_rescheduling.enabled
    assert pipeline.unties
    assert not check_config({}, world_size=4).pipeline.unties


def test_tied_weights_cannot_stay_tied():
    error = refusal(pipemare(untie=False))
    assert (error.key, error.value) == ("wavemare.pipeline.untie", False)
    assert check_config(pipemare(untie=True), world_size=2).pipeline.unties


@pytest.mark.parametrize("name", ["fp16", "torch_autocast"])
def test_half_precision_that_asynchronous_stages_cannot_hold_is_refused_by_name(name):
    error = refusal(pipemare(config={name: {"enabled": True}}))
    assert (error.key, error.value) == (f"{name}.enabled", True)
    assert '"bf16"' in str(error)
    assert "wavemare.pipeline.schedule" in error.remedy
    synchronous = pipemare(config={name: {"enabled": True}}, schedule="1f1b")
    check_config(synchronous, world_size=2)
    check_config(
        pipemare(config={name: {"enabled": False}, "bf16": {"enabled": True}}), world_size=2
    )


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 2), ("pipemare", 1), ("pipemare", 2)])
@pytest.mark.parametrize("stage", [2, 3])
def test_pipelines_refuse_zero_2_and_3_and_name_what_works(schedule, stages, stage):
    zero = {"zero_optimization": {"stage": stage}}
    error = refusal(pipemare(config=zero, schedule=schedule, stages=stages))
    assert (error.key, error.value) == ("zero_optimization.stage", stage)
    assert "0 or 1" in error.remedy


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_any_two_batch_sizes_give_the_third(micro, accumulation, ranks):
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole = dict(zip(keys, (micro * accumulation * ranks, micro, accumulation), strict=True))
    for left_out in keys:
        given_two = {key: value for key, value in whole.items() if key != left_out}
        assert check_batch_sizes(given_two, data_world_size=ranks) == whole
        assert check_batch_sizes({**given_two, left_out: "auto"}, data_world_size=ranks) == whole
    assert check_batch_sizes(whole, data_world_size=ranks) == whole


@pytest.mark.parametrize(
    ("given", "stages", "sizes"),
    [
        ({"train_micro_batch_size_per_gpu": 2}, 4, (12, 2, 3)),
        ({"train_micro_batch_size_per_gpu": 2}, 1, (4, 2, 1)),
        ({"train_batch_size": 32}, 4, (32, 4, 4)),
        ({"train_batch_size": 32}, 9, (32, 2, 8)),
        ({"train_batch_size": 8}, 9, (8, 1, 4)),  # the batch has no more samples
        ({"train_batch_size": 30}, 4, (30, 5, 3)),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 2}, 4, (32, 8, 2)),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}, 4, (8, 2, 2)),
    ],
)
def test_asynchronous_pipelines_bound_their_staleness_where_it_is_left_open(given, stages, sizes):
    section = {"wavemare": {"pipeline": {"schedule": "pipemare", "stages": stages}}}
    found = check_batch_sizes({**given, **section}, data_world_size=2)
    assert tuple(found.values()) == sizes
    other = {"wavemare": {"pipeline": {"schedule": "pipemare", "stages": 1}}}
    assert check_batch_sizes({**given, **other}, data_world_size=2, stages=stages) == found


def test_a_loaded_mapping_is_a_copy_and_comments_are_allowed(tmp_path):
    values = {"optimizer": {"params": {"lr": 1.0}}}
    load_config(values)["optimizer"]["params"]["lr"] = 2.0
    assert values["optimizer"]["params"]["lr"] == 1.0
    path = tmp_path / "commented.json"
    path.write_text('{\n // as DeepSpeed allows\n "train_batch_size": 8\n}')
    assert load_config(path) == {"train_batch_size": 8}
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # a byte order mark
    assert load_config(path) == {"train_batch_size": 8}
    path.write_text(json.dumps(values))
    assert load_config(str(path)) == values


def test_base64_is_read_as_deepspeed_reads_it():
    text = base64.urlsafe_b64encode(b'{"train_batch_size": 8}').decode()
    assert load_config(text) == {"train_batch_size": 8}
    assert load_ds_config(text) == {"train_batch_size": 8}


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"zero_optimization": {"stage": "1"}}, {"zero_optimization": {"stage": 1}}),
        ({"train_batch_size": 2.0}, {"train_batch_size": 2}),
        ({"optimizer": {"type": "Adam", "params": None}}, {"optimizer": {"type": "Adam"}}),
    ],
)
def test_what_deepspeed_takes_in_two_spellings_is_taken(given, read):
    assert repr(load_config(given)) == repr(read)  # 2 and 2.0 are equal


@pytest.mark.parametrize("name", ["deepspeed_config", "deepscale_config"])
def test_the_configuration_is_found_in_args_by_both_names(name):
    assert read_config(SimpleNamespace(**{name: {"train_batch_size": 2}})) == {
        "train_batch_size": 2
    }
    with refuses(ConfigError, "config", "{}"):
        read_config(SimpleNamespace(**{name: {}}), {})
