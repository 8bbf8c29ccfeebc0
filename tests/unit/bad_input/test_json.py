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
    ("", "the file is empty", "Write {...}"),
    ('{"a": {"b": 1}', "line 1, column 15", "Fix"),
    ('{"lr": True, "b": {}}', "line 1, column 8", "Fix"),
    ('{"lr": NaN}', "NaN is no number of JSON", "Fix"),
    ("[1, 2]", "list rather than an object", "Write {...}"),
    pytest.param("[" * 50_000, "nested too deeply", "Fix", id="50,000 brackets"),
    pytest.param('{"a": ' + "1" * 5000 + "}", "too many digits", "Fix", id="5,000 digits"),
    ('{"a": 1e999}', "a number in it is too large", "Fix"),
    ('{"a": 1}'.encode("utf-16"), "this is not text", "Name"),
]


@pytest.mark.parametrize(("content", "reason", "remedy"), FILES)
def test_a_file_that_is_no_configuration(refused, write, content, reason, remedy):
    file = write("config.json", content)
    refused(lambda: load_config(file), ConfigError, "--deepspeed_config", str(file), reason, remedy)


NAMES = [
    ("nosuch.json", "No such file", "Name an existing"),
    (".", "Is a directory", "Name an existing"),
    pytest.param("x" * 5000, "File name too long", "Name an existing", id="a long name"),
    pytest.param("a\0b", "null byte", "Fix", id="a zero byte in the name"),
    ("", "neither the name of a file nor a mapping", "Name"),
]


@pytest.mark.parametrize(("name", "reason", "remedy"), NAMES)
def test_a_name_that_names_no_configuration(refused, name, reason, remedy):
    refused(lambda: load_config(name), ConfigError, "--deepspeed_config", reason, remedy)


KEYS = [
    ('{"a": 1, "a": 2}', "a", "appears twice"),
    ('{"fp16": "enabled: true"}', "fp16", "Write {...}"),
    pytest.param(
        '{"fp16": {\n"enabled": True,\n"loss_scale": 0}}',
        "fp16.enabled",
        "neither true nor false",
        id="True of Python on a line of its own",
    ),
    ('{"optimizer": null}', "optimizer", "or leave it out"),
    ('{"scheduler": {"params": 3}}', "scheduler.params", "not a mapping"),
]


@pytest.mark.parametrize(("content", "key", "said"), KEYS)
def test_a_key_of_the_file(refused, write, content, key, said):
    refused(lambda: load_config(write("config.json", content)), ConfigError, key, said)


VALUES = [
    ("zero_optimization.stage", "2", ["'2'", "string", "without quotes"]),
    ("zero_optimization.stage", 4, ["no such stage", "0, 1, 2 or 3"]),
    ("zero_optimization", 2, ["not a mapping"]),
    ("fp16.enabled", "false", ["'false'", "neither true nor false", "without quotes"]),
    ("pipeline", "auto", ["Write {...}"]),
    ("optimizer.type", ["AdamW"], ["in quotes"]),
    ("gradient_clipping", -1, ["-1"]),
    ("gradient_clipping", math.inf, ["no finite number"]),
    ("wavemare.pipelin", {}, ["'pipeline'?"]),
    ("wavemare.pipeline.stagse", 2, ["does not exist", "Did you mean 'stages'?"]),
    ("wavemare", [1], ["not a mapping", "{...}"]),
    ("wavemare.pipeline.stages", "2", ["'2'", "valid integer", "without quotes"]),
    ("wavemare.pipeline.partition", "paramters", ["no such", "Did you mean 'parameters'?"]),
    ("wavemare.pipeline.partition[1]", [0, "5"], ["'5'", "without quotes"]),
    ("wavemare.pipeline.inputs", "input_ids", ["a valid list", "Write [...]"]),
    ("wavemare.tensor_parallel.size", 3, ["(2) is not a multiple"]),
    ("wavemare.parallel.stages[0][1]", [["h.0", 3]], ["3", "in quotes"]),
    ("wavemare.parallel.replica", "all", ["'rest' or a valid integer"]),
    ("wavemare.wavelet.mode", "synch", ["Did you mean 'sync'?"]),
    ("wavemare.wavelet.compile", True, ["engine.compile()"]),
    ("wavemare.wavelet.mode", "model_parallel", ["stage", "3"]),
    ("wavemare.pipeline.overlap_forward_backward", True, ["removed", "one stage"]),
    ("wavemare.pipeline.memory_limit", "4GB", ["bytes", '"0.63x"']),
    ("wavemare.watchdog.timeout_s", -1, ["-1"]),
]


@pytest.mark.parametrize(("key", "value", "said"), VALUES)
def test_a_value(refused, key, value, said):
    config = value
    for name in reversed(key.partition("[")[0].split(".")):
        config = {name: config}
    refused(lambda: check_config(config, world_size=2), ConfigError, key, *said)


PIPEMARE = {"wavemare.pipeline.schedule": "pipemare", "wavemare.pipeline.stages": 2}
SPARSE = {"wavemare.sparse_collective.mode": "auto"}
COMPRESSOR = "wavemare.sparse_collective.compressor"
ADAMW = {"optimizer.type": "AdamW"}

# The first key is the one that is blamed.
SECTIONS = [
    ({"fp16.enabled": True, "bf16.enabled": True}, ["bf16 is enabled, too", "one of the two"]),
    (
        {"optimizer.params.lr": "1e-3", **ADAMW},
        ["'1e-3'", "no finite number", "without quotes"],
    ),
    ({"optimizer.params.lr": -1e-3, **ADAMW}, ["-0.001", "of at least 0"]),
    (
        {"wavemare.pipeline.pipemare.lr_rescheduling.anneal": 3, **PIPEMARE},
        ["Did you mean 'anneal_steps'?"],
    ),
    (
        {"wavemare.pipeline.pipemare.discrepancy_correction.decay": 1.0, **PIPEMARE},
        ["Give less than 1"],
    ),
    (
        {"wavemare.pipeline.stages": 2, "wavemare.wavelet.mode": "sync"},
        ["interleave their micro-batches already", "Leave it out, or wavemare.wavelet.mode"],
    ),
    ({f"{COMPRESSOR}.ratio": 0, **SPARSE}, ["Give more than 0"]),
    ({f"{COMPRESSOR}.threshold": 1.0, **SPARSE}, ["block_topk ignores it", "Leave it out"]),
]


@pytest.mark.parametrize(("values", "said"), SECTIONS)
def test_values_that_do_not_fit_each_other(refused, values, said):
    config = {}
    for key, value in values.items():
        *sections, last = key.split(".")
        section = config
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = value
    refused(lambda: check_config(config, world_size=2), ConfigError, next(iter(values)), *said)


def test_keys_are_texts_and_none_is_missing(refused):
    number, split = {3: 4}, {"wavemare": {"parallel": {"split": {"size": 2}}}}
    act = lambda: check_config(number, world_size=2)  # noqa: E731
    refused(act, ConfigError, "3", "no text", "Put it in quotes")
    act = lambda: check_config(split, world_size=2)  # noqa: E731
    refused(act, ConfigError, "wavemare.parallel.split.modules", "required", "Give it")


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
    refused(act, ConfigError, key, "'auto'", "Trainer")


TRAIN, MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
BATCHES = [
    ({}, TRAIN, ["no batch size is given", MICRO]),
    ({TRAIN: "32"}, TRAIN, ["'32'", "positive whole"]),
    ({MICRO: 0}, MICRO, ["Give one, 1 or more"]),
    ({MICRO: 2, STEPS: -4}, STEPS, ["-4"]),
    ({TRAIN: 30, MICRO: 4, STEPS: 4}, TRAIN, ["4 x 4 x 2 = 32", "Give 32"]),
    ({TRAIN: 1}, TRAIN, ["Give at least 2"]),
]


@pytest.mark.parametrize(("config", "key", "said"), BATCHES)
def test_batch_sizes(refused, config, key, said):
    refused(lambda: check_batch_sizes(config, data_world_size=2), ConfigError, key, *said)


def test_only_one_process_is_asked_for_its_launcher(refused):
    config, told = {TRAIN: 17, MICRO: 2}, "= 2 x 8 x 1 = 16"
    act = lambda: check_batch_sizes(config, data_world_size=1)  # noqa: E731
    launcher = "; this is one process, and deepspeed, torchrun or mpirun start more. Give 16"
    refused(act, ConfigError, TRAIN, told + launcher)
    config["wavemare"] = {"pipeline": {"stages": 2}}
    refused(act, ConfigError, TRAIN, f"{told}. Give 16")


@pytest.mark.parametrize("key", ["wavemre", "wavmare", "Wavemare", "WAVEMARE", "wave_mare"])
def test_a_misspelt_section(refused, key):
    section = {"pipeline": {"stages": 2}}
    refused(lambda: refuse_misspelt_section({key: section}), ConfigError, key, "'wavemare'")


def test_what_is_no_section_of_ours():
    refuse_misspelt_section({"wavemare": {}, "wave": {}, "weights": 1, "zero_optimization": {}})


WARNINGS = [
    ({"train_batch_sise": 8}, "Did you mean 'train_batch_size'?"),
    ({"optimizer": {"lr": 1}}, "Use optimizer.params.lr"),
]


@pytest.mark.parametrize(("config", "said"), WARNINGS)
def test_what_deepspeed_ignores_is_warned_of(config, said):
    (warning,) = misplaced_keys(config)
    assert said in warning
