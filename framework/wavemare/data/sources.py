# SPDX-License-Identifier: Apache-2.0
"""What a ``--data`` argument names, and the corpus that it names by default."""

from __future__ import annotations

import glob
import math
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from wavemare.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset


STDLIB = "Python standard library"
"""Name of the default corpus: its source, real text on every machine."""


class Kind(StrEnum):
    """The kinds of data that ``--data`` can name."""

    DEFAULT = "default"
    TEXT = "text"
    JSON = "json"
    CSV = "csv"
    TSV = "tsv"
    PARQUET = "parquet"
    SAVED = "saved"
    HUB = "hub"
    MEGATRON = "megatron"


EXTENSIONS = {
    ".txt": Kind.TEXT,
    ".text": Kind.TEXT,
    ".md": Kind.TEXT,
    ".rst": Kind.TEXT,
    ".py": Kind.TEXT,
    ".json": Kind.JSON,
    ".jsonl": Kind.JSON,
    ".csv": Kind.CSV,
    ".tsv": Kind.TSV,
    ".parquet": Kind.PARQUET,
}
"""Known file extensions, and how each is read."""

_MEGATRON_EXTENSIONS = (".bin", ".idx")
_SAVED_MARKERS = ("dataset_dict.json", "dataset_info.json")
_HUB_PREFIX = "hub:"
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)
# The first two are generated and name folders of the machine. The third is the reference manual in
# one file, a sixteenth of the library that is not code.
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-", "pydoc_data")


@dataclass(frozen=True)
class Source:
    """Data that exists, not read yet.

    Attributes:
        kind: How to read it.
        name: The ``--data`` argument, for messages.
        files: Sorted files of a local kind; the folder of a saved dataset; Megatron prefixes.
        dataset: Name of a dataset of the Hub.
        config: Its configuration, if the argument names one.
        weights: One per Megatron prefix of a blend; else empty.
    """

    kind: Kind
    name: str
    files: tuple[Path, ...] = ()
    dataset: str | None = None
    config: str | None = None
    weights: tuple[float, ...] = ()


def resolve(spec: str | None) -> Source:
    """Find the data that a ``--data`` argument names, without reading it or using a network.

    The name of a file that exists is taken literally. A file that several links reach is read once.

    Args:
        spec: None or ``stdlib`` (the default corpus), a file, a folder, a glob, a Megatron prefix,
            a dataset's name, ``hub:OWNER/NAME[:CONFIG]``, or a blend of Megatron prefixes:
            ``0.3 PREFIX 0.7 PREFIX``.

    Raises:
        DataError: A path does not exist, has no known extension, mixes kinds, or all its files are
            empty.
    """
    if spec is not None and not spec.strip():
        raise DataError("--data", spec, "it is empty", "Name data, or leave the option out")
    if spec is None or spec == "stdlib":
        return Source(Kind.DEFAULT, STDLIB)
    if spec.startswith(_HUB_PREFIX):
        return _hub(spec, spec.removeprefix(_HUB_PREFIX))
    path = Path(os.path.expanduser(spec))
    try:
        if path.is_file() and path.suffix not in _MEGATRON_EXTENSIONS:
            return _files(spec, [path])  # whatever else its name may look like
        return _blend(spec) or _resolve_path(spec, path) or _hub(spec, spec)
    except OSError as error:  # a name that is too long, a folder that may not be read
        reason = f"it cannot be looked for ({error.strerror})"
        raise DataError("--data", spec, reason, "Check the path") from None


def _blend(spec: str) -> Source | None:
    words = spec.split()
    try:
        weights = tuple(float(word) for word in words[::2])
    except ValueError:
        return None
    if len(words) < 2 or len(words) % 2:  # noqa: PLR2004
        return None
    if not all(0 <= weight < math.inf for weight in weights) or not sum(weights):
        reason = "weights are 0 or more, and one is above"
        raise DataError("--data", spec, reason, "Give weights such as 0.3 A 0.7 B")
    prefixes = [_megatron(spec, Path(os.path.expanduser(word))).files[0] for word in words[1::2]]
    return Source(Kind.MEGATRON, spec, tuple(prefixes), weights=weights)


def _resolve_path(spec: str, path: Path) -> Source | None:
    """Return the data at a path, or None if the argument can only be a dataset's name."""
    if path.is_dir():
        return _folder(spec, path)
    if path.suffix in _MEGATRON_EXTENSIONS or any(
        with_extension(path, extension).exists() for extension in _MEGATRON_EXTENSIONS
    ):
        return _megatron(spec, path)
    if glob.has_magic(spec):
        matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
        return _files(spec, [match for match in matches if match.is_file()])
    if "/" in spec or "\\" in spec or path.suffix.lower() in EXTENSIONS:
        raise _missing(spec, path)
    return None


def _hub(spec: str, name: str) -> Source:
    dataset, _, config = name.partition(":")
    if not dataset.strip():
        reason = "no dataset is named"
        raise DataError("--data", spec, reason, "Give a file, a folder or the name of a dataset")
    return Source(Kind.HUB, spec, dataset=dataset, config=config or None)


def with_extension(prefix: Path, extension: str) -> Path:
    """Return a file of a prefix, which may itself have a dot."""
    # Path.with_suffix would cut a prefix such as "corpus.v2" at its own dot.
    return prefix.with_name(prefix.name + extension)


def as_prefix(option: str, path: str | Path) -> Path:
    """Return the prefix of Megatron data, of which a path may name one of the two files.

    Raises:
        DataError: It names a folder, not the files in it.
    """
    prefix = Path(os.path.expanduser(path))
    if not prefix.name:
        reason = "it names a folder, not the files in it"
        raise DataError(option, str(prefix), reason, "Give FOLDER/NAME, without .bin and .idx")
    names_file = prefix.suffix in _MEGATRON_EXTENSIONS
    if names_file and not with_extension(prefix, prefix.suffix).exists():
        return prefix.with_suffix("")
    return prefix


def _megatron(spec: str, prefix: Path) -> Source:
    prefix = as_prefix("--data", prefix)
    for extension in _MEGATRON_EXTENSIONS:
        file = with_extension(prefix, extension)
        if not file.is_file():
            remedy = f"Put {prefix.name}.bin and {prefix.name}.idx side by side"
            raise DataError("--data", spec, f"the file {file} does not exist", remedy)
    return Source(Kind.MEGATRON, spec, (prefix,))


def _folder(spec: str, folder: Path) -> Source:
    if any((folder / marker).is_file() for marker in _SAVED_MARKERS):
        return Source(Kind.SAVED, spec, (folder,))
    return _files(spec, [file for file in _visible_files(folder) if _kind_of(file) is not None])


def _visible_files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, through links, too; each folder once."""
    seen: set[str] = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        seen.add(os.path.realpath(parent))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        folders[:] = [n for n in folders if os.path.realpath(os.path.join(parent, n)) not in seen]
        files = [Path(parent, name) for name in names if not name.startswith(".")]
        yield from (file for file in files if file.is_file())


def _kind_of(file: Path) -> Kind | None:
    return EXTENSIONS.get(file.suffix.lower())


def _files(spec: str, files: list[Path]) -> Source:
    known = ", ".join(EXTENSIONS)
    if not files:
        reason = "no file with a known extension is there"
        raise DataError("--data", spec, reason, f"Known extensions are {known}")
    # What several names reach is read once, whatever loops the links make.
    files = list({os.path.realpath(file): file for file in sorted(files, reverse=True)}.values())
    kinds: dict[Kind, list[Path]] = {}
    for file in files:
        kind = _kind_of(file)
        if kind is None:
            reason = f"the extension of {file.name} is not known"
            raise DataError("--data", spec, reason, f"Known extensions are {known}")
        kinds.setdefault(kind, []).append(file)
    if len(kinds) > 1:
        counts = ", ".join(f"{len(members)} of {kind}" for kind, members in kinds.items())
        remedy = "Choose one kind with a glob such as 'folder/**/*.jsonl'"
        raise DataError("--data", spec, f"the files are of several kinds: {counts}", remedy)
    if all(file.stat().st_size == 0 for file in files):
        reason = "the corpus is empty: every file has 0 bytes"
        raise DataError("--data", spec, reason, "Give files that hold text")
    return Source(next(iter(kinds)), spec, tuple(sorted(files)))


def _missing(spec: str, path: Path) -> DataError:
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    nearest = get_close_matches(path.name, siblings, n=1)
    remedy = f"Did you mean {path.with_name(nearest[0])}" if nearest else "Check the path"
    if spec.count("/") == 1 and spec.isprintable() and not path.parent.is_dir():
        remedy += f", or write {_HUB_PREFIX}{spec} for a dataset of the Hugging Face Hub"
    return DataError("--data", spec, "no such file, folder or prefix exists", remedy)


def read_stdlib(root: Path | None = None) -> Dataset:
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
    found = {path.relative_to(root).as_posix(): path for path in stdlib_files(root)}
    texts = {name: text for name in sorted(found) if (text := _read_module(found[name])).strip()}
    if len(texts) < 2:  # noqa: PLR2004
        reason = "this interpreter carries no .py sources of its library"
        remedy = "Give a corpus of your own with --data, or use a Python that has its sources"
        raise DataError("--data", str(root), reason, remedy)
    return Dataset.from_dict({"name": list(texts), "text": list(texts.values())})


def stdlib_files(root: Path | None = None) -> list[Path]:
    """Return the modules that `read_stdlib` may read, in the order of their paths."""
    return sorted(_walk(root or Path(sysconfig.get_path("stdlib"))))


def _walk(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.name.startswith(_SKIPPED_PREFIXES):
            continue
        if entry.is_dir():
            if entry.name not in _SKIPPED_FOLDERS:
                yield from _walk(entry)
        elif entry.suffix == ".py":
            yield entry


def _read_module(path: Path) -> str:
    try:
        with tokenize.open(path) as file:  # decodes as the file declares
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        return ""
