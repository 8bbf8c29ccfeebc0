# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the JSON configuration: the file, DeepSpeed's sections, ours, and the batch sizes."""

import math

import pytest

from wavemare.engine.config import check_batch_sizes, check_config, load_config, misplaced_keys
from wavemare.errors import ConfigError

FILES = [
    pytest.param("", "the file is empty", "Write {...}", id="nothing in it"),
    pytest.param(" \n\n", "the file is empty", "Write {...}", id="blanks in it"),
    pytest.param('{"a": {"b": 1}', "line 1, column 15", "Mend", id="a brace is missing"),
    pytest.param('{"lr": True, "b": {}}', "line 1, column 8", "Mend", id="True of Python"),
    pytest.param('{"lr": NaN}', "NaN is no number of JSON", "Mend", id="NaN"),
    pytest.param('{"a": 1}{"b": 2}', "Extra data", "Mend", id="two objects"),
    pytest.param("[1, 2]", "list rather than an object", "Write {...}", id="a list"),
    pytest.param("null", "NoneType rather than an object", "Write {...}", id="null"),
    pytest.param('config = {"a": 1}', "str rather than an object", "Write", id="an assignment"),
    pytest.param("[" * 50_000, "nested too deeply", "Mend", id="50,000 brackets"),
    pytest.param('{"a": ' + "1" * 5000 + "}", "too many digits", "Mend", id="5,000 digits"),
    pytest.param('{"a": 1e999}', "a number in it is too large", "Mend", id="1e999"),
    pytest.param('{"a": 1}'.encode("utf-16"), "this is not text", "Name", id="UTF-16"),
]


@pytest.mark.parametrize(("content", "reason", "remedy"), FILES)
def test_a_file_that_is_no_configuration(refused, write, content, reason, remedy):
    file = write("config.json", content)
    refused(lambda: load_config(file), ConfigError, "--deepspeed_config", str(file), reason, remedy)


NAMES = [
    pytest.param("nosuch.json", "No such file", "Name an existing", id="a missing file"),
    pytest.param(".", "Is a directory", "Name an existing", id="a folder"),
    pytest.param("x" * 5000, "File name too long", "Name an existing", id="a long name"),
    pytest.param("a\0b", "null byte", "Mend", id="a zero byte in the name"),
    pytest.param("", "neither the name of a file nor a mapping", "Name", id="no name"),
    pytest.param(None, "neither the name of a file nor a mapping", "Name", id="None"),
    pytest.param([{}], "neither the name of a file nor a mapping", "Name", id="a list in Python"),
]


@pytest.mark.parametrize(("name", "reason", "remedy"), NAMES)
def test_a_name_that_names_no_configuration(refused, name, reason, remedy):
    refused(lambda: load_config(name), ConfigError, "--deepspeed_config", reason, remedy)


KEYS = [
    pytest.param('{"a": 1, "a": 2}', "a", "stands twice", id="a key twice"),
    pytest.param('{"x": {"b": 1, "b": 2}}', "b", "stands twice", id="a key twice, within"),
    pytest.param('{"fp16": "enabled: true"}', "fp16", "Write {...}", id="YAML in JSON"),
    pytest.param(
        '{"fp16": {\n"enabled": True,\n"loss_scale": 0}}',
        "fp16.enabled",
        "neither true nor false",
        id="True of Python on a line of its own",
    ),
    pytest.param('{"scheduler": []}', "scheduler", "not a mapping", id="a list for a section"),
    pytest.param('{"optimizer": null}', "optimizer", "or leave it out", id="null for a section"),
    pytest.param(
        '{"scheduler": {"params": 3}}', "scheduler.params", "not a mapping", id="params a number"
    ),
]


@pytest.mark.parametrize(("content", "key", "said"), KEYS)
def test_a_key_of_the_file(refused, write, content, key, said):
    refused(lambda: load_config(write("config.json", content)), ConfigError, key, said)


def ours(**section):
    return {"wavemare": section}


def pipemare(**settings):
    return ours(pipeline={"schedule": "pipemare", "stages": 2, "pipemare": settings})


SECTIONS = [
    # DeepSpeed's
    pytest.param({3: 4}, "3", ["no text", "Put it in quotes"], id="a number for a key"),
    pytest.param(
        {"zero_optimization": {"stage": "2"}},
        "zero_optimization.stage",
        ["'2'", "text", "without quotes"],
        id="the stage of ZeRO in quotes",
    ),
    pytest.param(
        {"zero_optimization": {"stage": 4}},
        "zero_optimization.stage",
        ["no such stage", "0, 1, 2 or 3"],
        id="stage 4 of ZeRO",
    ),
    pytest.param(
        {"zero_optimization": 2}, "zero_optimization", ["not a mapping"], id="ZeRO as a number"
    ),
    pytest.param(
        {"fp16": {"enabled": "false"}},
        "fp16.enabled",
        ["'false'", "neither true nor false", "without quotes"],
        id="false in quotes",
    ),
    pytest.param(
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        "fp16.enabled",
        ["bf16 is enabled, too", "one of the two"],
        id="fp16 and bf16",
    ),
    pytest.param({"tensorboard": 3}, "tensorboard", ["Write {...}"], id="tensorboard: 3"),
    pytest.param({"pipeline": "auto"}, "pipeline", ["Write {...}"], id="pipeline: auto"),
    pytest.param(
        {"optimizer": {"type": ["AdamW"]}}, "optimizer.type", ["in quotes"], id="a list of types"
    ),
    pytest.param(
        {"optimizer": {"type": "AdamW", "params": {"lr": "1e-3"}}},
        "optimizer.params.lr",
        ["'1e-3'", "a text, not a number", "without quotes"],
        id="lr in quotes",
    ),
    pytest.param(
        {"optimizer": {"type": "AdamW", "params": {"lr": -1e-3}}},
        "optimizer.params.lr",
        ["-0.001", "not from 0"],
        id="lr below 0",
    ),
    pytest.param(
        {"optimizer": {"type": "AdamW", "params": {"weight_decay": math.nan}}},
        "optimizer.params.weight_decay",
        ["nan", "not from 0"],
        id="weight_decay not a number",
    ),
    pytest.param({"gradient_clipping": -1}, "gradient_clipping", ["-1"], id="clipping below 0"),
    pytest.param(
        {"gradient_clipping": [1]}, "gradient_clipping", ["not a number"], id="a list for clipping"
    ),
    pytest.param(
        {"gradient_clipping": math.inf}, "gradient_clipping", ["below infinity"], id="clipping inf"
    ),
    # ours
    pytest.param(ours(pipelin={}), "wavemare.pipelin", ["'pipeline'?"], id="a misspelt section"),
    pytest.param(
        ours(pipeline={"stagse": 2}),
        "wavemare.pipeline.stagse",
        ["does not exist", "Did you mean 'stages'?"],
        id="a misspelt key",
    ),
    pytest.param(
        pipemare(lr_rescheduling={"anneal": 3}),
        "wavemare.pipeline.pipemare.lr_rescheduling.anneal",
        ["Did you mean 'anneal_steps'?"],
        id="a misspelt key three sections deep",
    ),
    pytest.param(
        {"wavemare": [1]}, "wavemare", ["not a mapping", "{...}"], id="our section a list"
    ),
    pytest.param({"wavemare": {1: 2}}, "wavemare[1]", ["quotes"], id="a number for our key"),
    pytest.param(
        ours(pipeline=2), "wavemare.pipeline", ["not a mapping"], id="the pipeline a number"
    ),
    pytest.param(
        ours(pipeline={"stages": 0}), "wavemare.pipeline.stages", ["1 or more"], id="no stage"
    ),
    pytest.param(
        ours(pipeline={"stages": "2"}),
        "wavemare.pipeline.stages",
        ["'2'", "valid integer", "without quotes"],
        id="stages in quotes",
    ),
    pytest.param(
        ours(pipeline={"stages": math.nan}), "wavemare.pipeline.stages", ["nan"], id="stages NaN"
    ),
    pytest.param(
        ours(pipeline={"stages": 3}),
        "wavemare.pipeline.stages",
        ["(2) is not a multiple", "Start a multiple of 3"],
        id="3 stages on 2 processes",
    ),
    pytest.param(
        ours(pipeline={"partition": "paramters"}),
        "wavemare.pipeline.partition",
        ["no such partition", "Did you mean 'parameters'?"],
        id="a misspelt partition",
    ),
    pytest.param(
        ours(pipeline={"partition": "type:("}),
        "wavemare.pipeline.partition",
        ["the expression is invalid", "Correct it"],
        id="an open bracket in an expression",
    ),
    pytest.param(
        ours(pipeline={"partition": [0, "5"]}),
        "wavemare.pipeline.partition[1]",
        ["'5'", "without quotes"],
        id="a layer in quotes",
    ),
    pytest.param(
        ours(pipeline={"partition": 5}),
        "wavemare.pipeline.partition",
        ["string or a valid list"],
        id="a number for a partition",
    ),
    pytest.param(
        ours(pipeline={"inputs": "input_ids"}),
        "wavemare.pipeline.inputs",
        ["a valid list", "Write [...]"],
        id="one input without brackets",
    ),
    pytest.param(
        ours(pipeline={"schedule": "gpipe"}),
        "wavemare.pipeline.schedule",
        ["no such choice", "Did you mean 'pipemare'?"],
        id="a schedule that there is not",
    ),
    pytest.param(
        ours(pipeline={"pipemare": {}}),
        "wavemare.pipeline.pipemare",
        ["no effect on the schedule '1f1b'", "remove the key"],
        id="settings of another schedule",
    ),
    pytest.param(
        pipemare(warmup_steps=-1),
        "wavemare.pipeline.pipemare.warmup_steps",
        ["Give 0 or more"],
        id="negative warm-up",
    ),
    pytest.param(
        pipemare(discrepancy_correction={"decay": 1.0}),
        "wavemare.pipeline.pipemare.discrepancy_correction.decay",
        ["Give less than 1"],
        id="a decay of 1",
    ),
    pytest.param(
        {**pipemare(), "zero_optimization": {"stage": 3}},
        "zero_optimization.stage",
        ["pipeline's micro-batches", "Use 0 or 1"],
        id="stages and ZeRO 3",
    ),
    pytest.param(
        {**pipemare(), "fp16": {"enabled": True}},
        "fp16.enabled",
        ["dynamic loss scale", '"bf16"'],
        id="asynchronous stages and fp16",
    ),
    pytest.param(
        ours(tensor_parallel={"size": 3}),
        "wavemare.tensor_parallel.size",
        ["(2) is not a multiple"],
        id="3 splits on 2 processes",
    ),
    pytest.param(
        {**ours(tensor_parallel={"size": 2}), "zero_optimization": {"stage": 3}},
        "zero_optimization.stage",
        ["would cut the parts"],
        id="split layers and ZeRO 3",
    ),
    pytest.param(
        ours(parallel={"split": {"size": 2}}),
        "wavemare.parallel.split.modules",
        ["required", "Give it"],
        id="a split of no modules",
    ),
    pytest.param(
        ours(parallel={"stages": [["h.0", 3]]}),
        "wavemare.parallel.stages[0][1]",
        ["3", "in quotes"],
        id="a number for a pattern",
    ),
    pytest.param(
        ours(parallel={"replica": "all"}),
        "wavemare.parallel.replica",
        ["'rest' or a valid integer"],
        id="replica: all",
    ),
    pytest.param(
        ours(parallel={"plan": 3}), "wavemare.parallel.plan", ["in quotes"], id="a plan's number"
    ),
    pytest.param(
        ours(balance={"shares": "3,1"}), "wavemare.balance.shares", ["[...]"], id="shares as text"
    ),
    pytest.param(
        ours(balance={"shares": [3, 1], "micro_steps": [1, 1]}),
        "wavemare.balance.micro_steps",
        ["unequal micro-batches, or unequal numbers"],
        id="shares and micro_steps",
    ),
    pytest.param(
        ours(wavelet={"mode": "asynch"}),
        "wavemare.wavelet.mode",
        ["Did you mean 'async'?"],
        id="a misspelt mode",
    ),
    pytest.param(
        ours(wavelet={"streams": 3, "mode": "sync"}),
        "wavemare.wavelet.streams",
        ["1 or 2", "Choose one"],
        id="three streams",
    ),
    pytest.param(
        ours(wavelet={"budget": 2.0}),
        "wavemare.wavelet.budget",
        ["no effect", 'to "sync"'],
        id="a budget of no waves",
    ),
    pytest.param(
        ours(wavelet={"mode": "sync"}, pipeline={"stages": 2}),
        "wavemare.wavelet.mode",
        ["in turns already", "Use one stage"],
        id="waves and stages",
    ),
    pytest.param(
        ours(sparse_collective={"mode": "topk"}),
        "wavemare.sparse_collective.mode",
        ["no such choice"],
        id="a collective that there is not",
    ),
    pytest.param(
        ours(sparse_collective={"mode": "auto", "compressor": {"ratio": 0}}),
        "wavemare.sparse_collective.compressor.ratio",
        ["Give more than 0"],
        id="a compressor that sends nothing",
    ),
    pytest.param(
        ours(sparse_collective={"mode": "auto", "compressor": {"threshold": 1.0}}),
        "wavemare.sparse_collective.compressor.threshold",
        ["block_topk ignores it", "Leave it out"],
        id="the setting of another compressor",
    ),
    pytest.param(
        ours(watchdog={"timeout_s": "120"}),
        "wavemare.watchdog.timeout_s",
        ["'120'", "without quotes"],
        id="a time in quotes",
    ),
    pytest.param(
        ours(watchdog={"timeout_s": -1}), "wavemare.watchdog.timeout_s", ["-1"], id="negative time"
    ),
]


@pytest.mark.parametrize(("config", "key", "said"), SECTIONS)
def test_a_section(refused, config, key, said):
    refused(lambda: check_config(config, world_size=2), ConfigError, key, *said)


TRAIN, MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
BATCHES = [
    pytest.param({}, TRAIN, ["no batch size is given", MICRO], id="no batch size"),
    pytest.param({STEPS: 3}, TRAIN, ["no batch size"], id="accumulation alone"),
    pytest.param({TRAIN: "32"}, TRAIN, ["'32'", "positive whole"], id="a size in quotes"),
    pytest.param({TRAIN: 32.0}, TRAIN, ["32.0", "positive whole"], id="a size with a point"),
    pytest.param({MICRO: 0}, MICRO, ["Give one, 1 or more"], id="an empty micro-batch"),
    pytest.param({MICRO: True}, MICRO, ["positive whole"], id="a micro-batch of true"),
    pytest.param({MICRO: 2, STEPS: -4}, STEPS, ["-4"], id="negative accumulation"),
    pytest.param(
        {TRAIN: 30, MICRO: 4, STEPS: 4}, TRAIN, ["4 x 4 x 2 = 32", "Give 32"], id="no product"
    ),
    pytest.param({TRAIN: 1}, TRAIN, ["Give at least 2"], id="fewer samples than ranks"),
]


@pytest.mark.parametrize(("config", "key", "said"), BATCHES)
def test_batch_sizes(refused, config, key, said):
    refused(lambda: check_batch_sizes(config, data_world_size=2), ConfigError, key, *said)


WARNINGS = [
    pytest.param({"train_batch_sise": 8}, "Did you mean 'train_batch_size'?", id="misspelt"),
    pytest.param({"wavmare": {}}, "Did you mean 'wavemare'?", id="our section misspelt"),
    pytest.param({"optimizer": {"lr": 1}}, "Use optimizer.params.lr", id="lr beside params"),
    pytest.param({"pipeline": {"stages": 2}}, "Use wavemare.pipeline.stages", id="never read"),
]


@pytest.mark.parametrize(("config", "said"), WARNINGS)
def test_what_deepspeed_ignores_is_warned_of(config, said):
    (warning,) = misplaced_keys(config)
    assert said in warning
