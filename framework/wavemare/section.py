"""Base of the pydantic models that make up the ``"wavemare"`` section of the JSON configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from wavemare.errors import ConfigError, did_you_mean

__all__ = ["Section"]


class Section(BaseModel):
    """A frozen part of the configuration that refuses unknown keys.

    A model lives beside the class that it configures; ``wavemare.engine.config`` assembles them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

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
            raise _first_error(cls, error, path) from None


def _first_error(model: type[Section], error: ValidationError, path: str) -> ConfigError:
    # An unknown key is shown before the errors that it may have caused (a required key missing).
    details = sorted(error.errors(), key=lambda item: item["type"] != "extra_forbidden")[0]
    location = [str(part) for part in details["loc"]]
    key = ".".join([path, *location])
    if details["type"] == "extra_forbidden":
        valid = _fields_at(model, location[:-1])
        remedy = did_you_mean(location[-1], valid)
        return ConfigError(key, details["input"], "this key does not exist", remedy)
    reason = details["msg"][:1].lower() + details["msg"][1:]
    return ConfigError(key, details["input"], reason, "Give a value of that kind")


def _fields_at(model: type[BaseModel], location: list[str]) -> list[str]:
    for part in location:
        field = model.model_fields.get(part)
        annotation = field.annotation if field is not None else None
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        nested = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not nested:
            break
        model = nested[0]
    return list(model.model_fields)
