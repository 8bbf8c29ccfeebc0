# SPDX-License-Identifier: Apache-2.0
"""A run folder: what was asked, what was measured, a picture of it and a summary."""

from __future__ import annotations

import fcntl
import io
import json
import math
import os
import platform
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import IO, Any

from wavemare.errors import ConfigError, os_errors
from wavemare.extras import is_installed
from wavemare.files import atomic_write_bytes, atomic_write_text, check_writable
from wavemare.observe.lines import Lines, read_metrics

_PACKAGES = ("wavemare", "torch", "deepspeed", "transformers", "datasets", "tokenizers", "mpi4py")
_LOCK = ".lock"
"""Locked by the process that writes the folder, until it ends."""


class Run:
    """The folder of one training run, written by global rank 0 alone.

    On the other ranks every method does nothing, so that a recipe reads the same on all of them.

    Args:
        folder: Made if it does not exist; a run that is resumed is given its old folder.
        rank: Global rank of this process.

    Attributes:
        metrics_file: One JSON object per line, in the order of the steps.
        checkpoints: Folder of the checkpoints, unless the run says that they are elsewhere.

    Raises:
        ConfigError: The folder cannot be made or written.
    """

    def __init__(self, folder: Path, *, rank: int) -> None:
        self.folder = Path(folder)
        self.metrics_file = self.folder / "metrics.jsonl"
        self.checkpoints = self.folder / "checkpoints"
        self._writes = rank == 0
        self._metrics = Lines(self.metrics_file, self.folder)
        self._lock: IO[str] | None = None
        if self._writes:
            check_writable("--output", self.folder, is_folder=True)

    def begin(self, *, done: int) -> Path | None:
        """Make the folder ready: an older run that does not go on is renamed to ``NAME.1``, whole.

        Args:
            done: Optimizer steps of the run that goes on, whose lines after them are cut off; 0 if
                a new one begins.

        Returns:
            The older run's new name; None if there was none, and on ranks that do not write.

        Raises:
            ConfigError: Another process still writes the folder, or it cannot be renamed or made.
        """
        if not self._writes:
            return None
        self._acquire()
        if done:  # it resumes there, and will write the later lines again
            self.close()
            if self.metrics_file.exists():
                lines = read_metrics(self.metrics_file)
                kept = [json.dumps(line) + "\n" for line in lines if line["step"] <= done]
                atomic_write_text(self.metrics_file, "".join(kept))
            return None
        saved = self.checkpoints.is_dir() and any(self.checkpoints.iterdir())
        told = any((self.folder / name).exists() for name in ("events", "watchdog"))
        if not (self.metrics_file.exists() or saved or told):
            return None
        self.close()
        folder = self.folder.resolve()  # a link stays one, and names the new run
        reason = "it holds an older run, and is the working directory, which cannot be renamed"
        remedy = "Name another folder, or move what is in it"
        if Path.cwd().is_relative_to(folder):
            raise ConfigError("--output", str(self.folder), reason, remedy)
        numbered = (folder.with_name(f"{folder.name}.{n}") for n in count(1))
        older = next(path for path in numbered if not path.exists())
        what = "it holds an older run, and cannot be renamed"
        with os_errors(ConfigError, "--output", str(self.folder), what, remedy):
            folder.rename(older)
            folder.mkdir()
        check_writable("--output", self.folder, is_folder=True)
        self._acquire()
        return older

    def write_config(self, configuration: Mapping[str, Any], *, world_size: int) -> None:
        """Write ``config.json``: the resolved configuration and the environment that it ran in.

        Args:
            configuration: Everything that decides the result; values that are not JSON (paths)
                are written as text.
            world_size: Number of ranks.
        """
        if self._writes:
            content = {"configuration": dict(configuration), "environment": environment()}
            content["environment"]["world_size"] = world_size
            atomic_write_text(self.folder / "config.json", _json(content))

    def log(self, step: int, **metrics: float | None) -> None:
        """Append one line to ``metrics.jsonl``, complete on disk when the call returns.

        If the disk is full, the file ends with the line before, and a warning says so (`Lines`).

        Args:
            step: Optimizer steps done when the values were measured.
            metrics: Numbers. Those that are not finite become null: JSON has no word for them.
        """
        if self._writes:
            line = {"step": step, **{name: _plain(value) for name, value in metrics.items()}}
            self._metrics.add(json.dumps(line, allow_nan=False) + "\n")

    def curve(self, baselines: Mapping[str, float]) -> None:
        """Draw ``loss.png``: ``loss`` a line, ``eval_loss`` points, baselines horizontal lines.

        Without matplotlib there is no picture: a run does not fail at its end for want of one.
        """
        if self._writes and is_installed("matplotlib"):
            lines = read_metrics(self.metrics_file) if self.metrics_file.exists() else []
            atomic_write_bytes(self.folder / "loss.png", _draw_losses(lines, baselines))

    def summary(self, values: Mapping[str, Any]) -> None:
        """Write ``summary.json``: results by name, or by group and name."""
        if self._writes:
            atomic_write_text(self.folder / "summary.json", _json(values))

    def close(self) -> None:
        """Close ``metrics.jsonl``; a later `log` opens it again."""
        self._metrics.close()

    def _acquire(self) -> None:
        """Lock the folder until this process ends, however it ends."""
        self._lock = (self.folder / _LOCK).open("w", encoding="ascii")
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            reason = "a run that has not ended writes this folder"
            remedy = "Name another folder, or wait for its end"
            raise ConfigError("--output", str(self.folder), reason, remedy) from None
        except OSError:
            return  # a file system without locks


def environment() -> dict[str, Any]:
    """Return versions, machine and command of this process."""
    import torch  # whoever trains has it; a report, which reads this module, needs none
    from deepspeed.accelerator import get_accelerator

    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        versions[package] = "not installed"
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions,
        "platform": platform.platform(),
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "accelerator": get_accelerator().device_name(),
            "threads_per_rank": torch.get_num_threads(),
        },
        # sys.argv hides "-m module" and the interpreter's own options.
        "command": list(sys.orig_argv),
    }


def describe_machine() -> dict[str, Any]:
    """Return processor, cores, memory and accelerator of this machine, and versions of packages."""
    import psutil

    known, information = environment(), Path("/proc/cpuinfo")
    text = information.read_text(encoding="utf-8") if information.exists() else ""
    named = re.search(r"^model name\s*: (.*)", text, re.MULTILINE)
    return {
        "system": known["platform"],
        "processor": named[1] if named else platform.processor() or platform.machine(),
        "memory_bytes": psutil.virtual_memory().total,
        **known["machine"],
        **known["versions"],
    }


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


def _draw_losses(lines: list[dict[str, Any]], baselines: Mapping[str, float]) -> bytes:
    """Return a PNG file of 1050 x 600 pixels, drawn without pyplot, whose state is global."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.0), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for name, label, style in (("loss", "training", "-"), ("eval_loss", "validation", "o")):
        points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    for index, (name, loss) in enumerate(baselines.items()):
        style = ("--", ":", "-.")[index % 3]
        axes.axhline(loss, color="0.35", linestyle=style, label=f"{name} ({loss:.3g})")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats)")
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    return picture.getvalue()
