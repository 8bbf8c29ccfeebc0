# SPDX-License-Identifier: Apache-2.0
"""The guards' section: its defaults, and keys that would have no effect."""

import pytest

from wavemare.engine.config import WavemareConfig, check_config
from wavemare.engine.guard_config import GuardConfig, check_checksums
from wavemare.errors import ConfigError

BASE = {"train_micro_batch_size_per_gpu": 1}


def test_the_defaults_stop_and_cost_nothing_else():
    guard = WavemareConfig.of({}).guard
    assert guard.nonfinite == "stop"
    assert guard.max_skips == 10
    assert not guard.message_checksum
    assert guard.replica_digest_interval == 0


@pytest.mark.parametrize(
    ("guard", "more", "key"),
    [
        ({"nonfinite": "skip"}, {"fp16": {"enabled": True}}, "nonfinite"),
        ({"nonfinite": "maybe"}, {}, "nonfinite"),
        ({"max_skips": 3}, {}, "max_skips"),
        ({"nonfinite": "skip", "max_skips": 0}, {}, "max_skips"),
        ({"message_checksum": 1}, {}, "message_checksum"),
        (
            {"replica_digest_interval": 5},
            {"zero_optimization": {"stage": 3}},
            "replica_digest_interval",
        ),
        ({"replica_digest_interval": -1}, {}, "replica_digest_interval"),
        ({"checksum": True}, {}, "checksum"),
    ],
)
def test_what_would_have_no_effect_is_refused_by_name(guard, more, key):
    with pytest.raises(ConfigError) as caught:
        check_config({**BASE, **more, "wavemare": {"guard": guard}}, world_size=1)
    assert caught.value.key == f"wavemare.guard.{key}"


@pytest.mark.parametrize(
    ("guard", "more"),
    [
        ({"nonfinite": "off"}, {"fp16": {"enabled": True}}),
        ({}, {"fp16": {"enabled": True}}),
        ({"nonfinite": "skip", "max_skips": 1}, {}),
        ({"replica_digest_interval": 5}, {"zero_optimization": {"stage": 2}}),
    ],
)
def test_what_works_is_taken(guard, more):
    check_config({**BASE, **more, "wavemare": {"guard": guard}}, world_size=1)


def test_messages_of_the_asynchronous_pipeline_may_carry_checksums():
    sections = {
        "pipeline": {"schedule": "pipemare", "stages": 2},
        "guard": {"message_checksum": True},
    }
    assert check_config({**BASE, "wavemare": sections}, world_size=2).guard.message_checksum


def test_checksums_are_refused_where_nothing_carries_them():
    guard = GuardConfig(message_checksum=True)
    check_checksums(guard, staged=True, sparse=False)
    check_checksums(guard, staged=False, sparse=True)
    check_checksums(GuardConfig(), staged=False, sparse=False)
    with pytest.raises(ConfigError, match=r"wavemare\.guard\.message_checksum"):
        check_checksums(guard, staged=False, sparse=False)
