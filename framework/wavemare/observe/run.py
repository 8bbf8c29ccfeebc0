# SPDX-License-Identifier: Apache-2.0
"""A run folder: what was asked, what was measured, a picture of it and a summary."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import Any

from wavemare.errors import ConfigError, DataError
from wavemare.files import atomic_write_bytes, atomic_write_text
from wavemare.observe.lines import Lines

__all__ = ["Run", "json_lines", "read_metrics"]

_PACKAGES = ("wavemare", "torch", "deepspeed", "transformers", "datasets", "tokenizers", "mpi4py")
_MACHINE = ("processor", "cores", "memory_bytes", "accelerator", "threads_per_rank")


class Run:
    """The folder of one training run, written by global rank 0 alone.

    On the other ranks every method does nothing, so that a recipe reads the same on all of them.

    Args:
        folder: Made if it does not exist; a run that is resumed is given its old folder.
        rank: Global rank of this process.

    Raises:
        ConfigError: The folder cannot be made or written.
    """

    def __init__(self, folder: Path, *, rank: int) -> None:
        self.folder = Path(folder)
        self._writes = rank == 0
        self._metrics = Lines(self.metrics_file, self.folder)
        if self._writes:
            _make_writable(self.folder)

    @property
    def metrics_file(self) -> Path:
        """One JSON object per line, in the order of the steps."""
        return self.folder / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints, unless the run says that they are elsewhere."""
        return self.folder / "checkpoints"

    def begin(self, *, done: int | None) -> Path | None:
        """Make the folder ready: an older run that does not go on moves aside, whole.

        Args:
            done: Optimizer steps of the run that goes on, whose lines after them are cut off; None
                if a new one begins.

        Returns:
            The older run's new name; None if there was none, and on ranks that do not write.
        """
        if done is not None:
            self.truncate_after(done)
        elif self.metrics_file.exists() or _holds_something(self.checkpoints):
            return self.set_aside()
        return None

    def set_aside(self) -> Path | None:
        """Rename an older run's folder to ``NAME.1`` (or the next free number) and begin anew.

        Returns:
            The older run's new name; None on ranks that do not write.

        Raises:
            ConfigError: The new folder cannot be made or written.
        """
        if not self._writes:
            return None
        self.close()
        numbered = (self.folder.with_name(f"{self.folder.name}.{n}") for n in count(1))
        older = next(path for path in numbered if not path.exists())
        self.folder.rename(older)
        _make_writable(self.folder)
        return older

    def write_config(
        self, configuration: Mapping[str, Any], *, world_size: int | None = None
    ) -> None:
        """Write ``config.json``: the resolved configuration and the environment that it ran in.

        Args:
            configuration: Everything that decides the result; values that are not JSON (paths)
                are written as text.
            world_size: Number of ranks; by default the launcher's ``WORLD_SIZE``.
        """
        if self._writes:
            content = {
                "configuration": dict(configuration),
                "environment": _environment(world_size),
            }
            atomic_write_text(self.folder / "config.json", _json(content))

    def log(self, step: int, **metrics: float | None) -> None:
        """Append one line to ``metrics.jsonl``, complete on disk when the call returns.

        If the disk is full, the file ends with the line before, and a warning says so (`Lines`).

        Args:
            step: Optimizer steps done when the values were measured.
            metrics: Numbers. Those that are not finite become null: JSON has no word for them.
        """
        if not self._writes:
            return
        line = {"step": step, **{name: _plain(value) for name, value in metrics.items()}}
        self._metrics.add(json.dumps(line, allow_nan=False) + "\n")

    def truncate_after(self, step: int) -> None:
        """Cut off the lines after a step, as a run that resumes there will write them again.

        Args:
            step: The last step to keep; -1 begins anew.
        """
        if not self._writes or not self.metrics_file.exists():
            return
        self.close()
        kept = [line for line in read_metrics(self.metrics_file) if line["step"] <= step]
        atomic_write_text(self.metrics_file, "".join(json.dumps(line) + "\n" for line in kept))

    def curve(self, *, baselines: Mapping[str, float] | None = None) -> None:
        """Draw ``loss.png`` from ``metrics.jsonl``: ``loss`` a line, ``eval_loss`` points.

        Args:
            baselines: Losses to compare with, by name, drawn as horizontal lines.
        """
        if self._writes:
            # matplotlib takes long to import and is needed once, at the end.
            from wavemare.observe.curve import draw_loss

            lines = read_metrics(self.metrics_file) if self.metrics_file.exists() else []
            train, validation = _series(lines, "loss"), _series(lines, "eval_loss")
            picture = draw_loss(train, validation, baselines or {})
            atomic_write_bytes(self.folder / "loss.png", picture)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Write ``summary.json`` and the same as tables in ``summary.md``.

        Args:
            values: Results by name; a value that is itself a mapping becomes a table of its own.
        """
        if self._writes:
            atomic_write_text(self.folder / "summary.json", _json(values))
            atomic_write_text(self.folder / "summary.md", _markdown(values))

    def close(self) -> None:
        """Close ``metrics.jsonl``; a later `log` opens it again."""
        self._metrics.close()


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Read a ``metrics.jsonl``.

    Args:
        file: One JSON object with a ``"step"`` per line. A last line without its end, left by a
            process that was killed as it wrote, is passed over.

    Raises:
        DataError: Another line is no such object; the message names it.
    """
    return json_lines(file, _is_metrics, "metrics")


def json_lines(file: Path, valid: Callable[[object], bool], what: str) -> list[dict[str, Any]]:
    """Read a file of JSON objects, one per line; a last line without its end is passed over.

    Args:
        file: The file.
        valid: Whether a value is an object of the kind that the file holds.
        what: What the file holds, for the error.

    Raises:
        DataError: A line is no such object, or the file is no text.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (UnicodeDecodeError, OSError) as error:
        reason = f"these {what} cannot be read ({getattr(error, 'strerror', None) or 'no text'})"
        remedy = "Remove the file, or start a run in a new folder"
        raise DataError(what, str(file), reason, remedy) from None
    values = []
    for number, text in enumerate(lines[:-1], start=1):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not valid(value):
            raise DataError(
                f"{file}:{number}",
                text,
                f"this line of {what} is not a JSON object with a step",
                "Remove the line, or start a run in a new folder",
            )
        values.append(value)
    return values


def _is_metrics(line: object) -> bool:
    return isinstance(line, dict) and isinstance(line.get("step"), int)


def _holds_something(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _make_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"this run folder cannot be made ({error.strerror})"
        raise ConfigError("--output", str(folder), reason, "Name another folder") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            "--output", str(folder), "this run folder cannot be written", "Name another folder"
        )


def _environment(world_size: int | None) -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions,
        "platform": platform.platform(),
        "machine": _machine(),
        "world_size": world_size or int(os.environ.get("WORLD_SIZE", "1")),
        # sys.argv hides "-m module" and the interpreter's own options.
        "command": list(sys.orig_argv),
    }


def _machine() -> dict[str, Any]:
    # torch, which it asks, is there in whatever trains; it takes long to import where it is not.
    from wavemare.bench.machine import describe_machine

    known = describe_machine()
    return {key: known[key] for key in _MACHINE}


def _plain(value: float | None) -> float | int | None:
    if value is None or isinstance(value, int):
        return value
    number = float(value)  # numpy's and torch's scalars are not JSON
    return number if math.isfinite(number) else None


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(_finite(values), indent=2, default=str, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _series(lines: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(line["step"], line[name]) for line in lines if line.get(name) is not None]


def _markdown(values: Mapping[str, Any]) -> str:
    return "\n".join(_tables("Summary", values, level=1)) + "\n"


def _tables(title: str, values: Mapping[str, Any], *, level: int) -> Iterator[str]:
    yield f"{'#' * level} {title}"
    plain = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    if plain:
        yield from ("", "| | |", "|---|---|")
        yield from (f"| {_cell(key)} | {_cell(value)} |" for key, value in plain.items())
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield ""
            yield from _tables(str(key), value, level=level + 1)


def _cell(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
