# SPDX-License-Identifier: Apache-2.0
"""From text to tokens: Megatron's indexed data, at a place of the user's or in the cache."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import track

from wavemare.data.indexed import IndexedWriter, read_indexed
from wavemare.data.text import iterate_texts
from wavemare.data.tokenizer import PIECE_CHARACTERS, build_once, content_key, cut_at_lines
from wavemare.data.tokens import TokenStore
from wavemare.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast

_FORMAT_VERSION = 3  # part of every cache key: raise it when the files or the encoding change
_LARGEST_UINT16_VOCABULARY = 65500  # Megatron's bound, so that both choose the same type
_BATCH_CHARACTERS = 1 << 20
_TOKENS = "tokens"  # name of the files of an entry
_PROBE = ("sea wave 1", "\nmare", "\n\n tide")  # some begin each text with a space


def tokenize(
    documents: Dataset,
    tokenizer: PreTrainedTokenizerFast,
    cache_dir: Path,
    *,
    name: str,
) -> TokenStore:
    """Encode documents, each followed by the end token, or open their tokens from the cache.

    The cache entry is indexed data, named by the hash of the texts and of the tokenizer. Of several
    processes that call this at once, one encodes and the others wait.

    Args:
        documents: Texts in the column ``text``.
        tokenizer: A fast tokenizer with an end-of-text or separator token.
        cache_dir: Folder of the cache.
        name: Origin of the texts, for messages.

    Raises:
        DataError: No document holds text, the tokenizer has no end token, the cache cannot be
            written, or its entry is damaged.
    """
    folder = cached_tokens(documents, tokenizer, cache_dir)
    return open_tokens(folder, tokenizer, name=name)


def cached_tokens(documents: Dataset, tokenizer: PreTrainedTokenizerFast, cache_dir: Path) -> Path:
    """Return the entry of the cache that `tokenize` opens, and encode the documents if need be."""
    end_token = _end_token_of(tokenizer)
    settings = ("tokens", str(_FORMAT_VERSION), definition_of(tokenizer), str(end_token))
    key = content_key((*settings, content_key(iterate_texts(documents))))
    folder = Path(cache_dir) / f"tokens-{key[:32]}"
    build_once(folder, lambda target: build_indexed(documents, tokenizer, target / _TOKENS))
    return folder


def open_tokens(folder: Path, tokenizer: PreTrainedTokenizerFast, *, name: str) -> TokenStore:
    """Open an entry of `cached_tokens`.

    Raises:
        DataError: The entry is damaged.
    """
    store = read_indexed(folder / _TOKENS, vocab_size=len(tokenizer))
    store.name = name
    return store


def build_indexed(
    documents: Dataset,
    tokenizer: PreTrainedTokenizerFast,
    output: str | Path,
    *,
    append_eod: bool = True,
    overwrite: bool = False,
) -> IndexedWriter:
    """Encode documents into ``OUTPUT.bin`` and ``OUTPUT.idx``, one sequence each.

    Blank documents are left out. Special tokens that are spelled out in a text are encoded as text.
    Memory holds the tokens of about a million characters, and one document. The tokenizer's own
    threads encode them.

    Args:
        documents: Texts in the column ``text``.
        tokenizer: A fast tokenizer.
        output: The target without ``.bin`` and ``.idx``.
        append_eod: Whether the end token follows each document.
        overwrite: Replace files of the target's name.

    Returns:
        The writer, which knows the numbers of documents and tokens.

    Raises:
        DataError: The target exists or cannot be written, or no document holds text.
    """
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_str(definition_of(tokenizer))
    encoder.encode_special_tokens = True  # a text cannot forge the end of a document
    end = [_end_token_of(tokenizer)] if append_eod else []
    dtype = token_dtype(len(tokenizer))
    with IndexedWriter(output, dtype, overwrite=overwrite) as writer:
        with library_threads():
            for pieces in _batches(documents, encoder):
                texts = [text for text, _ in pieces]
                encoded = encoder.encode_batch_fast(texts, add_special_tokens=False)
                for (_, is_last), each in zip(pieces, encoded, strict=True):
                    writer.add_part(np.array(each.ids + (end if is_last else []), dtype=dtype))
                    if is_last:
                        writer.end_sequence()
                        writer.end_document()
        if not writer.documents:
            reason = "the corpus is empty: it holds no text besides blanks"
            raise DataError("INPUT", str(output), reason, "Give files that hold text")
    return writer


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the type that Megatron gives the tokens of such a vocabulary."""
    return np.dtype(np.uint16 if vocab_size < _LARGEST_UINT16_VOCABULARY else np.int32)


@contextmanager
def library_threads() -> Iterator[None]:
    """Let the tokenizers library use its threads, which other parts of a job switch off."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def cut_text(
    text: str, encode: Callable[[str], Sequence[int]], characters: int = PIECE_CHARACTERS
) -> Iterator[str]:
    """Cut a long text at line ends into pieces whose tokens are those of the whole text.

    It is not cut if ``encode`` treats the beginning of a text in its own way.
    """
    can_cut = len(text) > characters and [*encode("".join(_PROBE))] == [
        token for part in _PROBE for token in encode(part)
    ]
    return cut_at_lines(text, characters) if can_cut else iter([text])


def _batches(documents: Dataset, encoder: Any) -> Iterator[list[tuple[str, bool]]]:
    """Yield pieces of documents, and whether each is its document's last.

    A terminal shows the progress meanwhile.
    """

    def ids_of(text: str) -> list[int]:
        return list(encoder.encode(text, add_special_tokens=False).ids)

    pieces: list[tuple[str, bool]] = []
    size = 0
    for text in track(
        iterate_texts(documents),
        "encoding",
        total=len(documents),
        console=Console(stderr=True),
        transient=True,
    ):
        left = len(text) if text and not text.isspace() else 0
        for piece in cut_text(text or "", ids_of) if left else ():
            left -= len(piece)
            pieces.append((piece, left == 0))
            size += len(piece)
            if size >= _BATCH_CHARACTERS:
                yield pieces
                pieces, size = [], 0
    yield pieces


def _end_token_of(tokenizer: PreTrainedTokenizerFast) -> int:
    for token in (tokenizer.eos_token_id, tokenizer.sep_token_id):
        if token is not None:
            return int(token)
    reason = "it has neither an end-of-text nor a separator token to end a document with"
    raise DataError("--tokenizer", tokenizer.name_or_path, reason, "Add an eos_token to it")


def definition_of(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the tokenizer as JSON, without traces of earlier calls."""
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    del definition["truncation"], definition["padding"]
    return json.dumps(definition, sort_keys=True)
