# SPDX-License-Identifier: Apache-2.0
"""How ranks complete a checkpoint together: all files, the list of them, the name, ``latest``.

Each rank writes its own files; when all have reported, the rank that owns the folder lists them,
gives the folder its name, points ``latest`` to it and removes the oldest; when it has reported,
all know how it went. In the background the ranks meet in the process group's store, since a
collective of this thread could cross one of the training's.
"""

from __future__ import annotations

import ctypes
import json
import logging
import random
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from deepspeed import comm as dist

from wavemare.comm.waits import joining, waiting
from wavemare.engine.checkpoint.files import RankFiles
from wavemare.engine.checkpoint.manifest import MANIFEST, keep_last
from wavemare.engine.checkpoint.records import FileRecord, checksum
from wavemare.errors import CheckpointError
from wavemare.files import atomic_write_text, replace_folder, sync_folder

__all__ = ["BackgroundSave", "Meeting", "Save", "StoreMeeting", "meet_by_collective"]

logger = logging.getLogger("wavemare")

Meeting = Callable[[Any], Iterable[Any]]
"""Gives every rank's value to all; every rank calls it, as often as the others."""
_Ended = Callable[[Collection[int]], Collection[int]]

_POLL_S, _LONGEST_POLL_S = 0.02, 0.1  # rank 0 may leave, with the store, once all have met
# When a script has ended: by an error that the other ranks may not survive, more often than not.
_AFTER_MAIN_S = 60.0


@dataclass
class Save:
    """One save of one rank.

    Attributes:
        files: What this rank writes.
        folder: ``save_dir``.
        tag: The checkpoint's name in it.
        partial: The folder of a temporary name that the files are written into.
        manifest: Of the checkpoint, but for the files; None where another rank owns the folder.
        save_latest: Whether ``latest`` will name it.
        keep: How many complete ones stay in the folder then; None for all.
        meet: How the ranks meet.
    """

    files: RankFiles
    folder: Path
    tag: str
    partial: Path
    manifest: dict[str, Any] | None
    save_latest: bool
    keep: int | None
    meet: Meeting

    def complete(self) -> None:
        """Write what is not written yet, and finish the checkpoint with the other ranks.

        Raises:
            CheckpointError: A rank could not write; the same one on all ranks. What was there
                before is untouched, and the files of this save are removed.
        """
        self.files.write_queued()
        reports = self.meet(self.files.report())
        failure = None
        if self.manifest is not None:
            failure = self._finish(list(reports))
        failures = [found for found in self.meet(failure) if found is not None]
        if failures:
            raise CheckpointError("checkpoint", *failures[0])

    def _finish(self, reports: Sequence[Mapping[str, Any]]) -> list[str] | None:
        """Complete the folder, or remove it; return value, reason and remedy of a failure."""
        try:
            reason = next((r["failure"] for r in reports if r["failure"] is not None), None)
            if reason is None:
                self._name_folder(reports)
                return None
        except Exception as error:  # the others wait for this rank's word
            words = getattr(error, "strerror", None) or error
            reason = f"rank {self.files.rank} could not complete it ({words})"
        shutil.rmtree(self.partial, ignore_errors=True)
        needed = sum(int(report["needed"]) for report in reports)
        return [
            str(self.folder / self.tag),
            f"{reason}; it needs {needed:,} bytes, and {_free(self.folder):,} are free there",
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
    """A save that a thread completes.

    Args:
        save: What it completes.
    """

    def __init__(self, save: Save) -> None:
        self.tag = save.tag
        self._save = save
        self._error: Exception | None = None
        # Not a daemon: the interpreter waits for it, so that a script that just ends loses nothing.
        self._thread = threading.Thread(target=self._run, name="wavemare-checkpoint")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._save.complete()
        except Exception as error:  # raised where training asks for it
            self._error = error
        del self._save
        _give_back_memory()

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
        if self._thread.is_alive():
            logger.debug("waiting until checkpoint %s is written", self.tag)
            with joining(self._thread):
                self._thread.join()
        if self._error is not None:
            raise self._error


def _give_back_memory() -> None:
    """Let the C library return what pickling has left free between what still lives.

    Otherwise a process keeps more of such holes now and then (docs/results/soak.md).
    """
    with suppress(AttributeError, OSError):  # not glibc's
        ctypes.CDLL(None).malloc_trim(0)


def meet_by_collective(value: Any) -> list[Any]:
    """Meet in the process group of all ranks, on the thread that trains."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class StoreMeeting:
    """Meets in a store, which any thread may use, by few accesses whatever the number of ranks.

    Args:
        store: The process group's, under a prefix of this save's own.
        rank: This process.
        ranks: How many there are.
        timeout_s: For how long the others are waited for.
        ended: Returns which of some ranks have certainly ended, and are not waited for.
        ask_s: How often those that have not come are asked whether they still run.
        asked: How many are asked at a time.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: int,
        timeout_s: float,
        ended: _Ended | None = None,
        *,
        ask_s: float = 2.0,
        asked: int = 64,
    ) -> None:
        self._store = store
        self._rank, self._ranks, self._timeout_s = rank, ranks, timeout_s
        self._ended = ended
        self._ask_s, self._asked = ask_s, asked
        self._count = 0

    def __call__(self, value: Any) -> Iterator[Any]:
        """Meet; values are fetched by who iterates over them.

        Raises:
            CheckpointError: Another rank has ended or did not come in time, or the store has gone.
        """
        values, arrived, number, complete = self._keys(self._count)
        self._count += 1
        with _naming_loss():
            self._store.append(values, json.dumps([self._rank, value]) + "\n")
            self._store.append(arrived, f"{self._rank}\n")
            if self._store.add(number, 1) == self._ranks:
                self._store.set(complete, "")
            self._await(arrived, complete)
        return self._values(values)

    def _values(self, key: str) -> Iterator[Any]:
        with _naming_loss():
            lines = self._store.get(key).splitlines()
        yield from (value for _, value in sorted(map(json.loads, lines), key=itemgetter(0)))

    @waiting("a checkpoint's other ranks")
    def _await(self, arrived: str, complete: str) -> None:
        # Not store.wait, which would keep other threads from the store all the while.
        began = now = time.monotonic()
        deadline, ask = now + self._timeout_s, now + self._ask_s
        while not self._store.check([complete]):
            now = time.monotonic()
            if not threading.main_thread().is_alive():
                deadline = min(deadline, now + _AFTER_MAIN_S)
            if now > min(deadline, ask):
                missing = self._missing(arrived)
                if not missing:  # the last one was killed before it could say so
                    return
                if now > deadline:
                    raise _lost(f"ranks {missing} have not written in {self._timeout_s:g} s")
                self._check_missing(missing, arrived)
                ask = time.monotonic() + self._ask_s
            time.sleep(min(max(_POLL_S, (now - began) / 10), _LONGEST_POLL_S))

    def _check_missing(self, missing: Sequence[int], arrived: str) -> None:
        if self._ended is None:
            return
        # Not of the generator that the script may have seeded.
        asked = random.SystemRandom().sample(missing, min(len(missing), self._asked))
        # What one has said just before it ended counts.
        if lost := sorted({*self._ended(asked)} & {*self._missing(arrived)}):
            raise _lost(f"ranks {lost} have ended without completing their parts")

    def _missing(self, arrived: str) -> list[int]:
        return sorted({*range(self._ranks)} - {*map(int, self._store.get(arrived).split())})

    def forget(self) -> None:
        """Remove what was said, once no rank can ask for it; one rank does it for all."""
        for count in range(self._count if self._rank == 0 else 0):
            for key in self._keys(count):
                self._store.delete_key(key)

    def _keys(self, count: int) -> list[str]:
        return [f"{count}/{name}" for name in ("values", "arrived", "number", "complete")]


@contextmanager
def _naming_loss() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # of torch's stores
        if isinstance(error, CheckpointError):
            raise
        reason = f"the store of the process group has gone ({str(error).splitlines()[0]})"
        raise _lost(reason) from error


def _lost(reason: str) -> CheckpointError:
    remedy = "Look at the other ranks' messages, and resume from the last complete checkpoint"
    return CheckpointError("checkpoint", "background save", reason, remedy)


def _free(folder: Path) -> int:
    while not folder.is_dir():
        folder = folder.parent
    return shutil.disk_usage(folder).free
