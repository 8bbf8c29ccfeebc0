# SPDX-License-Identifier: Apache-2.0
"""Reading the JSON configuration, from wherever DeepSpeed takes it."""

from __future__ import annotations

import base64
import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from wavemare.engine.config.shape import BATCH_KEYS, check_shape
from wavemare.errors import ConfigError
from wavemare.json_text import parse_json, refuse_duplicates, say_what_is_wrong

__all__ = ["load_config"]

_COMMENTS = ("#", "/")


def load_config(
    config: str | os.PathLike[str] | Mapping[str, Any], key: str = "--deepspeed_config"
) -> dict[str, Any]:
    """Return the configuration as a dictionary of its own.

    Args:
        config: A mapping, the path of a JSON file (comments allowed) or its text in base64, as
            DeepSpeed takes them.
        key: What a message calls the file.

    Raises:
        ConfigError: The file is missing, is not JSON (with line and column), repeats a key, or has
            something else where a section belongs.
    """
    if isinstance(config, Mapping):
        values = copy.deepcopy(dict(config))
    else:
        values = _read(config, key)
    _respell(values)
    check_shape(values)
    return values


def _respell(values: dict[str, Any]) -> None:
    """Write what DeepSpeed takes in two spellings in that which our checks read."""
    zero, optimizer = (values.get(name) for name in ("zero_optimization", "optimizer"))
    if isinstance(zero, dict) and zero.get("stage") in ("0", "1", "2", "3"):
        zero["stage"] = int(zero["stage"])
    if isinstance(optimizer, dict) and optimizer.get("params", {}) is None:
        del optimizer["params"]
    for name in BATCH_KEYS:
        if isinstance(values.get(name), float) and values[name].is_integer():
            values[name] = int(values[name])


def _read(config: object, key: str) -> dict[str, Any]:
    def refuse(reason: str, remedy: str) -> ConfigError:
        return ConfigError(key, config if isinstance(config, str) else str(config), reason, remedy)

    if not isinstance(config, str | os.PathLike) or not os.fspath(config):
        reason = "it is neither the name of a file nor a mapping"
        raise refuse(reason, "Name a JSON file")
    try:
        text = _text(str(config))
        values = say_what_is_wrong(lambda: _parse(text))
    except OSError as error:
        reason = f"the file cannot be read ({error.strerror})"
        raise refuse(reason, "Name an existing JSON file") from None
    except UnicodeDecodeError:
        raise refuse("this is not text", "Name a JSON file") from None
    except ConfigError:
        raise
    except ValueError as error:
        raise refuse(str(error), "Mend that place") from None
    if not text.strip():
        raise refuse("the file is empty", "Write {...}")
    if not isinstance(values, dict):
        reason = f"this is JSON, but {type(values).__name__} rather than an object"
        raise refuse(reason, "Write {...}")
    return values


def _text(config: str) -> str:
    if not os.path.exists(config):
        try:
            return base64.urlsafe_b64decode(config).decode("utf-8")
        except ValueError:  # neither base64 nor text: it was meant as a path
            pass
    return Path(config).read_text(encoding="utf-8")


def _parse(text: str) -> Any:
    """Parse as DeepSpeed does, so that the same files load."""
    import hjson

    try:
        return hjson.loads(
            text, object_pairs_hook=lambda pairs: refuse_duplicates(pairs, _refuse_duplicate)
        )
    except hjson.HjsonDecodeError as error:
        _parse_strictly(text)
        place = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"not JSON at {place}: {error.msg}") from None


def _parse_strictly(text: str) -> None:
    """Raise plain JSON's error where that tells more of a text that is none.

    To hjson words without quotes, such as ``True,`` and ``NaN,``, are texts up to the line's end,
    so that it finds the error far behind them; but it knows comments.
    """
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        if text[error.pos : error.pos + 1] in _COMMENTS:
            return
    parse_json(text)


def _refuse_duplicate(key: str, value: Any) -> NoReturn:
    raise ConfigError(key, value, "the key stands twice", "Remove one of the two")
