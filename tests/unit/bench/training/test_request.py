# SPDX-License-Identifier: Apache-2.0
"""What may be asked of ``wavemare bench training``."""

from typing import Any

import pytest

from wavemare.bench.training.request import (
    BASELINE,
    BOUND,
    DEFAULT_SYSTEMS,
    QUALITY_SYSTEMS,
    SYSTEMS,
    TrainingRequest,
)
from wavemare.errors import ConfigError


def test_defaults_are_valid_and_travel_as_json() -> None:
    for request in (
        TrainingRequest(),
        TrainingRequest(ranks=4, mbit=200.0, systems=(BASELINE,), data="a.tsv"),
        TrainingRequest(quality_steps=10, systems=QUALITY_SYSTEMS, compressor_warmup=3),
    ):
        request.check()
        assert TrainingRequest.from_json(request.to_json()) == request
    assert set(QUALITY_SYSTEMS) < set(DEFAULT_SYSTEMS) < set(SYSTEMS)


@pytest.mark.parametrize(
    ("values", "option", "named"),
    [
        ({"ranks": 1}, "--ranks", "2 or more"),
        ({"mbit": 0.0}, "--mbit", "more than 0"),
        ({"rounds": 0}, "--rounds", "more than 0"),
        ({"warmups": -1}, "--warmups", "0 or more"),
        ({"steps_per_round": 0}, "--steps-per-round", "more than 0"),
        ({"vocabulary": 100}, "--vocabulary", "1000 or more"),
        ({"hidden": 30}, "--hidden", "multiple of --heads"),
        ({"layers": 0}, "--layers", "more than 0"),
        ({"heads": 0}, "--heads", "more than 0"),
        ({"batch": 0}, "--batch", "more than 0"),
        ({"sequence": 4}, "--sequence", "8 or more"),
        ({"block": 0}, "--block", "more than 0"),
        ({"ratio": 0.0}, "--ratio", "more than 0"),
        ({"ratio": 1.5}, "--ratio", "1 or less"),
        ({"learning_rate": float("nan")}, "--learning-rate", "more than 0"),
        ({"compressor_warmup": -1}, "--compressor-warmup", "0 or more"),
        ({"seed": -1}, "--seed", "0 or more"),
        ({"systems": ()}, "--systems", BASELINE),
        ({"systems": ("wavemare-topc",)}, "--systems", "wavemare-topk"),
        ({"quality_steps": 0, "systems": QUALITY_SYSTEMS}, "--quality-steps", "more than 0"),
        ({"quality_steps": 5, "systems": ("torch-ddp",)}, "--systems", BASELINE),
        ({"quality_steps": 5, "systems": (BASELINE, BOUND)}, "--systems", "Leave it out"),
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, Any], option: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainingRequest(**values).check()
    assert caught.value.key == option
    assert named in str(caught.value)
