# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the JSON configuration: the file, DeepSpeed's sections, ours, and the batch sizes."""

import math

import pytest
import torch

import wavemare
from wavemare.engine.config.resolve import (
    check_batch_sizes,
    check_config,
    load_config,
    misplaced_keys,
    refuse_misspelt_section,
)
from wavemare.errors import ConfigError

FILES = [
    "",
    '{"a": {"b": 1}',
    '{"lr": True, "b": {}}',
    '{"lr": NaN}',
    "[1, 2]",
    pytest.param("[" * 50_000, id="50,000 brackets"),
    pytest.param('{"a": ' + "1" * 5000 + "}", id="5,000 digits"),
    '{"a": 1e999}',
    '{"a": 1}'.encode("utf-16"),
]


@pytest.mark.parametrize("content", FILES)
def test_a_file_that_is_no_configuration(refused, write, content):
    file = write("config.json", content)
    refused(lambda: load_config(file), ConfigError, "--deepspeed_config")


NAMES = [
    "nosuch.json",
    ".",
    pytest.param("x" * 5000, id="a long name"),
    pytest.param("a\0b", id="a zero byte in the name"),
    "",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_names_no_configuration(refused, name):
    refused(lambda: load_config(name), ConfigError, "--deepspeed_config")


KEYS = [
    ('{"a": 1, "a": 2}', "a"),
    ('{"fp16": "enabled: true"}', "fp16"),
    pytest.param(
        '{"fp16": {\n"enabled": True,\n"loss_scale": 0}}',
        "fp16.enabled",
        id="True of Python on a line of its own",
    ),
    ('{"optimizer": null}', "optimizer"),
    ('{"scheduler": {"params": 3}}', "scheduler.params"),
]


@pytest.mark.parametrize(("content", "key"), KEYS)
def test_a_key_of_the_file(refused, write, content, key):
    refused(lambda: load_config(write("config.json", content)), ConfigError, key)


VALUES = [
    ("zero_optimization.stage", "2"),
    ("zero_optimization.stage", 4),
    ("zero_optimization", 2),
    ("fp16.enabled", "false"),
    ("pipeline", "auto"),
    ("optimizer.type", ["AdamW"]),
    ("gradient_clipping", -1),
    ("gradient_clipping", math.inf),
    ("wavemare.pipelin", {}),
    ("wavemare.pipeline.stagse", 2),
    ("wavemare", [1]),
    ("wavemare.pipeline.stages", "2"),
    ("wavemare.pipeline.partition", "paramters"),
    ("wavemare.pipeline.partition[1]", [0, "5"]),
    ("wavemare.pipeline.inputs", "input_ids"),
    ("wavemare.tensor_parallel.size", 3),
    ("wavemare.parallel.stages[0][1]", [["h.0", 3]]),
    ("wavemare.parallel.replica", "all"),
    ("wavemare.wavelet.mode", "synch"),
    ("wavemare.wavelet.compile", True),
    ("wavemare.wavelet.mode", "model_parallel"),
    ("wavemare.pipeline.overlap_forward_backward", True),
    ("wavemare.pipeline.memory_limit", "4GB"),
    ("wavemare.watchdog.timeout_s", -1),
]


@pytest.mark.parametrize(("key", "value"), VALUES)
def test_a_value(refused, key, value):
    config = value
    for name in reversed(key.partition("[")[0].split(".")):
        config = {name: config}
    refused(lambda: check_config(config, world_size=2), ConfigError, key)


PIPEMARE = {"wavemare.pipeline.schedule": "pipemare", "wavemare.pipeline.stages": 2}
SPARSE = {"wavemare.sparse_collective.mode": "auto"}
COMPRESSOR = "wavemare.sparse_collective.compressor"
ADAMW = {"optimizer.type": "AdamW"}

# The first key is the one that is blamed.
SECTIONS = [
    {"fp16.enabled": True, "bf16.enabled": True},
    {"optimizer.params.lr": "1e-3", **ADAMW},
    {"optimizer.params.lr": -1e-3, **ADAMW},
    {"wavemare.pipeline.pipemare.lr_rescheduling.anneal": 3, **PIPEMARE},
    {"wavemare.pipeline.pipemare.discrepancy_correction.decay": 1.0, **PIPEMARE},
    {"wavemare.pipeline.stages": 2, "wavemare.wavelet.mode": "sync"},
    {f"{COMPRESSOR}.ratio": 0, **SPARSE},
    {f"{COMPRESSOR}.threshold": 1.0, **SPARSE},
]


@pytest.mark.parametrize("values", SECTIONS)
def test_values_that_do_not_fit_each_other(refused, values):
    config = {}
    for key, value in values.items():
        *sections, last = key.split(".")
        section = config
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = value
    refused(lambda: check_config(config, world_size=2), ConfigError, next(iter(values)))


def test_keys_are_texts_and_none_is_missing(refused):
    number, split = {3: 4}, {"wavemare": {"parallel": {"split": {"size": 2}}}}
    act = lambda: check_config(number, world_size=2)  # noqa: E731
    refused(act, ConfigError, "3")
    act = lambda: check_config(split, world_size=2)  # noqa: E731
    refused(act, ConfigError, "wavemare.parallel.split.modules")


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"gradient_clipping": "auto"}, "gradient_clipping"),
        ({"bf16": {"enabled": "auto"}}, "bf16.enabled"),
        (
            {"scheduler": {"params": {"total_num_steps": "auto"}}},
            "scheduler.params.total_num_steps",
        ),
    ],
)
def test_what_the_trainer_would_fill_in(refused, config, key):
    act = lambda: wavemare.initialize(model=torch.nn.Linear(1, 1), config=config)  # noqa: E731
    refused(act, ConfigError, key)


TRAIN, MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
BATCHES = [
    ({}, TRAIN),
    ({TRAIN: "32"}, TRAIN),
    ({MICRO: 0}, MICRO),
    ({MICRO: 2, STEPS: -4}, STEPS),
    ({TRAIN: 30, MICRO: 4, STEPS: 4}, TRAIN),
    ({TRAIN: 1}, TRAIN),
]


@pytest.mark.parametrize(("config", "key"), BATCHES)
def test_batch_sizes(refused, config, key):
    refused(lambda: check_batch_sizes(config, data_world_size=2), ConfigError, key)


@pytest.mark.parametrize("key", ["wavemre", "wavmare", "Wavemare", "WAVEMARE", "wave_mare"])
def test_a_misspelt_section(refused, key):
    section = {"pipeline": {"stages": 2}}
    refused(lambda: refuse_misspelt_section({key: section}), ConfigError, key)


def test_what_is_no_section_of_ours():
    refuse_misspelt_section({"wavemare": {}, "wave": {}, "weights": 1, "zero_optimization": {}})


@pytest.mark.parametrize("config", [{"train_batch_sise": 8}, {"optimizer": {"lr": 1}}])
def test_what_deepspeed_ignores_is_warned_of(config):
    (warning,) = misplaced_keys(config)
    assert next(iter(config)) in warning
