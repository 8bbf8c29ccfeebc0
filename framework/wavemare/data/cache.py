# SPDX-License-Identifier: Apache-2.0
"""Folders that are filled once and named by the hash of their input."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from filelock import FileLock

from wavemare.errors import DataError
from wavemare.files import remove_leftovers, temporary_sibling

__all__ = ["build_once", "content_key"]


def content_key(parts: Iterable[str | None]) -> str:
    """Hash a sequence of texts; unequal sequences have unequal keys, however they are divided."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = (part or "").encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8))
        digest.update(encoded)
    return digest.hexdigest()


def build_once(folder: Path, build: Callable[[Path], object]) -> None:
    """Fill a cache folder unless it exists.

    Of several processes that ask for the same folder, one builds it and the others wait. The folder
    gets its name when it is complete.

    Args:
        folder: The cache entry.
        build: Fills the empty folder that it is given.

    Raises:
        DataError: The cache cannot be written.
    """
    if folder.is_dir():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f"{folder.name}.lock")):
            if not folder.is_dir():
                _build(folder, build)
    except OSError as error:
        reason = f"the cache cannot be written: {error.strerror or error}"
        remedy = "Free some space, or choose another cache folder"
        raise DataError("cache_dir", str(folder.parent), reason, remedy) from error


def _build(folder: Path, build: Callable[[Path], object]) -> None:
    remove_leftovers(folder.parent)
    partial = temporary_sibling(folder)
    partial.mkdir()
    try:
        build(partial)
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
