# SPDX-License-Identifier: Apache-2.0
"""What distinguishes configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["differences", "flat"]


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested objects by their dotted names; lists are values."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def differences(configurations: Sequence[Mapping[str, Any]]) -> list[tuple[object, ...]]:
    """Return the keys that differ.

    Args:
        configurations: Nested objects.

    Returns:
        For each dotted key whose value is not the same in all of them, the key and its values; None
        where a configuration has no such key, and ``null`` where it says so.
    """
    known = [flat(each) for each in configurations]
    keys = dict.fromkeys(key for each in known for key in each)
    rows: list[tuple[object, ...]] = []
    for key in keys:
        present = [key in each for each in known]
        values = [each.get(key) for each in known]
        if not all(present) or any(value != values[0] for value in values):
            shown = ("null" if h and v is None else v for h, v in zip(present, values, strict=True))
            rows.append((key, *shown))
    return rows
