# SPDX-License-Identifier: Apache-2.0
"""From text to tokens: Megatron's indexed data, at a place of the user's or in the cache."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from wavemare.data.indexed import IndexedWriter, read_indexed
from wavemare.data.text import iterate_texts
from wavemare.data.tokenizer import build_once, content_key
from wavemare.data.tokens import TokenStore
from wavemare.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast

_FORMAT_VERSION = 3  # part of every cache key: raise it when the files or the encoding change
_LARGEST_UINT16_VOCABULARY = 65500  # Megatron's bound, so that both choose the same type
_BATCH_CHARACTERS = 1 << 20
_PIECE_CHARACTERS = 1 << 18
# Tokenizers split words before a line end that follows a letter; some join it to other signs.
_LINE_END = re.compile(r"(?<=[^\W_])\n")
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
    end_token = _end_token_of(tokenizer)
    settings = ("tokens", str(_FORMAT_VERSION), definition_of(tokenizer), str(end_token))
    key = content_key((*settings, content_key(iterate_texts(documents))))
    folder = Path(cache_dir) / f"tokens-{key[:32]}"
    build_once(folder, lambda target: build_indexed(documents, tokenizer, target / "tokens"))
    store = read_indexed(folder / "tokens", vocab_size=len(tokenizer))
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
    Memory holds one batch of about a million characters, or one longer document. The tokenizer's
    own threads encode a batch.

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
        for texts in _batches(documents):
            for ids in _encode(encoder, texts):
                writer.add_sequence(np.array([*ids, *end], dtype=dtype))
                writer.end_document()
        if not writer.documents:
            reason = "the corpus is empty: it holds no text besides blanks"
            raise DataError("INPUT", str(output), reason, "Give files that hold text")
    return writer


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the type that Megatron gives the tokens of such a vocabulary."""
    return np.dtype(np.uint16 if vocab_size < _LARGEST_UINT16_VOCABULARY else np.int32)


def cut_text(
    text: str, encode: Callable[[str], Sequence[int]], characters: int = _PIECE_CHARACTERS
) -> list[str]:
    """Cut a long text at line ends into pieces whose tokens are those of the whole text.

    It is not cut if ``encode`` treats the beginning of a text in its own way.
    """
    pieces, start = [], 0
    can_cut = len(text) > characters and [*encode("".join(_PROBE))] == [
        token for part in _PROBE for token in encode(part)
    ]
    while can_cut and len(text) - start > characters:
        line_end = _LINE_END.search(text, start + characters)
        if line_end is None:
            break
        pieces.append(text[start : line_end.start()])
        start = line_end.start()
    return [*pieces, text[start:]]


def _batches(documents: Dataset) -> Iterator[list[str]]:
    """Yield the texts of a batch; a terminal shows the progress meanwhile."""
    texts: list[str] = []
    size = 0
    for text in track(
        iterate_texts(documents),
        "encoding",
        total=len(documents),
        console=Console(stderr=True),
        transient=True,
    ):
        if text and text.strip():
            texts.append(text)
            size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield texts
            texts, size = [], 0
    yield texts


def _encode(encoder: Any, texts: list[str]) -> Iterator[NDArray[Any] | list[int]]:
    def ids_of(text: str) -> list[int]:
        return list(encoder.encode(text, add_special_tokens=False).ids)

    cut = [cut_text(text, ids_of) for text in texts]
    pieces = [piece for parts in cut for piece in parts]
    encoded = iter(encoder.encode_batch_fast(pieces, add_special_tokens=False))
    for parts in cut:
        yield [token for _ in parts for token in next(encoded).ids]


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
