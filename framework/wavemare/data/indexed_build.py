# SPDX-License-Identifier: Apache-2.0
"""From text to Megatron's indexed data: many processes, little memory, and a kill loses seconds.

Batches of documents are encoded by a pool and written in their order, so the files do not depend on
the number of processes. Now and then what was written is put safely on disk, with how far it went;
a build that was killed goes on from there and ends with the same bytes.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from wavemare.data.cache import content_key
from wavemare.data.documents import Document
from wavemare.data.indexed_writer import (
    IndexedWriter,
    WriterPosition,
    claimed,
    finish_after_kill,
    partial_file,
    refuse_existing,
)
from wavemare.data.megatron import open_indexed
from wavemare.data.tokens import definition_of, end_token_of, pieces_of, token_dtype
from wavemare.errors import DataError
from wavemare.files import atomic_write_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["build_indexed"]

_SAVED_BATCHES = 16  # between two savings of the position
_AHEAD = 2  # batches per process that are read before their turn


@dataclass(frozen=True)
class _Encoder:
    """What a process needs to encode documents.

    Attributes:
        definition: The tokenizer, as ``tokenizers`` writes it.
        end_token: Put after each document; None for nothing.
        dtype: Type of the tokens, as numpy writes it.
        batch_characters: Least size of a batch.
    """

    definition: str
    end_token: int | None
    dtype: str
    batch_characters: int


def build_indexed(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerFast,
    output: str | Path,
    *,
    identity: str,
    workers: int = 1,
    append_eod: bool = True,
    overwrite: bool = False,
    batch_characters: int = 1 << 20,
    progress: Callable[[int, int], None] | None = None,
) -> WriterPosition:
    """Encode documents into ``OUTPUT.bin`` and ``OUTPUT.idx``, one sequence each.

    Blank documents are left out. Special tokens that are spelled out in a text are encoded as text.
    At any time the memory holds a few batches of documents for each process.

    Args:
        documents: What to encode; read one after another, and again only after a kill.
        tokenizer: A fast tokenizer.
        output: The target without ``.bin`` and ``.idx``.
        identity: Names the documents: an unfinished build is continued if it is the same.
        workers: Processes that encode; 1 encodes in this one.
        append_eod: Whether the end-of-text token follows each document.
        overwrite: Replace what is there, finished or not.
        batch_characters: A batch has at least so many characters.
        progress: Called with the documents done and in total, also before the first.

    Returns:
        How much was written in all.

    Raises:
        DataError: The target exists, is being built by another process, or an unfinished build
            there is of something else; or no document holds text.
    """
    prefix = Path(os.path.expanduser(output))
    end_token = end_token_of(tokenizer) if append_eod else None
    dtype = token_dtype(len(tokenizer))
    encoder = _Encoder(definition_of(tokenizer), end_token, dtype.str, batch_characters)
    key = content_key([identity, encoder.definition, str(end_token), dtype.str])
    with claimed(prefix):
        return _build(documents, encoder, prefix, key, workers, overwrite, progress)


def _build(
    documents: Sequence[Document],
    encoder: _Encoder,
    prefix: Path,
    key: str,
    workers: int,
    overwrite: bool,
    progress: Callable[[int, int], None] | None,
) -> WriterPosition:
    notes = partial_file(prefix, "position")
    if overwrite:
        notes.unlink(missing_ok=True)  # they are of what is now begun anew
        read, position = 0, None
    else:
        read, position = _left_by_a_kill(prefix, notes, key)
    if position is not None and read == len(documents) and _is_whole(prefix, position):
        notes.unlink()
        return position
    writer = IndexedWriter(prefix, encoder.dtype, position=position)
    with writer:
        if position is None:
            _save(notes, key, 0, writer)
        if progress is not None:
            progress(read, len(documents))
        after = read
        for number, (after, batch) in enumerate(_encoded(documents, read, encoder, workers), 1):
            for ids in batch:
                writer.add_sequence(ids)
                writer.end_document()
            if number % _SAVED_BATCHES == 0:
                _save(notes, key, after, writer)
            if progress is not None:
                progress(after, len(documents))
        if not writer.position.sequences:
            reason = "the corpus is empty: it holds no text besides blanks"
            notes.unlink()
            writer.discard()
            raise DataError("INPUT", str(prefix), reason, "Give files that hold text")
        _save(notes, key, len(documents), writer)
        if progress is not None and after < len(documents):  # blank ones at the end
            progress(len(documents), len(documents))
    notes.unlink()
    return writer.position


def _save(notes: Path, key: str, read: int, writer: IndexedWriter) -> None:
    writer.flush()
    position = {"key": key, "documents_read": read, "written": asdict(writer.position)}
    atomic_write_text(notes, json.dumps(position))


def _left_by_a_kill(prefix: Path, notes: Path, key: str) -> tuple[int, WriterPosition | None]:
    """Return how many documents were read, and what was written; 0 and None for nothing."""
    if notes.exists():
        left = json.loads(notes.read_text(encoding="utf-8"))
        if left["key"] != key:
            reason = "an unfinished build of other text, or by another tokenizer, is there"
            raise DataError("--output", str(prefix), reason, "Give --overwrite to start anew")
        return int(left["documents_read"]), WriterPosition(**left["written"])
    refuse_existing(prefix)
    return 0, None


def _is_whole(prefix: Path, position: WriterPosition) -> bool:
    """Whether a build was killed when all was written, and its files have their names by now."""
    if not finish_after_kill(prefix):
        return False
    data = open_indexed(prefix)
    return position == WriterPosition(len(data.tokens), len(data.lengths), len(data.bounds) - 1)


def _encoded(
    documents: Sequence[Document], first: int, encoder: _Encoder, workers: int
) -> Iterator[tuple[int, list[NDArray[Any]]]]:
    """Yield, batch by batch in order, the documents read so far and the tokens of each new one."""
    batches = _batches(documents, first, encoder.batch_characters)
    if workers == 1:
        tokenizer = _tokenizer(encoder)
        for after, texts in batches:
            yield after, _encode(tokenizer, encoder, texts)
        return
    # Forks of a process with threads may hang.
    context = get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_enter, initargs=(encoder,)) as pool:
        waiting: deque[tuple[int, Future[list[NDArray[Any]]]]] = deque()
        try:
            for after, texts in batches:
                waiting.append((after, pool.submit(_encode_there, texts)))
                if len(waiting) > _AHEAD * workers:
                    done, future = waiting.popleft()
                    yield done, future.result()
            while waiting:
                done, future = waiting.popleft()
                yield done, future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _batches(
    documents: Sequence[Document], first: int, characters: int
) -> Iterator[tuple[int, list[str]]]:
    texts: list[str] = []
    size, after = 0, first
    for after in range(first + 1, len(documents) + 1):
        text = documents[after - 1].text
        if text and text.strip():
            texts.append(text)
            size += len(text)
        if size >= characters:
            yield after, texts
            texts, size = [], 0
    if texts:
        yield after, texts


def _tokenizer(encoder: _Encoder) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(encoder.definition)
    tokenizer.encode_special_tokens = True  # a text cannot forge the end of a document
    return tokenizer


def _encode(tokenizer: Any, encoder: _Encoder, texts: list[str]) -> list[NDArray[Any]]:

    def ids_of(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    pieces = list(pieces_of((Document("", text) for text in texts), ids_of))
    encoded = tokenizer.encode_batch_fast([text for text, _ in pieces], add_special_tokens=False)
    sequences: list[NDArray[Any]] = []
    ids: list[int] = []
    for encoding, (_, is_last) in zip(encoded, pieces, strict=True):
        ids += encoding.ids
        if is_last:
            ids += [] if encoder.end_token is None else [encoder.end_token]
            sequences.append(np.array(ids, dtype=encoder.dtype))
            ids = []
    return sequences


_there: dict[str, Any] = {}  # of a process of the pool


def _enter(encoder: _Encoder) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores already
    _there.update(tokenizer=_tokenizer(encoder), encoder=encoder)
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """End this process when its parent was killed: it would wait for work for ever."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _encode_there(texts: list[str]) -> list[NDArray[Any]]:
    return _encode(_there["tokenizer"], _there["encoder"], texts)
