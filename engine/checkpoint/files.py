# SPDX-License-Identifier: Apache-2.0
"""The files of a checkpoint: how a rank writes its own, with checksums, and reads them safely.

DeepSpeed hands every file to the ``checkpoint_engine`` of its engine. Ours computes checksums,
keeps an error instead of raising it while other ranks wait, and unpickles only tensors, plain
values and `HARMLESS`.
"""

from __future__ import annotations

import argparse
import datetime
import enum
import glob
import io
import os
import pathlib
import pickle
import socket
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import wraps
from pathlib import Path
from typing import IO, Any, NoReturn, cast

import numpy as np
import torch
import xxhash
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from numpy._core import multiarray
from torch import Tensor
from torch.utils._pytree import tree_map_only

from wavemare.engine.checkpoint.manifest import FileRecord
from wavemare.engine.seams import replaced
from wavemare.errors import CheckpointError
from wavemare.files import temporary_sibling

GETATTR = "builtins.getattr"
"""What Python 3.11.0 to 3.11.3 write for a member (Debian 12 has 3.11.2); later versions do not."""


class Foreign:
    """Stands for an object of a class whose code is not here and would not be run."""

    def __new__(cls, *_: Any) -> Foreign:
        """Take whatever the class would."""
        return object.__new__(cls)


def enum_member(kind: Any, name: Any) -> Any:
    """Return a member of an enumeration, for `GETATTR` in a pickle: nothing else is looked up.

    Raises:
        pickle.UnpicklingError: It is not the name of a member.
    """
    if kind is Foreign:
        return Foreign()
    if not (isinstance(kind, enum.EnumMeta) and isinstance(name, str)):
        raise pickle.UnpicklingError(f"Unsupported GLOBAL {GETATTR} of {kind!r}")
    if name not in kind.__members__:
        raise pickle.UnpicklingError(
            f"Unsupported GLOBAL {GETATTR} of {kind!r}: no member {name!r}"
        )
    return kind.__members__[name]


class PartOfShapes:
    """Stands for ``param_shapes`` in files from which DeepSpeed would make one rank's part.

    The functions of ``deepspeed.utils.zero_to_fp32`` go through the shapes before anything else;
    nothing that loads a checkpoint does.

    Args:
        reason: Why they cannot put the model together.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __iter__(self) -> NoReturn:
        """Refuse.

        Raises:
            CheckpointError: Always.
        """
        raise CheckpointError("zero_to_fp32", "a checkpoint of parts", self.reason, FROM_AN_ENGINE)


FROM_AN_ENGINE = (
    "Load the checkpoint into an engine of the same configuration, and save from there "
    "(wavemare.save_pretrained)"
)
"""How to get a model out of a checkpoint that DeepSpeed's scripts cannot put together."""

HARMLESS: list[Any] = [
    PartOfShapes,
    DynamicLossScaler,
    LossScaler,
    ZeroStageEnum,
    fragment_address,
    (enum_member, GETATTR),
    *(np.ndarray, np.dtype, multiarray._reconstruct, multiarray.scalar),
    *(type(np.dtype(kind)) for kind in (*"?bBhHiIlLqQefdFD", "U", "S", "M", "m")),
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
    *(argparse.Namespace, types.SimpleNamespace, pathlib.PosixPath, pathlib.PurePosixPath),
]
"""Classes whose objects do nothing when they are made: of DeepSpeed's files, of client states."""

_TELLING = (RuntimeError, OSError, pickle.UnpicklingError, EOFError)
"""Errors whose text says enough without their name."""
_LONGEST = 300
_SHAPES = "param_shapes"
_loading_lock = threading.RLock()


@dataclass
class RankFiles:
    """What one rank writes of one checkpoint.

    Attributes:
        rank: This process.
        background: Whether `take` copies files into memory, and `write_queued` writes them.
        zipped: ``checkpoint.checkpoint_serialization``: torch's zip archives.
        written: Records by path.
        failure: What went wrong first, as a reason; nothing is written after it.
    """

    rank: int
    background: bool
    zipped: bool = True
    written: dict[str, FileRecord] = field(default_factory=dict)
    failure: str | None = None
    _queue: list[tuple[str, io.BytesIO]] = field(default_factory=list)

    def take(self, state: Any, path: str) -> None:
        """Write a file, or keep its bytes in memory; `failure` keeps an error."""
        self.attempt(path, lambda: self._copy(state, path))

    def write_queued(self) -> None:
        """Write the files in memory, and free each."""
        while self._queue:
            path, content = self._queue.pop(0)
            self.attempt(path, lambda c=content, p=path: self._write(c, p))  # type: ignore[misc]

    def attempt(self, path: str, action: Callable[[], object]) -> None:
        """Do something for a file unless something has failed; `failure` keeps an error."""
        if self.failure is not None:
            return
        try:
            action()
        except Exception as error:  # the other ranks must learn of it, whatever it is
            detail = error.strerror if isinstance(error, OSError) and error.strerror else error
            self.failure = f"rank {self.rank} could not write {Path(path).name} ({detail})"

    def report(self) -> dict[str, Any]:
        """Return what the owner of the folder needs to know of this rank, for JSON."""
        written = {path: asdict(record) for path, record in self.written.items()}
        return {"written": written, "failure": self.failure, "node": socket.gethostname()}

    def _copy(self, state: Any, path: str) -> None:
        if self.background:
            content = io.BytesIO()
            torch.save(state, content, _use_new_zipfile_serialization=self.zipped)
            self._queue.append((path, content))
        else:
            self._write(state, path)

    def _write(self, state: Any, path: str) -> None:
        self.written[path] = write_file(state, path, zipped=self.zipped)


class CheckpointFiles(CheckpointEngine):
    """DeepSpeed's way to its files, in place of its ``TorchCheckpointEngine``.

    Args:
        zipped: ``checkpoint.checkpoint_serialization``: torch's format of today, a zip archive.

    Attributes:
        current: Takes the files of the present save; without one, files are written at once.
        part: Why ``zero_to_fp32`` cannot put what is saved together; None if it can.
    """

    current: RankFiles | None = None
    part: str | None = None

    def __init__(self, *, zipped: bool = True) -> None:
        super().__init__()
        self.name = type(self).__name__
        self.zipped = zipped

    def create(self, info: Any) -> None:
        """Nothing: `current` says what is to be written."""

    def commit(self, info: Any) -> bool:
        """Nothing: the ranks complete a checkpoint together, afterwards."""
        return True

    def save(self, state_dict: Any, path: str) -> None:
        """Write a file as ``torch.save``."""
        path = str(path)
        if self.part is not None and isinstance(state_dict, dict) and _SHAPES in state_dict:
            state_dict = {**state_dict, _SHAPES: PartOfShapes(self.part)}
        if self.current is not None:
            self.current.take(state_dict, path)
        else:
            write_file(state_dict, path, zipped=self.zipped)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder."""
        if self.current is not None:
            self.current.attempt(str(path), lambda: os.makedirs(path, exist_ok=exist_ok))
        else:
            os.makedirs(path, exist_ok=exist_ok)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read a file as ``torch.load``.

        Raises:
            CheckpointError: It is no such file, or holds what could run code.
        """
        return read_file(path, map_location)


class _Stream:
    """A file being written: its checksum and its first error are kept.

    torch's writer ends the process if ``write`` raises, so that later writes do nothing instead.
    """

    def __init__(self, path: str) -> None:
        self._file = open(path, "wb")
        self._checksum = xxhash.xxh3_64()
        self._size = 0
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if self._error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self._error = error
            self._checksum.update(data)
            self._size += size
        return size

    def flush(self) -> None:
        """For ``torch.save``; `close` flushes."""

    def close(self) -> FileRecord:
        """Wait until the content is on the disk.

        Raises:
            OSError: Not all of it could be written.
        """
        try:
            if self._error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                return FileRecord(self._size, self._checksum.hexdigest())
            raise self._error
        finally:
            with suppress(OSError):  # the buffer does not fit either
                self._file.close()


def write_file(state: Any, path: str, *, zipped: bool = True) -> FileRecord:
    """Write as ``torch.save``, down to the disk, and return the record of what was written.

    Args:
        state: What ``torch.save`` takes, or what it has written into memory.
        path: The file.
        zipped: Whether torch writes a zip archive.

    Raises:
        OSError: It could not be written.
    """
    stream = _Stream(path)
    try:
        if isinstance(state, io.BytesIO):
            stream.write(state.getbuffer())
        else:
            torch.save(state, cast(IO[bytes], stream), _use_new_zipfile_serialization=zipped)
    finally:
        record = stream.close()
    return record


def read_file(
    path: str | os.PathLike[str], map_location: Any = "cpu", *, mmap: bool | None = None
) -> Any:
    """Read as ``torch.load``, making nothing but harmless objects.

    Raises:
        CheckpointError: It is no such file, or holds something else.
    """
    return _read(torch.load, path, path, map_location=map_location, mmap=mmap)


def check_client_state(state: Mapping[str, Any]) -> None:
    """Check that `read_file` would give a client state back: what is not read is lost.

    Raises:
        CheckpointError: A value cannot be pickled, or holds an object of another class.
    """
    for key, value in state.items():
        _check(f"client_state[{key!r}]", value)


def check_scheduler(scheduler: Any) -> None:
    """Check that `read_file` would give the state of a scheduler back, if it has one.

    Raises:
        CheckpointError: A value cannot be pickled, or holds an object of another class.
    """
    state = scheduler.state_dict() if hasattr(scheduler, "state_dict") else {}
    for name, value in state.items():
        _check(f"lr_scheduler.state_dict()[{name!r}]", value)


def check_optimizer_state(optimizer: Any) -> None:
    """Check that `read_file` would give back what an optimizer keeps beside tensors.

    Raises:
        CheckpointError: A value cannot be pickled, or holds an object of another class.
    """
    groups = getattr(optimizer, "param_groups", ())
    settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    _check("optimizer.param_groups", settings)
    state = list(getattr(optimizer, "state", {}).values())
    _check("optimizer.state", tree_map_only(torch.Tensor, lambda _: None, state))


def _check(key: str, value: Any) -> None:
    buffer = io.BytesIO()
    try:
        # What tensors hold is always read, and would take time and memory here.
        torch.save(tree_map_only(torch.Tensor, lambda t: t.new_empty(0), value), buffer)
        buffer.seek(0)
        _read(torch.load, key, buffer, map_location="cpu")
    except Exception as error:  # of the value's own methods, too
        detail = getattr(error, "reason", f"{type(error).__name__}: {error}")
        reason = f"a checkpoint could not give it back: {detail}"
        remedy = (
            "Save plain values, tensors or arrays instead, or call "
            "torch.serialization.add_safe_globals([its class]) before each save and load"
        )
        raise CheckpointError(key, value, reason, remedy) from error


def taken_literally(folder: str) -> AbstractContextManager[None]:
    """Return the context in which DeepSpeed finds files in a folder whatever its name is.

    It puts the name before patterns such as ``mp_rank_*``.
    """
    find = glob.glob

    def literal(pattern: str, *args: Any, **options: Any) -> list[str]:
        if str(pattern).startswith(folder):
            pattern = glob.escape(folder) + str(pattern).removeprefix(folder)
        return find(pattern, *args, **options)

    return replaced(glob, {"glob": literal})


@contextmanager
def safe_loading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Have every ``torch.load`` of this thread make nothing but harmless objects, as `read_file`.

    DeepSpeed reads some files past its checkpoint engine, universal checkpoints' for one, without
    any hook. Other threads get what they ask for, or wait to load safely themselves; processes
    forked inside are bound as well.

    Args:
        path: What an error names where ``torch.load`` was given no path.

    Raises:
        CheckpointError: One of them cannot read its file, or has found something else.
    """
    with _loading_lock:
        load, thread = torch.load, threading.get_ident()

        @wraps(load)
        def reading(f: Any, *args: Any, **options: Any) -> Any:
            if threading.get_ident() == thread:
                return _read(load, path, f, *args, **options)
            return load(f, *args, **options)

        with replaced(torch, {"load": reading}):
            yield


def _read(load: Callable[..., Any], place: Any, f: Any, *args: Any, **options: Any) -> Any:
    """Load safely, with one error, which also survives the way out of a worker process."""
    # They stay known: taking them back would meet the loads of other threads.
    torch.serialization.add_safe_globals(HARMLESS)
    try:
        return load(f, *args, **{**options, "weights_only": True})
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # damaged bytes reach pickle, zip, struct and torch
        raise _unreadable(f if isinstance(f, str | os.PathLike) else place, error) from error


def _unreadable(path: str | os.PathLike[str], error: Exception) -> CheckpointError:
    """Return the error for a file with something else than harmless objects, or for damage."""
    if isinstance(error, pickle.UnpicklingError | EOFError):
        reason = f"the file cannot be read safely ({_first_line(error)})"
        remedy = (
            "Do not load it unless you wrote it; an object of your own in client_state is read "
            "after torch.serialization.add_safe_globals([its class])"
        )
    else:
        reason = f"the file cannot be read ({_first_line(error)})"
        remedy = "Resume from another checkpoint"
    return CheckpointError("checkpoint", str(path), reason, remedy)


def _first_line(error: Exception) -> str:
    """Return what torch says that it has met, without its advice on how to load it anyway."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "GLOBAL" in line or line.startswith("Unsupported")]
    text = [*telling, *lines, type(error).__name__][0].split(". Please")[0].rstrip(".")
    if lines and not isinstance(error, _TELLING):
        text = f"{type(error).__name__}: {text}"
    # Of a damaged file's names it may quote thousands of characters, and control characters.
    return "".join(c if c.isprintable() else "?" for c in text[:_LONGEST])


def refuse_scripts(reason: str, folder: str) -> None:
    """Replace DeepSpeed's scripts in a folder, which cannot put its model together."""
    for script in ("zero_to_fp32.py", "zero_to_torch.py"):
        told = f"{script} cannot put this model together: {reason}. {FROM_AN_ENGINE}."
        Path(folder, script).write_text(f"raise SystemExit({told!r})\n", encoding="utf-8")


def write_weights(file: Path, state: dict[str, Tensor] | None) -> None:
    """Write the file of rank 0, which alone has weights; an older one stays until it is whole."""
    if state is None:
        return
    partial = temporary_sibling(file, "tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, partial)
        os.replace(partial, file)
    except (OSError, RuntimeError) as error:
        partial.unlink(missing_ok=True)
        reason = f"the weights could not be written ({error})"
        raise CheckpointError("save_dir", str(file), reason, "Choose another folder") from error
