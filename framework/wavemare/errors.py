# SPDX-License-Identifier: Apache-2.0
"""Errors that a user can act on: each names the key, its value, the reason and the remedy.

This module imports nothing, so that every area may use it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from numbers import Real
from typing import Any

_LONGEST, _MOST_NAMES = 300, 24
_LARGEST = sys.float_info.max


class WavemareError(Exception):
    """Base of all errors that the user, rather than the programmer, can mend.

    Args:
        key: What is wrong: a configuration path (``wavemare.pipeline.stages``), an option
            (``--data``) or a file.
        value: The offending value as it was given.
        reason: Why it cannot be used, without a trailing full stop.
        remedy: What to do instead, without a trailing full stop.
    """

    exit_code = 2

    def __init__(self, key: str, value: object, reason: str, remedy: str) -> None:
        super().__init__(key, value, reason, remedy)
        self.key = key
        self.value = value
        self.reason = reason
        self.remedy = remedy

    def __str__(self) -> str:
        advice, shown = self.remedy, repr(self.value)
        if len(shown) > _LONGEST:
            shown = f"{shown[: _LONGEST - 45]} ... {shown[-40:]}"
        return f"{self.key} = {shown}: {self.reason}. {advice}{'' if advice.endswith('?') else '.'}"


class ConfigError(WavemareError, ValueError):
    """A key or value of the JSON configuration or of the command line."""


class DataError(WavemareError, ValueError):
    """A corpus, a tokenizer or a token that cannot be used."""


class ModelError(WavemareError, ValueError):
    """A model that cannot be converted, loaded or saved as asked."""


class CheckpointError(WavemareError, RuntimeError):
    """A checkpoint that is damaged, incomplete or of another topology."""


class NumericsError(WavemareError, ArithmeticError):
    """A number that is not finite."""


class PlanError(WavemareError, ValueError):
    """A plan or a layout that cannot be made, read or run."""


class LaunchError(WavemareError, RuntimeError):
    """A run that was started in the wrong way."""


class CommError(WavemareError, RuntimeError):
    """A collective that cannot be done as asked, or that a peer has left.

    The next attempt may well succeed, and so its exit code is not that of a mistake.
    """

    exit_code = 1


@contextmanager
def os_errors(
    error: type[WavemareError], key: str, value: object, what: str, remedy: str
) -> Iterator[None]:
    """Raise an error in place of an OSError inside; ``what`` failed is told with its reason.

    Args:
        error: The kind of error.
        key: See `WavemareError`.
        value: See `WavemareError`.
        what: What failed, as the first words of the reason.
        remedy: See `WavemareError`.
    """
    try:
        yield
    except OSError as failure:
        raise error(key, value, f"{what} ({failure.strerror or failure})", remedy) from failure


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return ``did you mean 'x'?`` for the nearest valid name, else the list of valid names.

    Args:
        name: The name that was given.
        valid: The names that would have been accepted.
    """
    names = sorted(set(valid))
    nearest = get_close_matches(str(name), names, n=1, cutoff=0.5)
    if nearest:
        return f"Did you mean {nearest[0]!r}?"
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"Valid names are {', '.join(map(repr, names[:_MOST_NAMES]))}{more}"


def check_number(
    error: type[WavemareError],
    key: str,
    value: Any,
    low: float = 0,
    high: float = _LARGEST,
    *,
    whole: bool = False,
) -> None:
    """Raise an error unless a value is a number from ``low`` to below ``high``.

    Args:
        error: The kind of error.
        key: See `WavemareError`.
        value: See `WavemareError`.
        low: The least number.
        high: The first number that is too large.
        whole: Whether it must be a whole number.
    """
    is_number = isinstance(value, int if whole else Real) and not isinstance(value, bool)
    if is_number and low <= value < high:
        return
    bounds = f"of at least {low}" if high == _LARGEST else f"from {low} to below {high}"
    kind = "whole" if whole else "finite"
    raise error(key, value, f"it is no {kind} number {bounds}", "Give one, without quotes")
