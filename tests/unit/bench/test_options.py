# SPDX-License-Identifier: Apache-2.0
"""What all requests share: what is read, refused and sent to the ranks."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from wavemare.bench.options import (
    MpiRequest,
    check_least,
    check_names,
    check_positive,
    parse_names,
    parse_numbers,
)
from wavemare.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Sizes(MpiRequest):
    ranks: int = 2
    steps_per_round: int | None = None
    names: tuple[str, ...] = ()


def test_a_request_travels_as_json() -> None:
    for request in (Sizes(), Sizes(ranks=3, mbit=0.5, steps_per_round=4, names=("a", "b"))):
        assert Sizes.from_json(request.to_json()) == request


def test_options_are_named_after_fields() -> None:
    assert Sizes().options("ranks", "steps_per_round") == {"--ranks": 2, "--steps-per-round": None}


@pytest.mark.parametrize(
    ("check", "named"),
    [
        (lambda: check_positive({"--good": None, "--bad": 0.0}), "more than 0"),
        (lambda: check_positive({"--good": 1, "--bad": float("nan")}), "more than 0"),
        (lambda: check_least(3, {"--good": 3, "--bad": 2}), "3 or more"),
        (lambda: check_names("--bad", (), ("one", "two")), "one, two"),
        (lambda: check_names("--bad", ("one", "twoo"), ("one", "two")), "'two'"),
    ],
)
def test_what_cannot_be_is_refused_by_its_option(check: Callable[[], None], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        check()
    assert caught.value.key == "--bad"


def test_numbers_and_names_between_commas() -> None:
    assert parse_numbers("--micro-batches", "1, 2,4,2") == (1, 2, 4)
    assert parse_names(" a,b ,,a") == ("a", "b")
    for text in ("1,x", "-1", "1.5", "1 2"):
        with pytest.raises(ConfigError, match="--micro-batches"):
            parse_numbers("--micro-batches", text)
