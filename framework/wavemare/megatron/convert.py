# SPDX-License-Identifier: Apache-2.0
"""Checkpoints from Hugging Face's format to Megatron's and back.

One weight is in memory at a time. The target appears when it has been read back and every weight
is the source's, bit for bit. Until then it is a hidden folder beside the target, or in it if it
exists, and a conversion that was stopped goes on there.
"""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wavemare.errors import CheckpointError, ModelError, WavemareError, did_you_mean, os_errors
from wavemare.files import sync_folder, written_through
from wavemare.megatron.arguments import arguments_of, language_model_of
from wavemare.megatron.keys import MegatronWeights
from wavemare.megatron.models import (
    CARRIED,
    Opened,
    beside,
    open_checkpoint,
    tokenizer_arguments,
)
from wavemare.megatron.store import kind_of
from wavemare.models.folder import HfFolder, read_config, write_folder
from wavemare.models.source import Ahead, Cast, WeightSource, size_of, spans_of
from wavemare.models.spans import Copied, equal

FORMATS = ("hf", "megatron", "universal")
_RECORD, _FINISHED = "conversion.json", "finished"
_PLACE = "Free space, or choose another place"
_SPARE = 64 * 2**20  # bytes on the disk besides the weights
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
# What a Hugging Face folder has beside the weights, and a model needs when it is used.
_BESIDE = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "spiece.model",
    "sentencepiece*.model",
    "*.tiktoken",
)
# Masks and tables that old files have; every model makes them anew.
_MADE_ANEW = re.compile(r"(^|\.)(attn\.(masked_)?bias|rotary_emb\.inv_freq)$")
_READ_FIRST = re.compile(r"config\.json|latest.*")
_WORD = 8  # bytes
_THREADS = 2  # for comparing: each reads the weights of both sides


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a target or a source does not say by itself.

    Attributes:
        dtype: Of the target's floating-point weights; the source's if omitted.
        config: A folder with the ``config.json`` of a Megatron source.
        vocab_size: Tokens of a Megatron source without padding.
        num_attention_heads: Of a Megatron source that does not say it.
        iteration: Of a Megatron target; 0 is a release. By default the source's.
    """

    dtype: torch.dtype | None = None
    config: Path | None = None
    vocab_size: int | None = None
    num_attention_heads: int | None = None
    iteration: int | None = None


@dataclass(frozen=True)
class Source:
    """A checkpoint that is to be converted.

    Attributes:
        kind: hf or megatron.
        config: Of transformers.
        weights: By the names that the model has in memory.
        folder: The files, for telling whether they are the same ones later.
        beside: The folder of the tokenizer.
        iteration: Steps that were trained.
        consumed_samples: Training samples that were used.
        notes: What a user should know.
    """

    kind: str
    config: Any
    weights: WeightSource
    folder: Path
    beside: Path | None
    iteration: int = 0
    consumed_samples: int = 0
    notes: tuple[str, ...] = field(default=())


Progress = Callable[[str, int, int], None]
"""Called with what is done, the bytes that were done since the last call, and those of all."""


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    options: Options | None = None,
) -> str:
    """Convert a checkpoint; run it again to go on after it was stopped.

    Args:
        source: A Hugging Face folder, or what Megatron's ``--load`` names.
        target: A folder that does not exist, or is empty.
        to: Its format: hf, megatron or universal (DeepSpeed's, with the optimizer's state of a
            Megatron source).
        options: See `Options`.

    Returns:
        What was done, and what a user should know.

    Raises:
        ModelError: There is no faithful conversion, an option says nothing of these formats, or the
            target cannot be made.
        CheckpointError: The source is missing or damaged.
    """
    options = options or Options()
    target = Path(os.path.expanduser(target)).resolve()
    if to not in FORMATS:
        raise ModelError("--to", to, "there is no such format", did_you_mean(to, FORMATS))
    if target.exists() and not (target.is_dir() and _is_empty(target)):
        raise ModelError("TARGET", str(target), "it exists", "Choose another name")
    path = Path(os.path.expanduser(source))
    kind = format_of(path)
    _check_used(kind, to, options)
    if to == "universal":
        return _to_universal(path, target, kind, options)
    found = _open_hf(path) if kind == "hf" else _open_megatron(path, options)
    arguments_of(found.config, dtype=torch.float32)  # of both ends: what no family is
    write = _write_hf if to == "hf" else _write_megatron
    with _made(target, found, to, options) as (partial, progress):
        _check_space(partial, found, options.dtype)
        copied = Copied()
        write(partial, found, options, target, progress, copied)
        written = HfFolder(partial) if to == "hf" else open_checkpoint(partial).weights
        sizes = {name: size_of(stored) for name, stored in _each(found)}
        ours, total = _typed(found, options.dtype), sum(sizes.values())
        _compare(ours, written, sizes, total, progress, copied)
    count = sum(torch.Size(stored.shape).numel() for _, stored in _each(found))
    said = f"{kind} to {to}: {count:,} parameters, read back without a difference"
    return "\n".join([said, *found.notes])


def format_of(folder: Path) -> str:
    """Tell a folder's format, hf or megatron, by the names in it.

    Raises:
        ModelError: It is an engine's.
        CheckpointError: It is none that is known.
    """
    kind = kind_of(folder)
    if kind == "engine":
        reason = "it is an engine's checkpoint"
        remedy = "Load it into the engine, and use wavemare.save_pretrained"
        raise ModelError("SOURCE", str(folder), reason, remedy)
    return kind


def _check_used(source: str, target: str, options: Options) -> None:
    unused = []
    if source == "hf":
        unused += ["config", "vocab_size", "num_attention_heads"]
    if target != "megatron":
        unused += ["iteration"]
    if target == "universal":
        unused += ["dtype"]
    for name in unused:
        value = getattr(options, name)
        if value is not None:
            reason = f"it has no effect from {source} to {target}"
            raise ModelError(f"--{name.replace('_', '-')}", value, reason, "Leave it out")


def _to_universal(source: Path, target: Path, kind: str, options: Options) -> str:
    from wavemare.megatron.optimizer import OptimizerState, Written, write_state

    if kind == "hf":
        reason = "a Hugging Face folder has no state of an optimizer"
        raise ModelError("--to", "universal", reason, "Give a Megatron checkpoint")
    opened = open_checkpoint(
        source, options.config, vocab_size=options.vocab_size, dtype=torch.float32
    )
    state = OptimizerState(opened)
    found = Source("megatron", opened.config, opened.weights, opened.store.step_folder, None)
    with _made(target, found, "universal", options) as (partial, progress):
        tag = write_state(state, partial, progress, resume=True)
        for part, held in state.sources.items():
            written = Written(state, part, partial / tag)
            sizes = {name: size_of(stored) for name, stored in written.stored.items()}
            _compare(Cast(held, torch.float32), written, sizes, state.size, progress, Copied())
    said = (
        f"megatron to universal: {tag}, with the optimizer's state, read back without a "
        "difference; go on from there with "
        '"checkpoint": {"load_universal": true}'
    )
    return "\n".join([said, *opened.notes])


def _open_hf(folder: Path) -> Source:
    config = read_config(folder)
    arguments_of(config, dtype=torch.float32)  # before files are opened: what no family is
    weights = HfFolder(folder, language_model_of(config))
    ignored = [*(weights.skeleton._keys_to_ignore_on_load_unexpected or ()), _MADE_ANEW]
    unknown = [n for n in weights.unknown if not any(re.search(each, n) for each in ignored)]
    if unknown:
        reason = f"transformers' {config.model_type} has no place for it"
        raise ModelError("weight", unknown[0], reason, "Mend config.json, or remove the weight")
    config.architectures = [type(weights.skeleton).__name__]
    return Source("hf", config, weights, folder, folder)


def _open_megatron(folder: Path, options: Options) -> Source:
    opened: Opened = open_checkpoint(
        folder,
        options.config,
        vocab_size=options.vocab_size,
        num_attention_heads=options.num_attention_heads,
        dtype=options.dtype,
    )
    return Source(
        "megatron",
        opened.config,
        opened.weights,
        opened.store.step_folder,
        options.config or beside(opened.store),
        opened.iteration or 0,
        opened.consumed_samples,
        opened.notes,
    )


def _each(source: Source) -> Iterator[tuple[str, Any]]:
    """Yield the weights, a tied head left out."""
    for name, stored in source.weights.stored.items():
        if not (name == "lm_head.weight" and source.config.tie_word_embeddings):
            yield name, stored


# --- the folder in which it is made ---------------------------------------------------------------


@contextmanager
def _made(
    target: Path, source: Source, to: str, options: Options
) -> Iterator[tuple[Path, Progress]]:
    """Give a folder to write in; when all of it is on the disk, it becomes the target."""
    with _partial(target, source, to, options) as partial, _progress() as progress:
        with os_errors(ModelError, "TARGET", str(target), "it cannot be made", _PLACE):
            with written_through(partial):
                yield partial, progress
                for name in (_RECORD, _FINISHED):
                    (partial / name).unlink(missing_ok=True)
            _name(partial, target)


@contextmanager
def _partial(target: Path, source: Source, to: str, options: Options) -> Iterator[Path]:
    """Make the folder, or find that of the same conversion; it goes if a conversion is refused."""
    partial = _place_of(target)
    record = json.dumps(
        {
            "source": str(source.folder.resolve()),
            "files": _fingerprint(source.folder),
            "to": to,
            "options": {name: str(value) for name, value in asdict(options).items()},
            "config": source.config.to_json_string(),
        }
    )
    with os_errors(ModelError, "TARGET", str(target), "it cannot be made", _PLACE):
        partial.mkdir(parents=True, exist_ok=True)
        lock = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            reason = "another process converts to it"
            raise ModelError("TARGET", str(target), reason, "Wait for it") from error
        with os_errors(ModelError, "TARGET", str(target), "it cannot be made", _PLACE):
            file = partial / _RECORD
            if not file.is_file() or file.read_text(encoding="utf-8", errors="replace") != record:
                _empty(partial)
                file.write_text(record, encoding="utf-8")
        try:
            yield partial
        except WavemareError as error:
            cause = error.__cause__
            if not (isinstance(cause, OSError) and cause.errno in _DISK):
                shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(lock)


def _place_of(target: Path) -> Path:
    """Return where a target is made: in it if it exists, for it may be a mount; else beside it."""
    return (target if target.is_dir() else target.parent) / f".{target.name}.partial"


def _is_empty(target: Path) -> bool:
    return not {path.name for path in target.iterdir()} - {_place_of(target).name}


def _name(partial: Path, target: Path) -> None:
    """Give a target that is whole its name; what readers look at first comes last."""
    if partial.parent != target:
        partial.rename(target)
        sync_folder(target.parent)
    else:
        last = {path for path in partial.iterdir() if _READ_FIRST.fullmatch(path.name)}
        for path in sorted(partial.iterdir(), key=last.__contains__):
            path.rename(target / path.name)
        partial.rmdir()
        sync_folder(target)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _fingerprint(folder: Path) -> str:
    """Return what changes with the files of a source."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            state = path.stat()
            name = path.relative_to(folder)
            found.update(f"{name} {state.st_size} {state.st_mtime_ns}\n".encode())
    return found.hexdigest()


def _check_space(partial: Path, source: Source, dtype: torch.dtype | None) -> None:
    needed = _SPARE
    for _, stored in _each(source):
        wide = dtype.itemsize / stored.dtype.itemsize if dtype is not None else 1
        needed += int(size_of(stored) * wide)
    there = sum(path.stat().st_blocks * 512 for path in partial.rglob("*") if path.is_file())
    free = shutil.disk_usage(partial).free
    if needed - there > free:
        reason = f"it needs {needed - there:,} bytes, and the disk has {free:,}"
        raise ModelError("TARGET", str(partial.parent), reason, "Choose another disk")


@contextmanager
def _progress() -> Iterator[Progress]:
    """Show a bar on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda what, size, total: None
        return
    from rich import progress
    from rich.console import Console

    columns = [
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    ]
    tasks: dict[str, progress.TaskID] = {}
    with progress.Progress(*columns, console=Console(stderr=True)) as shown:

        def advance(what: str, size: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = shown.add_task(what, total=total)
            shown.advance(tasks[what], size)

        yield advance


# --- writing and reading back ---------------------------------------------------------------------


def _write_hf(
    partial: Path,
    source: Source,
    options: Options,
    target: Path,
    progress: Progress,
    copied: Copied,
) -> None:
    finished: set[str] = set()
    journal = partial / _FINISHED
    if journal.is_file():
        # Without its end, the last line may be a part of a name.
        finished = set(journal.read_text(encoding="utf-8").split("\n")[:-1])
    total = sum(size_of(stored) for _, stored in _each(source))
    for name, stored in _each(source):
        if name in finished:
            progress("write", size_of(stored), total)
    with os_errors(CheckpointError, "TARGET", str(target), "it cannot be written", _PLACE):
        with journal.open("w", encoding="utf-8") as file:
            file.writelines(f"{name}\n" for name in finished)
            file.flush()

            def wrote(name: str, size: int) -> None:
                file.write(f"{name}\n")
                file.flush()
                progress("write", size, total)

            with Ahead(_typed(source, options.dtype)) as weights:
                write_folder(
                    partial,
                    weights,
                    source.config,
                    dtype=options.dtype,
                    finished=finished,
                    wrote=wrote,
                    copied=copied,
                )
        carry(source.beside, partial, leave=("config.json",))


def _write_megatron(
    partial: Path,
    source: Source,
    options: Options,
    target: Path,
    progress: Progress,
    copied: Copied,
) -> None:
    from wavemare.megatron.write import write_torch_dist

    dtype = options.dtype or next(iter(source.weights.stored.values())).dtype
    arguments = arguments_of(source.config, dtype=dtype)
    arguments["consumed_train_samples"] = source.consumed_samples
    weights: WeightSource = MegatronWeights(
        source.weights, source.config, padded=arguments["padded_vocab_size"], dtype=options.dtype
    )
    with os_errors(CheckpointError, "TARGET", str(target), "it cannot be written", _PLACE):
        (partial / CARRIED).mkdir(exist_ok=True)
        names = carry(source.beside, partial / CARRIED)
        source.config.save_pretrained(partial / CARRIED)
    if any(name.startswith("tokenizer") for name in names):
        arguments |= tokenizer_arguments(target)
    total = sum(size_of(stored) for stored in weights.stored.values())
    iteration = source.iteration if options.iteration is None else options.iteration
    with Ahead(weights) as ahead:
        write_torch_dist(
            partial,
            ahead,
            arguments=arguments | {"iteration": iteration},
            iteration=iteration,
            resume=True,
            progress=lambda size: progress("write", size, total),
            copied=copied,
        )


def carry(source: Path | None, target: Path, leave: tuple[str, ...] = ()) -> list[str]:
    """Copy what belongs to a model beside its weights; return the names.

    Args:
        source: A folder; none is one without such files.
        target: Another one.
        leave: Names that are not copied.

    Raises:
        OSError: It cannot be done.
    """
    names = []
    for path in sorted(source.iterdir()) if source is not None else ():
        wanted = any(fnmatch.fnmatch(path.name, pattern) for pattern in _BESIDE)
        if wanted and path.name not in leave and path.is_file():
            shutil.copyfile(path, target / path.name)
            names.append(path.name)
    return names


def _compare(
    ours: WeightSource,
    written: WeightSource,
    sizes: Mapping[str, int],
    total: int,
    progress: Progress,
    copied: Copied,
) -> None:
    """Refuse a target in which a weight is another.

    What was copied in this call is compared by its checksum; of all else the source is read again.

    Args:
        ours: The source.
        written: The target.
        sizes: Bytes of each weight that is compared.
        total: Bytes of all that will be compared.
        progress: Called for each.
        copied: The checksums.

    Raises:
        ModelError: The weight's name.
    """
    with ThreadPoolExecutor(_THREADS, "compare") as pool:
        found = {name: pool.submit(_is_same, name, ours, written, copied) for name in sizes}
        try:
            for name, size in sizes.items():
                if not found[name].result():
                    reason = "it was read back with a difference, so the conversion was dropped"
                    remedy = "Try it again, and report it if it happens twice"
                    raise ModelError("weights", name, reason, remedy)
                progress("compare", size, total)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _typed(source: Source, dtype: torch.dtype | None) -> WeightSource:
    return source.weights if dtype is None else Cast(source.weights, dtype)


def _is_same(name: str, ours: WeightSource, theirs: WeightSource, copied: Copied) -> bool:
    if ours.stored[name] != theirs.stored.get(name):
        return False
    one, other = spans_of(ours, name), spans_of(theirs, name)
    if one is not None and other is not None:
        return equal(one, other, copied)
    return _same_bits(ours.read(name), theirs.read(name))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    parts = [part.contiguous().view(-1).view(torch.uint8) for part in (one, other)]
    if parts[0].numel() % _WORD == 0:
        parts = [part.view(torch.int64) for part in parts]  # several times as fast
    return torch.equal(*parts)
