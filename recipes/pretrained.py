"""Checking what a model is made from, before anything slow begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wavemare.errors import ConfigError, ModelError

__all__ = ["check_model_folder", "read_model_config"]


def check_model_folder(folder: str) -> None:
    """Check that a folder holds a configuration and weights.

    Raises:
        ModelError: Naming what is missing.
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


def read_model_config(file: str) -> dict[str, Any]:
    """Read a transformers configuration with its ``model_type``.

    Raises:
        ConfigError: The file is missing, no JSON object, or names no model type.
    """
    try:
        values = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = f"the model's configuration cannot be read ({error})"
        raise ConfigError("--model_config", file, reason, "Name a JSON file") from None
    if not isinstance(values, dict) or "model_type" not in values:
        raise ConfigError(
            "--model_config",
            file,
            "it names no model_type",
            'Add "model_type", as transformers does',
        )
    return values
