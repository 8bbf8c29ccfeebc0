# SPDX-License-Identifier: Apache-2.0
"""What the requests of all measurements share: options are read and checked, and travel as JSON."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from wavemare.errors import ConfigError, did_you_mean

__all__ = [
    "MpiRequest",
    "Request",
    "check_least",
    "check_names",
    "check_positive",
    "parse_names",
    "parse_numbers",
]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What shall be measured: numbers, texts and tuples of them."""

    def options(self, *names: str) -> dict[str, Any]:
        """Return fields by the options that are named after them."""
        return {f"--{name.replace('_', '-')}": getattr(self, name) for name in names}

    def to_json(self) -> str:
        """Return the text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        return cls(**{n: tuple(v) if isinstance(v, list) else v for n, v in values.items()})


@dataclass(frozen=True, kw_only=True)
class MpiRequest(Request):
    """What shall be measured by ranks under MPI.

    Args:
        ranks: Number of processes.
        mbit: Speed of each rank's link in Mbit/s; None for the memory of this machine.
    """

    ranks: int
    mbit: float | None = None


def check_positive(values: Mapping[str, float | None]) -> None:
    """Check values by their options; None is one that was not given.

    Raises:
        ConfigError: One is not more than 0.
    """
    for option, value in values.items():
        if value is not None and not value > 0:
            raise ConfigError(option, value, "it is not positive", "Give more than 0")


def check_least(least: int, values: Mapping[str, int]) -> None:
    """Check values by their options.

    Raises:
        ConfigError: One is less than the least that can be.
    """
    for option, value in values.items():
        if value < least:
            raise ConfigError(option, value, "it is too small", f"Give {least} or more")


def check_heads(hidden: int, heads: int) -> None:
    """Check that the heads of a block share its width.

    Raises:
        ConfigError: They cannot do so equally.
    """
    if hidden % heads:
        reason = f"{heads} heads cannot share it equally"
        raise ConfigError("--hidden", hidden, reason, "Give a multiple of --heads")


def check_names(
    option: str, names: Sequence[str], valid: Collection[str], kind: str = "system"
) -> None:
    """Check the names that an option was given.

    Args:
        option: Named in errors.
        names: What was given.
        valid: All there are.
        kind: What they name.

    Raises:
        ConfigError: There is no name, or one that is not valid.
    """
    if not names:
        remedy = f"Name some of {', '.join(valid)}"
        raise ConfigError(option, "", "there is nothing to measure", remedy)
    for name in names:
        if name not in valid:
            raise ConfigError(option, name, f"there is no such {kind}", did_you_mean(name, valid))


def parse_numbers(option: str, text: str) -> tuple[int, ...]:
    """Read whole numbers between commas; a number that stands twice counts once.

    Raises:
        ConfigError: There is something else; the message names the option.
    """
    words = parse_names(text)
    if not all(word.isdecimal() for word in words):
        reason = "these are no whole numbers between commas"
        raise ConfigError(option, text, reason, "Write them as in 1,2,4,8")
    return tuple(dict.fromkeys(map(int, words)))


def parse_names(text: str) -> tuple[str, ...]:
    """Read names between commas; a name that stands twice counts once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
