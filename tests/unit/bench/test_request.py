# SPDX-License-Identifier: Apache-2.0
"""What may be asked for, and how many steps it becomes."""

from typing import Any

import pytest

from wavemare.bench.request import PipelineRequest
from wavemare.bench.systems import SYSTEMS
from wavemare.errors import ConfigError


def test_the_default_is_valid_and_travels_as_json() -> None:
    request = PipelineRequest()
    request.check()
    assert PipelineRequest.from_json(request.to_json()) == request
    other = PipelineRequest(
        stages=4, micro_batches=(3,), systems=("torch-1f1b",), forward_ms=1.5, backward_ms=2.0
    )
    assert PipelineRequest.from_json(other.to_json()) == other


@pytest.mark.parametrize(
    ("values", "option", "named"),
    [
        ({"stages": 1}, "--stages", "two"),
        ({"micro_batches": ()}, "--micro-batches", "1,2,4,8"),
        ({"micro_batches": (1, 0)}, "--micro-batches", "1,2,4,8"),
        ({"systems": ()}, "--systems", "wavemare-pipemare"),
        ({"systems": ("deepspeed-1f1",)}, "--systems", "deepspeed-1f1b"),
        ({"systems": ("zzzz",)}, "--systems", "torch-zbv"),
        ({"rounds": 0}, "--rounds", "1"),
        ({"steps_per_round": 0}, "--steps-per-round", "1"),
        ({"batch": 0}, "--batch", "1"),
        ({"hidden": 10, "heads": 4}, "--hidden", "4 heads"),
        ({"stages": 8}, "--layers", "16"),
        ({"forward_ms": 1.0}, "--backward-ms", "both"),
        ({"forward_ms": 0.0, "backward_ms": 1.0}, "--forward-ms", "milliseconds"),
        ({"forward_ms": 1.0, "backward_ms": float("nan")}, "--backward-ms", "milliseconds"),
        ({"systems": ("torch-1f1b",), "micro_batches": (1,)}, "--micro-batches", "at least 2"),
        (
            {"systems": ("torch-zbv",), "forward_ms": 1.0, "backward_ms": 1.0},
            "--micro-batches",
            "splits the backward",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_its_option(
    values: dict[str, Any], option: str, named: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        PipelineRequest(**values).check()
    assert caught.value.key == option
    assert named in str(caught.value)


def test_a_straight_pipeline_needs_half_the_blocks_of_a_folded_one() -> None:
    straight = ("deepspeed-1f1b", "torch-1f1b", "wavemare-pipemare")
    PipelineRequest(stages=8, systems=straight).check()
    with pytest.raises(ConfigError, match="need 16 blocks"):
        PipelineRequest(stages=8, systems=(*straight, "torch-zbv")).check()


def test_timed_waits_need_no_blocks() -> None:
    PipelineRequest(stages=16, forward_ms=1.0, backward_ms=2.0, micro_batches=(32,)).check()


@pytest.mark.parametrize(("micro_batches", "steps"), [(1, 8), (2, 4), (3, 3), (4, 2), (8, 2)])
def test_rounds_of_few_micro_batches_have_more_steps(micro_batches: int, steps: int) -> None:
    assert PipelineRequest().steps(micro_batches) == steps
    assert PipelineRequest(steps_per_round=5).steps(micro_batches) == 5


@pytest.mark.parametrize("stages", [2, 4, 7])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8])
def test_the_pipeline_is_full_before_and_behind_the_timed_steps(
    stages: int, micro_batches: int
) -> None:
    request = PipelineRequest(stages=stages)
    for system in SYSTEMS.values():
        lead = request.lead(system, micro_batches) * micro_batches
        tail = request.tail(system, micro_batches) * micro_batches
        if system.steady:
            # The first stage is P - 1 forward passes ahead of the last.
            assert lead >= stages + micro_batches
            assert tail >= stages - 1
        else:
            assert (lead, tail) == (micro_batches, 0)
