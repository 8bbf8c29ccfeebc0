# SPDX-License-Identifier: Apache-2.0
"""How ranks complete a checkpoint together: all files, their manifest, the name, ``latest``.

Each rank writes its own files and reports. The rank that owns the folder then writes the manifest,
renames the folder, points ``latest`` to it and removes the oldest.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed

from wavemare.comm.waits import joining
from wavemare.engine.checkpoint.files import RankFiles
from wavemare.engine.checkpoint.manifest import MANIFEST, FileRecord, checksum, keep_last
from wavemare.engine.launch.group import gather
from wavemare.errors import CheckpointError
from wavemare.files import (
    atomic_write_text,
    remove_leftovers,
    replace_folder,
    sync_folder,
)

_FULL = (errno.ENOSPC, errno.EDQUOT)
logger = logging.getLogger("wavemare")


@dataclass
class Save:
    """One save of one rank.

    Attributes:
        files: What this rank writes.
        folder: ``save_dir``.
        tag: The checkpoint's name in it.
        partial: The folder of a temporary name that takes the files.
        manifest: Of the checkpoint, without its files; None where another rank owns the folder.
        save_latest: Whether ``latest`` will name it.
        keep: How many complete ones stay in the folder then; None for all.
        node_local: Whether each node has a folder of its own.
    """

    files: RankFiles
    folder: Path
    tag: str
    partial: Path
    manifest: dict[str, Any] | None
    save_latest: bool
    keep: int | None
    node_local: bool = False

    def complete(self, group: Any = None) -> None:
        """Finish the checkpoint with the other ranks; all must call it.

        Raises:
            CheckpointError: A rank could not write; the same one on all ranks. The previous
                checkpoint is untouched, and the files of this save are removed.
        """
        self.files.write_queued()
        reports = gather(self.files.report(), group)
        failures = gather(self._finish(reports) if self.manifest is not None else None, group)
        for failure in failures:
            if failure is not None:
                raise CheckpointError("checkpoint", *failure)

    def _finish(self, reports: Sequence[Mapping[str, Any]]) -> list[str] | None:
        """Complete the folder, or remove it; return value, reason and remedy of a failure."""
        reason = next((r["failure"] for r in reports if r["failure"] is not None), None)
        unchanged = "older checkpoints and latest are unchanged"
        remedy = f"Save elsewhere; {unchanged}"
        try:
            if reason is None:
                self._name_folder(reports)
                remedy = "The checkpoint is complete: load it by its tag"
                self._point_to_it()
                return None
        except Exception as error:  # the others wait for this rank's word
            words = getattr(error, "strerror", None) or error
            reason = f"rank {self.files.rank} could not complete it ({words})"
        shutil.rmtree(self.partial, ignore_errors=True)
        if any(os.strerror(number) in reason for number in _FULL):
            remedy, reason = f"Make room for it; {unchanged}", f"{reason}; {_free(self.folder)}"
        return [str(self.folder / self.tag), reason, remedy]

    def _name_folder(self, reports: Sequence[Mapping[str, Any]]) -> None:
        here = self.files.report()["node"]
        written = {
            Path(path).resolve(): FileRecord(**record)
            for report in reports
            if report["node"] == here or not self.node_local
            for path, record in report["written"].items()
        }
        paths = sorted(path for path in self.partial.rglob("*") if path.is_file())
        if unseen := written.keys() - {path.resolve() for path in paths}:
            raise OSError(
                f"{min(unseen).name}, which another rank wrote, is not there: give a folder that "
                'all nodes share, or "use_node_local_storage"'
            )
        # Those that DeepSpeed copied by itself: its scripts, and tensors offloaded to NVMe.
        records = {p: written.get(p.resolve()) or checksum(p, sync=True) for p in paths}
        short = [p.name for p, record in records.items() if p.stat().st_size != record.bytes]
        if short:
            raise OSError(f"{short[0]} has another size than what was written")
        names = {p.relative_to(self.partial).as_posix(): asdict(r) for p, r in records.items()}
        atomic_write_text(
            self.partial / MANIFEST, json.dumps({**(self.manifest or {}), "files": names}, indent=1)
        )
        # A power cut must not leave the name without its files: contents, then names, then this.
        for folder in (path for path in self.partial.rglob("*") if path.is_dir()):
            sync_folder(folder)
        sync_folder(self.partial)
        replace_folder(self.partial, self.folder / self.tag)

    def _point_to_it(self) -> None:
        if self.save_latest:
            atomic_write_text(self.folder / "latest", self.tag)
            if self.keep is not None:
                self._remove_oldest(self.folder / self.tag, self.keep)

    def _remove_oldest(self, target: Path, keep: int) -> None:
        try:
            runs = (self.manifest or {}).get("runs", ())
            removed = keep_last(target.parent, keep, target.name, runs)
            logger.debug("checkpoint %s is complete; removed %s", self.tag, removed)
        except OSError as error:  # the new one is complete all the same
            logger.warning("an old checkpoint could not be removed: %s", error)


class BackgroundSave:
    """A save that a thread of each rank completes while training goes on."""

    def __init__(self, save: Save, group: Any) -> None:
        self._error: Exception | None = None
        # No daemon: the interpreter waits for it, so that a script that ends loses nothing.
        self._thread = threading.Thread(
            target=self._run, args=(save, group), name="wavemare-checkpoint"
        )
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        """Whether it has ended with an error, which `wait` raises."""
        return self._error is not None

    def fails_within(self, seconds: float) -> bool:
        """Wait so long at most; return whether it has ended with an error."""
        with joining(self._thread):
            self._thread.join(seconds)
        return self.has_failed

    def wait(self) -> None:
        """Wait until it has ended.

        Raises:
            CheckpointError: A rank could not write.
            RuntimeError: A rank was lost.
        """
        with joining(self._thread):
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self, save: Save, group: Any) -> None:
        try:
            save.complete(group)
        except Exception as error:  # raised where training asks for it
            self._error = error


def background_group() -> Any:
    """Make the process group of background saves; all ranks must call it.

    It has collectives of its own, which cannot cross those of the training. A slow writer never
    fails a save: a rank that has ended breaks its connections, and one that has stopped is found
    when training waits for it.

    Raises:
        CheckpointError: torch's backend MPI has no store, in which the ranks could meet.
    """
    if distributed.get_backend() == "mpi":
        reason = "the process group has no store for the writers (backend MPI)"
        raise CheckpointError("wavemare.checkpoint.background", True, reason, "Leave it out")
    return distributed.new_group(backend="gloo", timeout=timedelta(weeks=1))


def _free(folder: Path) -> str:
    try:
        while not folder.is_dir():
            folder = folder.parent
        return f"{shutil.disk_usage(folder).free:,} bytes are free there"
    except OSError as error:
        return f"{folder} cannot be read ({error.strerror})"


def tidy(*folders: Path) -> None:
    """Make folders, and remove what killed saves have left in them."""
    for folder in dict.fromkeys(folders):
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
