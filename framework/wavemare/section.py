# SPDX-License-Identifier: Apache-2.0
"""Base of the pydantic models that make up the ``"wavemare"`` section of the JSON configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from wavemare.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_NAME = re.compile(r"'([^']*)'")
_LIMITS = {
    "ge": "Give {} or more",
    "gt": "Give more than {}",
    "le": "Give at most {}",
    "lt": "Give less than {}",
}
_KINDS = {
    "bool_type": "Write true or false, without quotes",
    "dict_type": "Write {...}",
    "float_type": "Give a number, without quotes",
    "finite_number": "Give a finite number",
    "int_type": "Give a whole number, without quotes",
    "invalid_key": "Put it in quotes",
    "list_type": "Write [...]",
    "literal_error": "Choose one of these",
    "missing": "Give it",
    "model_type": "Write {...}",
    "no_effect": "Leave it out",
    "string_type": "Give a string in quotes",
}


class Section(BaseModel):
    """A frozen part of the configuration that refuses unknown keys.

    ``wavemare.engine.config.resolve`` assembles the sections.
    The docstring below a field is its description.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )

    @classmethod
    def parse(cls, values: Mapping[str, Any], path: str = "wavemare") -> Self:
        """Validate a mapping.

        Args:
            values: The section as it stands in the JSON file.
            path: The section's place in the file, used in messages.

        Raises:
            ConfigError: The first invalid key, its value, the reason and the nearest valid key.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise _first_error(cls, error, values, path) from None


def _first_error(
    model: type[Section], error: ValidationError, values: Mapping[str, Any], path: str
) -> ConfigError:
    # An unknown key is shown before the errors that it may have caused (a required key missing),
    # and an item of a list before what else might have been given in place of the list.
    found = [(_location(details, values), details) for details in error.errors()]
    found.sort(key=lambda item: (item[1]["type"] != "extra_forbidden", -len(item[0])))
    location, first = found[0]
    key = path + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in location)
    given = None if first["type"] == "missing" else first["input"]
    if first["type"] == "extra_forbidden":
        remedy = did_you_mean(str(location[-1]), _fields_at(model, location[:-1]))
        return ConfigError(key, given, "this key does not exist", remedy)
    # Where a value may be of several kinds there is an error of each.
    same = [details for place, details in found if place == location]
    choices = [item for item in same if item["type"] == "literal_error"]
    text = [item for item in same if item["type"] == "string_pattern_mismatch"]
    if isinstance(given, str) and choices and len(choices + text) == len(same):
        names = [name for item in choices for name in _NAME.findall(item["ctx"]["expected"])]
        return ConfigError(key, given, "there is no such choice", did_you_mean(given, names))
    reasons = dict.fromkeys(item["msg"].removeprefix("Input should be ") for item in same)
    reason = " or ".join(reasons)
    if first["msg"].startswith("Input should be "):
        reason = f"it should be {reason}"
    return ConfigError(key, given, reason[:1].lower() + reason[1:], _remedy(first))


def _location(details: ErrorDetails, values: Any) -> list[int | str]:
    """Return where in the values an error is, without pydantic's names of the kinds it tried."""
    location: list[int | str] = []
    *parents, last = details["loc"]
    for part in parents:
        if isinstance(values, Mapping) and part in values:
            values = values[part]
        elif isinstance(values, list) and isinstance(part, int) and part < len(values):
            values = values[part]
        else:
            continue
        location.append(part)
    within = (isinstance(values, Mapping) and last in values) or isinstance(last, int)
    if within or details["type"] == "missing":
        location.append(last)
    return location


def _remedy(details: ErrorDetails) -> str:
    limits = details.get("ctx", {})
    for name, text in _LIMITS.items():
        if name in limits:
            return text.format(f"{limits[name]:g}")
    return _KINDS.get(details["type"], "Give a value of that kind")


def _fields_at(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    for part in location:
        field = model.model_fields.get(str(part))
        annotation = field.annotation if field is not None else None
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        nested = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not nested:
            break
        model = nested[0]
    return list(model.model_fields)
