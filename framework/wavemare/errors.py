"""Errors that a user can act on: each names the key, its value, the reason and the remedy.

This module imports nothing, so that every area may use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = [
    "CheckpointError",
    "CommError",
    "ConfigError",
    "DataError",
    "LaunchError",
    "ModelError",
    "PlanError",
    "WavemareError",
    "did_you_mean",
]


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
        return f"{self.key} = {self.value!r}: {self.reason}. {self.advice}"

    @property
    def advice(self) -> str:
        """The remedy as a sentence."""
        return self.remedy if self.remedy.endswith("?") else f"{self.remedy}."


class ConfigError(WavemareError, ValueError):
    """A key or value of the JSON configuration or of the command line."""


class DataError(WavemareError, ValueError):
    """A corpus, a tokenizer or a token that cannot be used."""


class ModelError(WavemareError, ValueError):
    """A model that cannot be converted, loaded or saved as asked."""


class CheckpointError(WavemareError, RuntimeError):
    """A checkpoint that is damaged, incomplete or of another topology."""


class PlanError(WavemareError, ValueError):
    """A plan that cannot be made, read or run."""


class LaunchError(WavemareError, RuntimeError):
    """A run that was started in the wrong way."""


class CommError(WavemareError, RuntimeError):
    """A collective that cannot be done as asked, or that a peer has left."""


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return ``did you mean 'x'?`` for the nearest valid name, else the list of valid names.

    Args:
        name: The name that was given.
        valid: The names that would have been accepted.
    """
    names = sorted(valid)
    nearest = get_close_matches(name, names, n=1, cutoff=0.5)
    if nearest:
        return f"Did you mean {nearest[0]!r}?"
    return f"Valid names are {', '.join(map(repr, names))}"
