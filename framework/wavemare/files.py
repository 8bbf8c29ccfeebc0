# SPDX-License-Identifier: Apache-2.0
"""Writing files so that a crash leaves the old content or the new, never a part of either.

`parse_json` reads JSON that people and other programs wrote: whatever is wrong is one error.

Temporary names tell which process makes them, so that a later one knows what a killed process has
left. Every area may use this module.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from wavemare.errors import ConfigError, WavemareError, os_errors

_RENAME_SECONDS = 60.0
_POLL_SECONDS = 0.01
_FLUSH_SECONDS = 0.2
_SIBLING = re.compile(
    r"\.(?P<name>.+)\.wavemare-(?P<machine>[0-9a-f]+)-(?P<pid>[0-9]+)-(?P<start>[0-9]+)"
    r"-[0-9a-f]{8}\.(?P<kind>partial|tmp|old|deleted)"
)


def check_writable(option: str, path: Path | None, *, is_folder: bool = False) -> None:
    """Check that a file or folder can be written, before the work is done.

    Raises:
        ConfigError: Nothing can be written there.
    """
    if path is None:
        return
    folder, remedy = path if is_folder else path.parent, "Name another folder"
    if is_folder:
        with os_errors(ConfigError, option, str(folder), "this folder cannot be made", remedy):
            folder.mkdir(parents=True, exist_ok=True)
    elif path.is_dir():
        raise ConfigError(option, str(path), "there is a folder of that name", "Name a file")
    if not os.access(folder, os.W_OK | os.X_OK):
        reason = "there is no such folder that can be written"
        raise ConfigError(option, str(folder), reason, remedy)


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
    temporary = temporary_sibling(target, "tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            # Without it a power cut may leave the new name with no content.
            os.fsync(file.fileno())
        os.replace(temporary, target)
        sync_folder(target.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def atomic_write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replace a file by UTF-8 text; see `atomic_write_bytes`."""
    atomic_write_bytes(path, text.encode())


def replace_folder(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Rename a folder over another one of the same file system.

    The old one is moved aside first, and removed last. A process that is killed before the second
    rename leaves no folder of the name, which `restore_folder` mends.

    Args:
        source: The finished folder, whose content the caller has synchronized with the disk.
        target: Its new name; what is there is removed.

    Raises:
        OSError: It cannot be renamed; what was there before is untouched.
    """
    target, aside = Path(target), None
    if target.exists() or target.is_symlink():
        aside = temporary_sibling(target, "old")
        os.rename(target, aside)
    try:
        os.rename(source, target)
    except BaseException:
        if aside is not None and target.exists():  # another process was faster
            _discard(aside)
        elif aside is not None:
            os.rename(aside, target)
        raise
    sync_folder(target.parent)
    if aside is not None:
        with suppress(OSError):  # in use; `remove_leftovers` removes it later
            _discard(aside)


def replace_path(source: Path, target: Path) -> None:
    """Rename a file or folder over whatever is there; see `replace_folder` for folders.

    Raises:
        OSError: It cannot be renamed; what was there before is untouched.
    """
    if source.is_dir() or (target.is_dir() and not target.is_symlink()):
        replace_folder(source, target)
    else:
        os.replace(source, target)


def restore_folder(target: str | os.PathLike[str]) -> None:
    """Give a folder its name back that a killed `replace_folder` has moved aside.

    Several processes may call it at once. While the process that has moved the folder lives, and
    for a minute if it may live on another machine, this waits for it to finish.
    """
    target = Path(target)
    deadline = time.monotonic() + _RENAME_SECONDS
    while not target.exists() and target.parent.is_dir():
        aside = [
            (path, found)
            for path in target.parent.iterdir()
            if (found := _SIBLING.fullmatch(path.name))
            and (found["name"], found["kind"]) == (target.name, "old")
        ]
        if not aside:
            return
        path, found = aside[0]
        late, elsewhere = time.monotonic() > deadline, found["machine"] != _machine()
        if _writer_has_ended(found) or (late and elsewhere):
            with suppress(FileNotFoundError):  # another process is faster
                os.rename(path, target)
        elif late:
            return
        else:
            time.sleep(_POLL_SECONDS)


def discard_folder(folder: str | os.PathLike[str]) -> None:
    """Remove a folder so that a process killed on the way leaves nothing of its name."""
    aside = temporary_sibling(folder, "deleted")
    os.rename(folder, aside)
    shutil.rmtree(aside)


def temporary_sibling(target: str | os.PathLike[str], kind: str = "partial") -> Path:
    """Return a hidden name beside a path that nobody else uses, and that tells who uses it.

    Args:
        target: What is going to be made, replaced or removed.
        kind: ``partial``, ``tmp``, ``old`` or ``deleted``.
    """
    # On the same file system, else the rename would be a copy; hidden from patterns such as "*".
    target, pid = Path(target), os.getpid()
    writer = f"wavemare-{_machine()}-{pid}-{_process_start(pid)}-{secrets.token_hex(4)}"
    return target.with_name(f".{target.name}.{writer}.{kind}")


def remove_leftovers(folder: str | os.PathLike[str]) -> None:
    """Remove what processes have left in a folder that certainly have ended.

    These are temporary names of this module made by processes of this machine. Nothing else is
    touched: others may be at work in the folder. A folder that was moved aside, and that nothing
    has replaced, gets its name back.
    """
    for path in sorted(Path(folder).iterdir()):
        found = _SIBLING.fullmatch(path.name)
        if found is None or not _writer_has_ended(found):
            continue
        if found["kind"] == "old":
            restore_folder(path.with_name(found["name"]))
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)  # another process may remove it as well
        else:
            path.unlink(missing_ok=True)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Wait until the names in a folder are on the disk, so that a power cut keeps them."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that has nothing to synchronize
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: str | os.PathLike[str]) -> None:
    """Wait until all files below a folder are on the disk, and their names.

    Files and folders that are renamed or removed meanwhile are left out.
    """

    def failed(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for parent, _, names in os.walk(folder, onerror=failed):
        for path in (*(os.path.join(parent, name) for name in names), parent):
            with suppress(FileNotFoundError):
                sync_folder(path)


@contextmanager
def written_through(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Bring to the disk what is written below a folder, meanwhile; in the end all of it is there.

    Raises:
        OSError: The disk has failed, or is full.
    """
    ended = threading.Event()

    def bring() -> None:
        while not ended.wait(_FLUSH_SECONDS):
            sync_tree(folder)

    with ThreadPoolExecutor(1, "disk") as pool:
        brought = pool.submit(bring)
        try:
            yield
        finally:
            ended.set()
        brought.result()
    sync_tree(folder)


def _discard(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        discard_folder(path)
    else:
        path.unlink()


def _machine() -> str:
    return f"{zlib.crc32(this_machine().encode()):x}"


def _writer_has_ended(found: re.Match[str]) -> bool:
    if found["machine"] != _machine():
        return False
    pid = int(found["pid"])
    return process_has_ended(pid) or _process_start(pid) != int(found["start"])


def this_machine() -> str:
    """Return what says where this process's number counts: host, boot and container.

    The name alone does not, as another machine may be ``localhost``, too; nor does the boot, which
    machines share that go on from one snapshot.
    """
    boot = container = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        container = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()} {boot} {container}"


def process_state(pid: int) -> str:
    """Return the letter for what a process does; empty if there is none, ``?`` if unknown."""
    fields = _stat(pid)
    return fields[0] if fields else "" if fields is None else "?"


def _process_start(pid: int) -> int:
    """Return when a process began, in clock ticks since the boot; 0 if unknown."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def process_has_ended(pid: int) -> bool:
    """Whether a process has ended, also if its parent has not asked for its code yet."""
    return process_state(pid) in ("", "Z", "X")


def _stat(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/PID/stat`` from the state on; None if there is no process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return stat.rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError:
        return []


def read_json(file: Path, error: type[WavemareError], key: str, remedy: str) -> Any:
    """Read and parse a JSON file, see `parse_json`; raise an error of a kind if that fails."""
    try:
        return parse_json(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as failure:
        reason = f"it cannot be read ({getattr(failure, 'strerror', None) or failure})"
        raise error(key, str(file), reason, remedy) from failure


def parse_json(text: str) -> Any:
    """Parse JSON as it is standardised, in which no key of an object stands twice.

    Raises:
        ValueError: The reason, as part of a sentence: where the text is no JSON, a key that stands
            twice, NaN or infinity, nesting that is too deep or a number that is too long.
    """

    def parse() -> Any:
        return json.loads(
            text,
            parse_constant=_refuse_constant,
            object_pairs_hook=without_duplicates,
        )

    return say_what_is_wrong(parse)


def say_what_is_wrong(parse: Callable[[], Any]) -> Any:
    """Call a parser of JSON, and say of each way in which it may fail what it means.

    Raises:
        ValueError: See `parse_json`.
    """
    try:
        return parse()
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"not JSON at {place}: {error.msg}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except OverflowError:  # hjson, of 1e999
        raise ValueError("a number in it is too large") from None
    except ValueError as error:
        if "integer string conversion" not in str(error):
            raise
        raise ValueError("a number in it has too many digits") from None


def refuse_duplicates(
    pairs: list[tuple[str, Any]], refuse: Callable[[str, Any], NoReturn]
) -> dict[str, Any]:
    """Return the pairs of an object as a dictionary; ``refuse`` is called for a second value."""
    values = dict(pairs)
    if len(values) == len(pairs):
        return values
    values.clear()
    for key, value in pairs:
        if key in values:
            refuse(key, value)
        values[key] = value
    return values


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of an object as a dictionary.

    Raises:
        ValueError: A key stands twice.
    """
    return refuse_duplicates(pairs, _refuse_duplicate)


def _refuse_duplicate(key: str, value: Any) -> NoReturn:
    raise ValueError(f"the key {key!r} appears twice")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
