# SPDX-License-Identifier: Apache-2.0
"""Results that are computed once, named by the hash of what they are computed from."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from wavemare.errors import DataError
from wavemare.files import remove_leftovers, temporary_sibling

__all__ = ["build_once", "content_key"]

_logger = logging.getLogger(__name__)


def content_key(parts: Iterable[str]) -> str:
    """Hash a sequence of texts; unequal sequences have unequal keys, however they are divided."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8))
        digest.update(encoded)
    return digest.hexdigest()


def build_once(
    folder: Path, build: Callable[[Path], None], is_whole: Callable[[Path], bool]
) -> None:
    """Fill a cache folder unless it is there already.

    Processes that ask for the same folder at once build it once: the others wait. The folder
    appears under its name when it is complete. One that is damaged is built again.

    Args:
        folder: The cache entry.
        build: Fills the empty folder that it is given.
        is_whole: Tells whether an existing folder is complete.

    Raises:
        DataError: The cache cannot be written.
    """
    if is_whole(folder):
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder):
            if not is_whole(folder):
                _replace(folder, build)
    except OSError as error:
        reason = f"the cache cannot be written: {error.strerror or error}"
        remedy = "Free some space, or choose another cache folder"
        raise DataError("cache_dir", str(folder.parent), reason, remedy) from error


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    lock = FileLock(folder.with_name(f"{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _logger.info("waiting for another process that fills %s", folder)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _replace(folder: Path, build: Callable[[Path], None]) -> None:
    if folder.exists():
        _logger.warning("the cache entry %s is damaged and is built again", folder)
        shutil.rmtree(folder)
    remove_leftovers(folder.parent)
    partial = temporary_sibling(folder)
    partial.mkdir()
    try:
        build(partial)
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
