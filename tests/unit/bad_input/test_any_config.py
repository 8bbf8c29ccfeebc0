# SPDX-License-Identifier: Apache-2.0
"""Whatever a configuration holds: `ConfigError`, or a configuration. Variables: `LaunchError`."""

import json

from fuzz_strategies import FUZZ, VALUES, changed, refusal
from hypothesis import given
from hypothesis import strategies as st

from wavemare.engine.config.resolve import (
    WavemareConfig,
    check_batch_sizes,
    check_config,
    load_config,
    misplaced_keys,
)
from wavemare.engine.launch.environment import check_environment
from wavemare.errors import ConfigError, LaunchError
from wavemare.files import parse_json

VALID = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "zero_optimization": {"stage": 1, "overlap_comm": True},
    "fp16": {"enabled": False},
    "bf16": {"enabled": True},
    "pipeline": {"activation_checkpoint_interval": 1},
    "checkpoint": {"load_universal": False},
    "wavemare": {
        "pipeline": {
            "schedule": "pipemare",
            "stages": 2,
            "partition": [0, 3],
            "inputs": ["input_ids"],
            "pipemare": {
                "warmup_steps": 2,
                "discrepancy_correction": {"mode": "ema", "decay": 0.5},
                "lr_rescheduling": {"enabled": True, "anneal_steps": 9},
            },
        },
        "tensor_parallel": {"size": 1},
        "parallel": {"stages": None, "split": None, "pipeline": {}},
        "balance": {"shares": [3, 5], "mean": "samples"},
        "wavelet": {"mode": "off"},
        "sparse_collective": {"mode": "auto", "compressor": {"type": "block_topk", "ratio": 0.5}},
        "watchdog": {"timeout_s": 9.0},
    },
}


def start_up(config, world_size):
    ours = check_config(load_config(config), world_size=world_size)
    check_batch_sizes(config, data_world_size=max(world_size // ours.model_ranks, 1))
    misplaced_keys(config)


def examine(config):
    """Do what start-up does with a configuration before there is a model."""
    for world_size in (1, 4):
        refusal(start_up, ConfigError, config, world_size)


@FUZZ
@given(changed(VALID))
def test_changed_configurations(config):
    examine(config)


@FUZZ
@given(VALUES)
def test_any_value_as_our_section(value):
    error = refusal(WavemareConfig.of, ConfigError, {"wavemare": value})
    assert error is None or error.key.startswith("wavemare")


def damaged_text(text, data):
    """Valid JSON after some characters were changed."""
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(text)))
        length = data.draw(st.integers(0, 9))
        pieces = st.sampled_from([*'{}[]",:#/\\\n', "//", "NaN", "True", "1e999", "\ud800", "\0"])
        text = text[:place] + data.draw(pieces | st.text(max_size=3)) + text[place + length :]
    return text


def read(file, content):
    file.write_bytes(content)
    refusal(load_config, ConfigError, file)


@FUZZ
@given(st.data())
def test_damaged_files(tmp_path, data):
    text = damaged_text(json.dumps(VALID, indent=1), data)
    read(tmp_path / "config.json", text.encode("utf-8", "surrogatepass"))


@FUZZ
@given(st.text(max_size=40) | VALUES.map(json.dumps))
def test_json_is_parsed_or_refused_by_one_error(text):
    assert type(refusal(parse_json, ValueError, text)) in (type(None), ValueError)


NAMES = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
NAMES += ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "SLURM_PROCID"]
NAMES += ["SLURM_STEP_NUM_TASKS", "WAVEMARE_VERBOSE", "WAVEMARE_COMPILED_OPS", "CROSS_RANK"]
NUMBERS = st.integers(-2, 4).map(str)


@FUZZ
@given(st.dictionaries(st.sampled_from(NAMES), NUMBERS | st.text(max_size=4)))
def test_any_variables(environment):
    error = refusal(check_environment, LaunchError, environment)
    assert error is None or error.key in environment
