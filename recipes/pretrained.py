# SPDX-License-Identifier: Apache-2.0
"""Checking what a model is made from, before anything slow begins."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wavemare.data.tokens import check_length
from wavemare.errors import ConfigError, ModelError, did_you_mean
from wavemare.json_text import parse_json

__all__ = ["check_model_folder", "longest", "naming", "read_model_config"]


def check_model_folder(folder: str, sequence_length: int, *, writes: bool = False) -> None:
    """Check that a folder holds a configuration and weights of a model that is long enough.

    Args:
        folder: The folder.
        sequence_length: Tokens per sample.
        writes: Whether the model has to continue text, from left to right.

    Raises:
        ModelError: Naming what is missing; or the model reads in both directions.
        ConfigError: The sequences are longer than the model.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ModelError(
            "--model",
            folder,
            "there is no such folder",
            "Name a folder that save_pretrained wrote, for example the 'model' folder of a run "
            "of the pretraining recipe",
        )
    weights = [*path.glob("*.safetensors"), *path.glob("*.bin")]
    if not (path / "config.json").is_file() or not weights:
        missing = "weights" if (path / "config.json").is_file() else "config.json"
        raise ModelError("--model", folder, f"it has no {missing}", "Name a complete folder")
    values = read_model_config(str(path / "config.json"), sequence_length, key="--model")

    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as READERS

    if writes and values["model_type"] in READERS and not values.get("is_decoder"):
        reason = f"a {values['model_type']} model fills gaps in text, and does not continue it"
        remedy = "Name the folder of a GPT, or use wavemare train bert/finetune"
        raise ModelError("--model", folder, reason, remedy)


def read_model_config(
    file: str,
    sequence_length: int,
    change: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    key: str = "--model_config",
) -> dict[str, Any]:
    """Read a transformers configuration with its ``model_type``.

    Args:
        file: The JSON file.
        sequence_length: Tokens per sample.
        change: Applied to it before it is checked.
        key: What a message calls the file.

    Raises:
        ConfigError: The file is missing, no JSON object, names no model type that transformers
            knows, or the sequences are longer than the model.
    """
    try:
        values = parse_json(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = f"the model's configuration cannot be read ({error})"
        raise ConfigError(key, file, reason, "Name a JSON file") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        reason, remedy = "it names no model_type", 'Add "model_type", as transformers does'
        raise ConfigError(key, file, reason, remedy)

    from transformers import CONFIG_MAPPING, AutoConfig

    if values["model_type"] not in CONFIG_MAPPING:
        remedy = did_you_mean(values["model_type"], CONFIG_MAPPING.keys())
        reason = f"transformers knows no model type {values['model_type']!r}"
        raise ConfigError(key, file, reason, remedy)
    values = change(values)
    with naming(key, file):
        config = AutoConfig.for_model(**values)
    check_length(sequence_length, longest(config))
    return values


def longest(config: Any) -> int:
    """Return the longest sequence that a model takes; a very large number if it has no limit."""
    return int(getattr(config, "max_position_embeddings", None) or sys.maxsize)


@contextmanager
def naming(key: str, value: str) -> Iterator[None]:
    """Say which option is to blame where transformers cannot make or load a model.

    Raises:
        ModelError: With what transformers said.
    """
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    foreign = (SafetensorError, StrictDataclassError)
    try:
        yield
    except (
        OSError,
        RuntimeError,
        ValueError,
        TypeError,
        KeyError,
        ArithmeticError,
        *foreign,
    ) as error:
        said = " ".join(str(error).split())[:200]
        reason = f"transformers cannot make a model of it ({said})"
        raise ModelError(key, value, reason, "Mend the configuration or the files") from error
