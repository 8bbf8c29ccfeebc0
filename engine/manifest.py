"""The list of a checkpoint's files, by which damage is found before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wavemare.errors import CheckpointError

__all__ = ["FORMAT", "MANIFEST", "read_manifest", "resolve_tag"]

MANIFEST = "wavemare.json"
FORMAT = 1


def resolve_tag(load_dir: str | Path, tag: str | None) -> str | None:
    """Return the tag to load: the one given, else the one that ``latest`` names, else None.

    Raises:
        CheckpointError: There is no folder of that name.
    """
    folder = Path(load_dir)
    latest = folder / "latest"
    if tag is None:
        if not latest.is_file():
            return None
        tag = latest.read_text(encoding="utf-8").strip()
    if not (folder / tag).is_dir():
        there = sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST}"))
        remedy = f"Choose one of {there}" if there else "Start without resuming"
        raise CheckpointError("checkpoint", str(folder / tag), "there is no such folder", remedy)
    return tag


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Read and verify a checkpoint's list of files.

    Args:
        folder: The checkpoint, ``save_dir/tag``.

    Returns:
        The manifest, or None if stock DeepSpeed wrote the folder.

    Raises:
        CheckpointError: A file is missing or has another size than when it was written.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        files: dict[str, int] = manifest["files"]
    except (ValueError, KeyError):
        raise _damaged(path, "it is not a list of files any more", folder) from None
    for name, size in files.items():
        file = folder / name
        if not file.is_file():
            raise _damaged(file, "the file is missing", folder)
        if file.stat().st_size != size:
            found = file.stat().st_size
            raise _damaged(file, f"the file has {found} bytes instead of {size}", folder)
    return manifest


def _damaged(file: Path, reason: str, folder: Path) -> CheckpointError:
    others = sorted(
        p.parent.name for p in folder.parent.glob(f"*/{MANIFEST}") if p.parent != folder
    )
    remedy = f"Resume from another one: {others}" if others else "Start without resuming"
    return CheckpointError("checkpoint", str(file), reason, remedy)
