# SPDX-License-Identifier: Apache-2.0
"""Putting several of Megatron's data sets into one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from wavemare.data.indexed_writer import IndexedWriter, claimed, partial_file, refuse_existing
from wavemare.data.megatron import IndexedData, open_indexed
from wavemare.errors import DataError

__all__ = ["merge_indexed"]


def merge_indexed(
    prefixes: Sequence[str | Path],
    output: str | Path,
    *,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Put data sets one after another into one.

    Args:
        prefixes: What to merge, in this order.
        output: Prefix of the target, none of them.
        overwrite: Replace what is there, finished or not.
        progress: Called with the tokens done and in total, after each data set.

    Raises:
        DataError: They differ in the type of tokens or in having modes, a file is damaged, or the
            target is one of them, exists, or is being built, now or by a build that was killed.
    """
    parts = [open_indexed(prefix) for prefix in prefixes]
    if not parts:
        raise DataError("PREFIX", [], "there is nothing to merge", "Name data sets to merge")
    # Where there is no sequence, nothing shows whether it would have had a mode.
    first = next((part for part in parts if len(part.lengths)), parts[0])
    target = Path(os.path.expanduser(output))
    for part in parts:
        if part.prefix.resolve() == target.resolve():
            reason = "the target is one of the data sets to merge"
            raise DataError("--output", str(output), reason, "Choose another name")
        for what, found, expected in (
            ("type of tokens", part.tokens.dtype.name, first.tokens.dtype.name),
            ("kind", _kind(part) if len(part.lengths) else _kind(first), _kind(first)),
        ):
            if found != expected:
                reason = f"its {what} is {found} where that of {first.prefix} is {expected}"
                raise DataError("PREFIX", str(part.prefix), reason, "Build both in the same way")
    with claimed(target):
        notes = partial_file(target, "position")
        if overwrite:
            notes.unlink(missing_ok=True)
        elif notes.exists():
            reason = "an unfinished build is there"
            raise DataError("--output", str(target), reason, "Give --overwrite to replace it")
        else:
            refuse_existing(target)
        writer = IndexedWriter(target, first.tokens.dtype, modes=first.modes is not None)
        try:
            _add_all(writer, parts, progress)
            writer.finish()
        finally:
            writer.discard()


def _add_all(
    writer: IndexedWriter,
    parts: Sequence[IndexedData],
    progress: Callable[[int, int], None] | None,
) -> None:
    total, done = sum(len(part.tokens) for part in parts), 0
    for part in parts:
        writer.add_indexed(part)
        done += len(part.tokens)
        if progress is not None:
            progress(done, total)


def _kind(data: IndexedData) -> str:
    return "plain" if data.modes is None else "multimodal"
