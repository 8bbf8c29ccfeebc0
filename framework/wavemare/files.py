"""Writing files so that a crash leaves the old content or the new, never a part of either.

This module imports the standard library alone, so that every area may use it.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

__all__ = ["atomic_write_bytes", "atomic_write_text", "replace_folder"]


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace a file by new content; parent folders are created.

    Args:
        path: The file. A symbolic link stays, the file that it names is replaced.
        data: The whole content.

    Raises:
        OSError: The file could not be written; what was there before is untouched.
    """
    target = Path(path).resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _sibling(target, "tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            # Without it a power cut may leave the new name with no content.
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def atomic_write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replace a file by UTF-8 text; see `atomic_write_bytes`."""
    atomic_write_bytes(path, text.encode())


def replace_folder(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Rename a folder over another one of the same file system.

    A folder cannot be renamed over a folder with content, so the old one is moved aside first and
    removed last; if the rename fails, it comes back.

    Args:
        source: The finished folder.
        target: Its new name; what is there is removed.
    """
    target = Path(target)
    if not target.exists():
        os.rename(source, target)
        return
    aside = _sibling(target, "old")
    os.rename(target, aside)
    try:
        os.rename(source, target)
    except BaseException:
        os.rename(aside, target)
        raise
    if aside.is_dir():
        shutil.rmtree(aside)
    else:
        aside.unlink()


def _sibling(target: Path, kind: str) -> Path:
    # On the same file system, else the rename would be a copy; hidden from patterns such as "*".
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.{kind}")
