# SPDX-License-Identifier: Apache-2.0
"""Reading JSON that people and other programs wrote: whatever is wrong with it is one error.

This module imports the standard library alone, so that every area may use it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["parse_json", "refuse_duplicates", "say_what_is_wrong"]


def parse_json(text: str) -> Any:
    """Parse JSON as it is standardised, in which no key of an object stands twice.

    Raises:
        ValueError: The reason, as part of a sentence: where the text is no JSON, a key that stands
            twice, NaN or infinity, nesting that is too deep or a number that is too long.
    """

    def parse() -> Any:
        return json.loads(
            text,
            parse_constant=_refuse_constant,
            object_pairs_hook=lambda pairs: refuse_duplicates(pairs, _refuse_duplicate),
        )

    return say_what_is_wrong(parse)


def say_what_is_wrong(parse: Callable[[], Any]) -> Any:
    """Call a parser of JSON, and say of each way in which it may fail what it means.

    Raises:
        ValueError: See `parse_json`.
    """
    try:
        return parse()
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"not JSON at {place}: {error.msg}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except OverflowError:  # hjson, of 1e999
        raise ValueError("a number in it is too large") from None
    except ValueError as error:
        if "integer string conversion" not in str(error):
            raise
        raise ValueError("a number in it has too many digits") from None


def refuse_duplicates(
    pairs: list[tuple[str, Any]], refuse: Callable[[str, Any], NoReturn]
) -> dict[str, Any]:
    """Return the pairs of an object as a dictionary; ``refuse`` is called for a second value."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            refuse(key, value)
        values[key] = value
    return values


def _refuse_duplicate(key: str, value: Any) -> NoReturn:
    raise ValueError(f"the key {key!r} stands twice")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
