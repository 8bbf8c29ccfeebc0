# SPDX-License-Identifier: Apache-2.0
"""The default corpus: the source of the Python standard library, real text on every machine."""

from __future__ import annotations

import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from wavemare.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["NAME", "read_standard_library"]

NAME = "Python standard library"

_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)
# The first two are generated and name folders of the machine. The third is the reference manual in
# one file, a sixteenth of the library that is not code.
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-", "pydoc_data")


def read_standard_library(root: Path | None = None) -> Dataset:
    """Return every module of the standard library, ordered by relative path.

    Tests, installed packages, generated files, blank files and files that cannot be decoded are
    left out.

    Args:
        root: Folder to read instead of the interpreter's own library.

    Returns:
        The columns ``name``, a relative path, and ``text``.

    Raises:
        DataError: The interpreter carries no sources.
    """
    from datasets import Dataset

    root = root or Path(sysconfig.get_path("stdlib"))
    found = {path.relative_to(root).as_posix(): path for path in _walk(root)}
    texts = {name: text for name in sorted(found) if (text := _read(found[name])).strip()}
    if len(texts) < 2:  # noqa: PLR2004
        reason = "this interpreter carries no .py sources of its library"
        remedy = "Give a corpus of your own with --data, or use a Python that has its sources"
        raise DataError("--data", str(root), reason, remedy)
    return Dataset.from_dict({"name": list(texts), "text": list(texts.values())})


def _walk(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.name.startswith(_SKIPPED_PREFIXES):
            continue
        if entry.is_dir():
            if entry.name not in _SKIPPED_FOLDERS:
                yield from _walk(entry)
        elif entry.suffix == ".py":
            yield entry


def _read(path: Path) -> str:
    try:
        with tokenize.open(path) as file:  # decodes as the file declares
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        return ""
