# SPDX-License-Identifier: Apache-2.0
"""The default corpus: the source of the Python standard library, real text on every machine."""

from __future__ import annotations

import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from wavemare.data.documents import Corpus, Document, hash_fraction
from wavemare.errors import DataError

__all__ = ["NAME", "is_held_out", "load_default_corpus", "package_of", "read_standard_library"]

NAME = "Python standard library"

_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)
# The first two are written when the interpreter is built and name folders of the machine; the third
# is the reference manual in one file, a sixteenth of the library that is not code.
_GENERATED_PREFIXES = ("_sysconfigdata", "config-", "pydoc_data")


def load_default_corpus(held_out_fraction: float = 0.05, *, root: Path | None = None) -> Corpus:
    """Read the standard library and split it by file.

    Args:
        held_out_fraction: Share of the files that is held out.
        root: Folder to read instead of the interpreter's own library.

    Raises:
        DataError: The interpreter carries no sources.
    """
    documents = read_standard_library(root)
    train = [d for d in documents if not is_held_out(d.name, held_out_fraction)]
    held_out = [d for d in documents if is_held_out(d.name, held_out_fraction)]
    if not train or not held_out:
        raise _no_sources(root or _library_root(), f"only {len(documents)} files hold source")
    return Corpus(NAME, train, held_out)


def read_standard_library(root: Path | None = None) -> list[Document]:
    """Return every module of the standard library, ordered by relative path.

    Tests, installed packages, generated files and files that cannot be decoded or are blank are
    left out.

    Raises:
        DataError: The interpreter carries no sources.
    """
    root = root or _library_root()
    documents = [d for path in _source_files(root) if (d := _read(root, path)) is not None]
    if not documents:
        raise _no_sources(root, "this interpreter carries no .py sources of its library")
    return documents


def is_held_out(name: str, fraction: float = 0.05) -> bool:
    """Tell whether a file is held out; this depends on its relative path alone."""
    return hash_fraction(name) < fraction


def package_of(name: str) -> str:
    """Return the top-level package or module that a relative path belongs to."""
    return name.split("/", 1)[0].removesuffix(".py")


def _library_root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _source_files(root: Path) -> list[Path]:
    return sorted(_walk(root), key=lambda path: path.relative_to(root).as_posix())


def _walk(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        if entry.name.startswith(_GENERATED_PREFIXES):
            continue
        if entry.is_dir():
            if entry.name not in _SKIPPED_FOLDERS:
                yield from _walk(entry)
        elif entry.suffix == ".py":
            yield entry


def _read(root: Path, path: Path) -> Document | None:
    try:
        with tokenize.open(path) as file:  # decodes as the file declares
            text = file.read()
    except (SyntaxError, UnicodeDecodeError):
        return None
    return Document(path.relative_to(root).as_posix(), text) if text.strip() else None


def _no_sources(root: Path, reason: str) -> DataError:
    remedy = "Give a corpus of your own with --data, or use a Python that comes with its sources"
    return DataError("--data", str(root), reason, remedy)
