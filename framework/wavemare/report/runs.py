# SPDX-License-Identifier: Apache-2.0
"""Read and check the files of a run folder, and the timelines that its ranks recorded."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from wavemare.engine.checkpoint.manifest import MANIFEST, complete_tags
from wavemare.engine.observe.recorder import FOLDER, FORMAT
from wavemare.errors import ConfigError, DataError, PlanError
from wavemare.files import parse_json
from wavemare.observe.lines import read_events, read_metrics
from wavemare.pipeline.plan.plan import COLLECTIVES, COMPUTE, RECEIVES, SENDS, Action, Kind

_KEYS = {"format", "rank", "stage", "first_step", "device", "steps", "spans"}
_MESSAGES = frozenset(SENDS) | frozenset(RECEIVES)


class Span(NamedTuple):
    """An action of a rank, with its time.

    Args:
        text: An action in its text form, or words.
        start_s: Seconds since the beginning of the trace.
        end_s: The same.
        bytes: In use at its end; 0 if that is not known.
    """

    text: str
    start_s: float
    end_s: float
    bytes: int = 0


@dataclass(frozen=True)
class RankTrace:
    """The timeline of one rank.

    Args:
        stage: Of the pipeline; 0 without one.
        first_step: The first step that was noted, from 1.
        device: ``cpu`` where `Span.bytes` is resident memory, else the accelerator's name.
        steps: Start and end of each step, at least one, in seconds as those of spans.
        spans: In the order in which they began; one that lies within another stands after it.
    """

    rank: int
    stage: int
    first_step: int
    device: str
    steps: tuple[tuple[float, float], ...]
    spans: tuple[Span, ...]

    @property
    def busy(self) -> float:
        """Share of the time from its first step to the end of its last in which it computed."""
        start, end = self.steps[0][0], self.steps[-1][1]
        spans = (s for s in self.spans if category(s.text) in ("forward", "backward", "step"))
        seconds = sum(max(0.0, min(s.end_s, end) - max(s.start_s, start)) for s in spans)
        return seconds / (end - start) if end > start else 0.0


@dataclass(frozen=True)
class Trace:
    """The timelines of all ranks, at least one; time 0 is the start of the earliest step."""

    ranks: tuple[RankTrace, ...]

    @property
    def bubble(self) -> float:
        """Mean share of the time in which ranks did not compute."""
        return 1 - sum(rank.busy for rank in self.ranks) / len(self.ranks)


def category(text: str) -> str:
    """Return the category of a span: ``forward``, ``backward``, ``step``, ``message`` or ``other``.

    Collectives between passes count as messages.
    """
    try:
        action = Action.parse(text)
    except PlanError:  # words
        return "other"
    if action.kind in COMPUTE or action.kind is Kind.STEP:
        return action.kind.name.lower()
    return "message" if action.kind in _MESSAGES | COLLECTIVES else "other"


def read_traces(folder: Path, *, world_size: int | None = None) -> Trace | None:
    """Read the timelines that the ranks of a run recorded.

    A run that was resumed with fewer ranks may have parts of before: those of other steps, or of
    ranks that there are no more, are passed over.

    Args:
        folder: The run's.
        world_size: Number of its ranks, if that is known.

    Returns:
        None if there is nothing.

    Raises:
        DataError: A file is damaged, or of another version.
    """
    parts = [_read(file) for file in sorted((folder / FOLDER).glob("rank_*.json"))]
    parts = [p for p in parts if p.steps and (world_size is None or p.rank < world_size)]
    if not parts:
        return None
    newest = max(parts, key=lambda part: part.steps[0][0])
    parts = [part for part in parts if part.first_step == newest.first_step]
    origin = min(part.steps[0][0] for part in parts)
    return Trace(tuple(_shifted(rank, origin) for rank in sorted(parts, key=lambda r: r.rank)))


def _shifted(rank: RankTrace, origin: float) -> RankTrace:
    return RankTrace(
        rank.rank,
        rank.stage,
        rank.first_step,
        rank.device,
        tuple((start - origin, end - origin) for start, end in rank.steps),
        tuple(Span(s.text, s.start_s - origin, s.end_s - origin, s.bytes) for s in rank.spans),
    )


def _read(file: Path) -> RankTrace:
    try:
        return _parse(parse_json(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = str(error) if isinstance(error, ValueError) else "it is not what a rank noted"
        remedy = "Remove the file, and the report says that it is missing; or train again"
        raise DataError("timeline", str(file), reason, remedy) from None


def _parse(content: Any) -> RankTrace:
    if not isinstance(content, dict) or content.keys() != _KEYS:
        raise ValueError("it is not what a rank noted")
    if content["format"] != FORMAT:
        raise ValueError(
            f"it has the format {content['format']!r}, and this version knows {FORMAT}"
        )
    steps = tuple((_time(start), _time(end)) for start, end in content["steps"])
    spans = tuple(
        Span(str(text), _time(start), _time(end), int(used))
        for text, start, end, used in content["spans"]
    )
    rank, stage, first_step = (int(content[key]) for key in ("rank", "stage", "first_step"))
    return RankTrace(rank, stage, first_step, str(content["device"]), steps, spans)


def _time(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(value)
    return float(value)


_FILES = ("config.json", "metrics.jsonl")
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_TRAINER, _TRAINER_STATE = "checkpoint-", "trainer_state.json"
"""Folders of a Hugging Face Trainer's checkpoints, and the file that it writes last into them."""
_MOST_TEXT = 20_000


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a run.

    Args:
        saved: When, as its list of files says; empty if it does not. A Trainer, which makes no
            such list: when its last file was written.
        complete: Whether all files are there, by size; of a Trainer's, whether its last file is.
        latest: Whether it is the one to resume from.
    """

    tag: str
    saved: str
    bytes: int
    complete: bool
    latest: bool


@dataclass(frozen=True)
class RunFacts:
    """The content of a run folder; missing parts are empty.

    Args:
        summary: Content of ``summary.json``; None if the run has not ended.
        events: See `read_events`.
        trace: What the ranks did in some steps; None if it was not noted.
        checkpoints: In the order of their tags; a Trainer's in that of their steps.
        reports: The watchdog's, text by file name.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    metrics: list[dict[str, Any]]
    summary: Mapping[str, Any] | None
    events: list[dict[str, Any]]
    trace: Trace | None
    checkpoints: list[Checkpoint]
    reports: Mapping[str, str]

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) of a metric where it has one, the last of each step."""
        found = {line["step"]: line[name] for line in self.metrics if line.get(name) is not None}
        return sorted(found.items())

    @property
    def environment(self) -> Mapping[str, Any]:
        """Versions, machine and command."""
        return _section(self.config, "environment")

    @property
    def configuration(self) -> Mapping[str, Any]:
        """Everything that decides the result."""
        return _section(self.config, "configuration")

    @property
    def pipemare(self) -> Mapping[str, Any]:
        """The section ``wavemare.pipeline.pipemare``, of a recipe with its defaults."""
        return _section(self._pipeline, "pipemare")

    @property
    def _pipeline(self) -> Mapping[str, Any]:
        own = _section(self.configuration, "wavemare")
        return _section(own or _section(self._deepspeed, "wavemare"), "pipeline")

    @property
    def _deepspeed(self) -> Mapping[str, Any]:
        """The configuration as the user gave it; a custom training loop may have no other."""
        return _section(self.configuration, "deepspeed")

    @property
    def layout(self) -> dict[str, Any]:
        """Stages, schedule and batch as the summary has them, else as the configuration says."""
        given = {key: self._deepspeed.get(key) for key in _BATCH}
        numbers = {key: value for key, value in given.items() if type(value) is int}
        batch = {**numbers, **_section(self.configuration, "batch")}
        pipeline = self._pipeline
        stages = pipeline.get("stages", 1)
        known = {
            "stages": stages,
            "schedule": pipeline.get("schedule", "") if stages != 1 else "data parallel",
            **batch,
        }
        return {**known, **_section(self.summary or {}, "layout")}


def read_run(folder: Path, *, name: str | None = None) -> RunFacts:
    """Read a run folder.

    Args:
        folder: That ``--output`` named when the run was started.
        name: To call it by; its last part if omitted.

    Raises:
        ConfigError: It is no run folder.
        DataError: A file in it is damaged.
    """
    _check_folder(folder)
    metrics_file = folder / "metrics.jsonl"
    config = _read_json(folder / "config.json") or {}
    world_size = _section(config, "environment").get("world_size")
    return RunFacts(
        name=name or folder.resolve().name,
        folder=folder,
        config=config,
        metrics=_checked(metrics_file) if metrics_file.is_file() else [],
        summary=_read_json(folder / "summary.json"),
        events=read_events(folder),
        trace=read_traces(folder, world_size=world_size if type(world_size) is int else None),
        checkpoints=_checkpoints(_checkpoint_folder(folder, config)),
        reports={
            file.name: file.read_text(encoding="utf-8", errors="replace")[:_MOST_TEXT]
            for file in sorted((folder / "watchdog").glob("rank_*.txt"))
        },
    )


def _check_folder(folder: Path) -> None:
    if not any((folder / name).is_file() for name in _FILES):
        reason = f"there is no run: it has none of {', '.join(_FILES)}"
        remedy = "Name the folder that the training had as --output"
        raise ConfigError("RUN", str(folder), reason, remedy)


def _read_json(file: Path) -> dict[str, Any] | None:
    """Read a JSON object.

    Returns:
        None if there is no such file.

    Raises:
        DataError: It is something else.
    """
    if not file.is_file():
        return None
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        is_text = not isinstance(error, UnicodeDecodeError)
        raise _damaged(file, str(error) if is_text else "this is no text") from None
    if not isinstance(content, dict):
        raise _damaged(file, "it is not a JSON object")
    return content


def _damaged(file: Path, reason: str) -> DataError:
    remedy = f"Remove {file.name}, and the report says that it is missing; or train again"
    return DataError("RUN", str(file), reason, remedy)


def _checked(file: Path) -> list[dict[str, Any]]:
    """Read metrics, and check that each is a number or null."""
    lines = read_metrics(file)
    for line in lines:
        for name, value in line.items():
            if isinstance(value, bool) or not isinstance(value, int | float | None):
                reason = f"in step {line['step']} this metric is not a number"
                remedy = "Remove the line, or start a run in a new folder"
                raise DataError(f"{file}: {name}", value, reason, remedy)
    return lines


def _checkpoint_folder(folder: Path, config: Mapping[str, Any]) -> Path:
    elsewhere = _section(config, "configuration").get("checkpoints")
    return Path(elsewhere) if isinstance(elsewhere, str) else folder / "checkpoints"


def _checkpoints(folder: Path) -> list[Checkpoint]:
    try:
        if not folder.is_dir():
            return []
        next(folder.iterdir(), None)
    except OSError:  # the folder of another machine or another user
        return []
    complete = set(complete_tags(folder))
    latest = folder / "latest"
    newest = (
        latest.read_text(encoding="utf-8", errors="replace").strip() if latest.is_file() else ""
    )
    found = []
    for path in sorted(folder.glob(f"*/{MANIFEST}")):
        tag = path.parent.name
        if tag.startswith("."):
            continue
        saved = str((_read_json(path) or {}).get("saved", ""))
        with suppress(OSError):  # a run that goes on may remove it meanwhile
            found.append(Checkpoint(tag, saved, _size(path.parent), tag in complete, tag == newest))
    return found + _of_trainer(folder)


def _of_trainer(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints of a Hugging Face Trainer, which goes on from the highest step."""
    steps = {
        int(path.name.removeprefix(_TRAINER)): path
        for path in folder.glob(f"{_TRAINER}*")
        if path.is_dir()
        and path.name.removeprefix(_TRAINER).isdecimal()
        and not (path / MANIFEST).is_file()  # so a loop may call its engine's own
    }
    found = []
    for step, path in sorted(steps.items()):
        state, saved = path / _TRAINER_STATE, ""
        with suppress(OSError):  # a run that goes on may remove it meanwhile
            if state.is_file():
                saved = datetime.fromtimestamp(state.stat().st_mtime, UTC).isoformat()
            latest = step == max(steps)
            found.append(Checkpoint(path.name, saved, _size(path), bool(saved), latest))
    return found


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _section(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = content.get(key)
    return value if isinstance(value, dict) else {}
