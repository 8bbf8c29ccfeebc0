"""Checking a Hugging Face folder before anything slow begins."""

from __future__ import annotations

from pathlib import Path

from wavemare.errors import ModelError

__all__ = ["check_model_folder"]


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
