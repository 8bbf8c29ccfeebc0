# SPDX-License-Identifier: Apache-2.0
"""How ranks complete a checkpoint together: all files, their manifest, the name, ``latest``.

Each rank writes its own files and reports. The rank that owns the folder then writes the manifest,
renames the folder, points ``latest`` to it and removes the oldest. In the foreground the ranks
report by a collective. In the background they report through the process group's store, since a
collective of that thread could cross one of the training's.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepspeed import comm as dist

from wavemare.comm.waits import joining, waiting
from wavemare.engine.checkpoint.files import RankFiles
from wavemare.engine.checkpoint.manifest import MANIFEST, keep_last
from wavemare.engine.checkpoint.records import FileRecord, checksum
from wavemare.errors import CheckpointError
from wavemare.files import atomic_write_text, replace_folder, sync_folder

__all__ = ["BackgroundSave", "Save", "gather"]

logger = logging.getLogger("wavemare")

_POLL_S, _ASK_S = 0.05, 2.0
_SEEN_S = 10.0
"""Seconds for which rank 0, which may hold the store, waits until all ranks know the outcome."""
_AFTER_MAIN_S = 60.0
"""Seconds to wait after the script's end: an error may have ended the other ranks, too."""


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
    """

    files: RankFiles
    folder: Path
    tag: str
    partial: Path
    manifest: dict[str, Any] | None
    save_latest: bool
    keep: int | None

    @property
    def owns_folder(self) -> bool:
        """Whether this rank completes the folder."""
        return self.manifest is not None

    def complete(self) -> None:
        """Finish the checkpoint with the other ranks, on the training thread.

        Raises:
            CheckpointError: A rank could not write; the same one on all ranks. The previous
                checkpoint is untouched, and the files of this save are removed.
        """
        self.files.write_queued()
        reports = gather(self.files.report())
        raise_first(gather(self.finish(reports) if self.owns_folder else None))

    def finish(self, reports: Sequence[Mapping[str, Any]], reason: str | None = None) -> Any:
        """Complete the folder, or remove it; return value, reason and remedy of a failure.

        Args:
            reports: Of all ranks.
            reason: Why it cannot be completed, if that is known.
        """
        reason = next((r["failure"] for r in reports if r["failure"] is not None), reason)
        try:
            if reason is None:
                self._name_folder(reports)
                return None
        except Exception as error:  # the others wait for this rank's word
            words = getattr(error, "strerror", None) or error
            reason = f"rank {self.files.rank} could not complete it ({words})"
        shutil.rmtree(self.partial, ignore_errors=True)
        return [
            str(self.folder / self.tag),
            f"{reason}; {_free(self.folder):,} bytes are free there",
            "Make room for it, or save elsewhere; older checkpoints and latest are as they were",
        ]

    def _name_folder(self, reports: Sequence[Mapping[str, Any]]) -> None:
        written = {
            Path(path).resolve(): FileRecord(**record)
            for report in reports
            for path, record in report["written"].items()
        }
        paths = sorted(path for path in self.partial.rglob("*") if path.is_file())
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
        target = self.folder / self.tag
        replace_folder(self.partial, target)
        if self.save_latest:
            atomic_write_text(self.folder / "latest", self.tag)
            if self.keep is not None:
                self._remove_oldest(target, self.keep)

    def _remove_oldest(self, target: Path, keep: int) -> None:
        try:
            runs = (self.manifest or {}).get("runs", ())
            removed = keep_last(target.parent, keep, target.name, runs)
            logger.debug("checkpoint %s is complete; removed %s", self.tag, removed)
        except OSError as error:  # the new one is complete all the same
            logger.warning("an old checkpoint could not be removed: %s", error)


class BackgroundSave:
    """A save that a thread of each rank completes; ranks report through a store.

    Args:
        save: What it completes.
        store: Of the process group, under a prefix of this save's own.
        rank: This process.
        size: Number of ranks.
        timeout_s: Seconds to wait for the other ranks.
        ended: Returns which of some ranks have certainly ended; they are not waited for.
    """

    def __init__(
        self,
        save: Save,
        store: Any,
        rank: int,
        size: int,
        timeout_s: float,
        ended: Callable[[Collection[int]], Collection[int]] = lambda _: (),
    ) -> None:
        self._save, self._store, self._ended = save, store, ended
        self._rank, self._size, self._timeout_s = rank, size, timeout_s
        self._error: Exception | None = None
        self._present, self._after_main_s = size, 0.0
        # No daemon: the interpreter waits for it, so that a script that ends loses nothing.
        self._thread = threading.Thread(target=self._run, name="wavemare-checkpoint")
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
            CheckpointError: It has failed.
        """
        with joining(self._thread):
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._complete()
        except CheckpointError as error:  # raised where training asks for it
            self._error = error
        except RuntimeError as error:  # of torch's stores
            words = str(error).partition("\n")[0]
            self._error = _lost(f"the store of the process group has gone ({words})")
        except Exception as error:
            self._error = error
        del self._save, self._store

    def _complete(self) -> None:
        save, store = self._save, self._store
        save.files.write_queued()
        report = {**save.files.report(), "owner": save.owns_folder, "rank": self._rank}
        store.append("reports", json.dumps(report) + "\n")
        store.add("reported", 1)
        if save.owns_folder:
            reason = self._await_reports()
            reports = self._lines("reports")
            store.append("failures", json.dumps(save.finish(reports, reason)) + "\n")
            if store.add("finished", 1) >= sum(each["owner"] for each in reports):
                store.set("done", "")
        self._await_outcome()
        failures = self._lines("failures")
        store.add("seen", 1)
        if self._rank == 0:
            self._remove_keys()
        raise_first(failures)

    @waiting("a checkpoint's other ranks")
    def _await_reports(self) -> str | None:
        """Wait for the reports of all ranks; return why some do not come."""
        deadline, ask = (time.monotonic() + seconds for seconds in (self._timeout_s, _ASK_S))
        while self._store.add("reported", 0) < self._size:
            late = self._pause(deadline)
            if not late and time.monotonic() < ask:
                continue
            missing = self._missing()
            self._present = self._size - len(missing)
            if not missing:  # the last one was killed before it could count itself
                break
            # The last words of a rank that has just ended count.
            if lost := sorted({*self._ended(missing)} & {*self._missing()}):
                return f"ranks {lost} have ended without completing their parts"
            if late:
                return f"ranks {missing} have not written in {self._timeout_s:g} s"
            ask = time.monotonic() + _ASK_S
        self._present = self._size
        return None

    @waiting("a checkpoint's other ranks")
    def _await_outcome(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not self._store.check(["done"]):
            if self._pause(deadline):
                raise _lost(f"the folder's rank has not finished in {self._timeout_s:g} s")

    @waiting("a checkpoint's other ranks")
    def _remove_keys(self) -> None:
        """Remove the keys once all ranks have read them."""
        deadline = time.monotonic() + _SEEN_S
        while self._store.add("seen", 0) < self._present and not self._pause(deadline):
            pass
        for key in ("reports", "reported", "failures", "finished", "done", "seen"):
            self._store.delete_key(key)

    def _pause(self, deadline: float) -> bool:
        """Sleep a moment; return whether it is too late to wait on."""
        # Not store.wait, which would keep other threads from the store.
        time.sleep(_POLL_S)
        if not threading.main_thread().is_alive():
            self._after_main_s += _POLL_S
        return time.monotonic() > deadline or self._after_main_s > _AFTER_MAIN_S

    def _missing(self) -> list[int]:
        reported = self._lines("reports")
        return sorted({*range(self._size)} - {each["rank"] for each in reported})

    def _lines(self, key: str) -> list[Any]:
        return [json.loads(line) for line in self._store.get(key).splitlines()]


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks, by a collective on the training thread."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def raise_first(failures: Sequence[Any]) -> None:
    """Raise the first failure that `Save.finish` has returned."""
    found = [failure for failure in failures if failure is not None]
    if found:
        raise CheckpointError("checkpoint", *found[0])


def _lost(reason: str) -> CheckpointError:
    remedy = "Look at the other ranks' messages, and resume from the last complete checkpoint"
    return CheckpointError("checkpoint", "background save", reason, remedy)


def _free(folder: Path) -> int:
    while not folder.is_dir():
        folder = folder.parent
    return shutil.disk_usage(folder).free
