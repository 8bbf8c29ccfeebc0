# SPDX-License-Identifier: Apache-2.0
"""The manifest: a checkpoint's files with sizes and checksums, to find damage before a load."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from wavemare.errors import CheckpointError
from wavemare.files import discard_folder, restore_folder

MANIFEST = "wavemare.json"
FORMAT = 2
"""1 had sizes alone: ``"files": {name: bytes}``."""
_CHUNK = 1 << 22
_NUMBERS = ("world_size", "data", "pipe", "model", "zero_stage")
"""What a topology must have; ``cuts`` is compared as it stands."""


@dataclass(frozen=True)
class FileRecord:
    """What a file was when it was written: its size and the checksum of its content."""

    bytes: int
    xxh3: str


def checksum(path: str | os.PathLike[str], *, sync: bool = False) -> FileRecord:
    """Read a file and return its record; with ``sync`` wait until it is on the disk, too."""
    # Of 256 MiB in memory, one core: XXH3 9.5 GB/s, zlib.crc32 2.1, sha1 0.6, blake2b 0.4,
    # sha256 0.3. It is to find damage; who can change files can change the list as well.
    found, size = xxhash.xxh3_64(), 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
            size += len(chunk)
        if sync:
            os.fsync(file.fileno())
    return FileRecord(size, found.hexdigest())


def as_tag(tag: object) -> str:
    """Return the name of a checkpoint's folder.

    Raises:
        CheckpointError: A folder of this name would not be found again: ``latest`` names it in one
            line, and hidden folders are not complete yet.
    """
    name = str(tag)
    parts = name.split("/")
    hidden = any(not part or part.startswith(".") for part in parts)
    if hidden or parts[0] == "latest" or name != name.strip() or not name.isprintable():
        reason = "this is no name for a checkpoint's folder"
        remedy = "Give a name such as step-100, without blanks at its ends or dots before it"
        raise CheckpointError("tag", name, reason, remedy)
    return name


def resolve_tag(load_dir: str | Path, tag: object) -> str | None:
    """Return the tag to load: the one given, else the one that ``latest`` names, else None.

    Raises:
        CheckpointError: There is no folder of that name.
    """
    folder = Path(load_dir)
    latest = folder / "latest"
    if tag is not None:
        tag = as_tag(tag)
    elif not latest.is_file():
        return None
    else:
        tag = latest.read_text(encoding="utf-8", errors="replace").strip()
    if tag and "\0" not in tag:
        restore_folder(folder / tag)
    if not tag or "\0" in tag or not (folder / tag).is_dir():
        there = sorted(path.parent.name for path in _lists(folder))
        remedy = f"Choose one of {there}" if there else "Start without resuming"
        raise CheckpointError("checkpoint", str(folder / tag), "there is no such folder", remedy)
    return tag


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Read a checkpoint's list of files and compare it with the files' names and sizes.

    Returns:
        The manifest, or None if stock DeepSpeed wrote the folder.

    Raises:
        CheckpointError: The list is damaged, or a file is missing, has another size than when it
            was written, or is one that the list does not have and DeepSpeed would load.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest = _parse(path)
    except ValueError as error:
        raise damaged(path, str(error), folder) from None
    records = _records(manifest)
    for name, record in records.items():
        file = folder / name
        if not file.is_file():
            raise damaged(file, "the file is missing", folder)
        size = file.stat().st_size
        if size != record.bytes:
            raise damaged(file, f"the file has {size} bytes instead of {record.bytes}", folder)
    for file in sorted(folder.rglob("*.pt")):  # which DeepSpeed finds by patterns
        if file.relative_to(folder).as_posix() not in records:
            raise damaged(file, "the file was not there when the checkpoint was complete", folder)
    return manifest


def verify_contents(
    folder: Path, manifest: Mapping[str, Any], *, part: int = 0, parts: int = 1
) -> None:
    """Read a part of a checkpoint's files and compare their checksums.

    Files are assigned by size: together the parts read each file once, and each about as much.

    Args:
        folder: The checkpoint.
        manifest: What `read_manifest` has returned for it.
        part: Of ``range(parts)``.
        parts: Number of parts.

    Raises:
        CheckpointError: A file's content is not what was written.
    """
    records = _records(manifest)
    for name in sorted(records, key=lambda name: (-records[name].bytes, name))[part::parts]:
        if not records[name].xxh3:
            continue
        found = checksum(folder / name)
        if found != records[name]:
            reason = f"the file's checksum is {found.xxh3} instead of {records[name].xxh3}"
            raise damaged(folder / name, reason, folder)


def complete_tags(folder: Path, runs: Collection[str] | None = None) -> list[str]:
    """Return the tags of a folder whose files are all there, by size, the newest first.

    Args:
        folder: Of the checkpoints.
        runs: If given, only what one of these engines has saved.
    """
    found = []
    for path in _lists(folder):
        try:
            manifest = _parse(path)
            sizes = {path.parent / name: r.bytes for name, r in _records(manifest).items()}
            whole = all(file.stat().st_size == size for file, size in sizes.items())
        except (ValueError, OSError):
            continue
        if whole and (runs is None or _run(manifest) in runs):
            found.append(
                (str(manifest.get("saved", "")), path.stat().st_mtime_ns, path.parent.name)
            )
    return [tag for *_, tag in sorted(found, reverse=True)]


def keep_last(folder: Path, count: int, latest: str, runs: Collection[str]) -> list[str]:
    """Remove the oldest complete checkpoints of some engines.

    Args:
        folder: Of the checkpoints.
        count: How many stay.
        latest: The tag that stays whatever the others are.
        runs: The engines: the one that saves, and the ones it has resumed from.

    Returns:
        The tags removed. Incomplete folders, and folders of others, stay.
    """
    old = [tag for tag in complete_tags(folder, runs)[count:] if tag != latest]
    for tag in old:
        discard_folder(folder / tag)
    return old


def damaged(file: Path, reason: str, folder: Path) -> CheckpointError:
    """Return the error for a file that cannot be used, with another checkpoint to use."""
    others = [tag for tag in complete_tags(folder.parent) if tag != folder.name]
    remedy = "Start without resuming"
    if others:
        remedy = (
            f"Load the tag {others[0]!r}, the newest complete one beside it (write it into "
            f"{folder.parent / 'latest'} to resume from it)"
        )
    return CheckpointError("checkpoint", str(file), reason, remedy)


def _lists(folder: Path) -> list[Path]:
    # Hidden folders are being written, replaced or removed.
    return [path for path in folder.glob(f"*/{MANIFEST}") if not path.parent.name.startswith(".")]


def _parse(path: Path) -> dict[str, Any]:
    """Read a list of files.

    Raises:
        ValueError: It cannot be understood; the text says why.
    """
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _records(manifest)
        number = int(manifest.get("format", 1))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError("it is not a list of files any more") from None
    if number > FORMAT:
        raise ValueError(f"it has the format {number}, and this version knows 1 to {FORMAT}")
    topology = manifest.get("topology")
    if not isinstance(topology, Mapping):
        raise ValueError("it does not say by which topology the files were saved")
    for name in _NUMBERS:
        value = topology.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"its topology has no whole number for {name}")
    return manifest


def _run(manifest: Mapping[str, Any]) -> str | None:
    """Return which engine saved a checkpoint; None if its version did not say."""
    runs = manifest.get("runs")
    return str(runs[-1]) if isinstance(runs, list) and runs else None


def _records(manifest: Mapping[str, Any]) -> dict[str, FileRecord]:
    """Return size and checksum of each file; in format 1 there was no checksum."""
    return {
        str(name): FileRecord(int(value["bytes"]), str(value["xxh3"]))
        if isinstance(value, Mapping)
        else FileRecord(int(value), "")
        for name, value in manifest["files"].items()
    }


def rank_file(rank: int) -> str:
    """Return the name of a rank's own state: of its random generators, and of its engine."""
    return f"wavemare_rank_{rank:05d}_state.pt"
