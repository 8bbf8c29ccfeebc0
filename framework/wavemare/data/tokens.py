# SPDX-License-Identifier: Apache-2.0
"""Tokens of many documents in one memory-mapped array, and the cache that holds them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from wavemare.data.cache import build_once, content_key
from wavemare.data.documents import Document, check_fraction
from wavemare.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = [
    "TokenStore",
    "check_length",
    "definition_of",
    "end_token_of",
    "largest_token",
    "pieces_of",
    "split_store",
    "token_dtype",
    "tokenize",
]

_FORMAT_VERSION = 2  # part of every cache key: raise it when the files or the encoding change
_LARGEST_UINT16_VOCABULARY = 65500  # Megatron's bound, so that both choose the same type
_BATCH_CHARACTERS = 1 << 22
_SCAN_TOKENS = 1 << 24
# Tokenizers split words before a line end that follows a letter; some join it to other signs.
_LINE_END = re.compile(r"(?<=[^\W_])\n")
_PROBE = ("sea wave 1", "\nmare", "\n\n tide")  # some begin each text with a space

Progress = Callable[[int, int], None]
"""Called with the characters done and the characters in total."""


class TokenStore:
    """The tokens of documents that stand end to end.

    Args:
        tokens: All tokens, integer [num_tokens]; usually memory-mapped.
        offsets: Where each document starts, and the end of the last, int64 [num_documents + 1].
        vocab_size: Number of tokens of the vocabulary; None counts up to the largest token.
        name: Where the tokens come from, for messages.
    """

    def __init__(
        self,
        tokens: NDArray[Any],
        offsets: NDArray[np.int64],
        *,
        vocab_size: int | None = None,
        name: str = "tokens",
    ) -> None:
        self.tokens = tokens
        self.offsets = offsets
        self.name = name
        self._declared_vocab_size = vocab_size

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all documents."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.offsets) - 1

    @cached_property
    def vocab_size(self) -> int:
        """Size of the tokenizer's vocabulary; where it is unknown, the largest token plus one."""
        if self._declared_vocab_size is not None:
            return self._declared_vocab_size
        return largest_token(self)[0] + 1

    def document(self, index: int) -> NDArray[Any]:
        """Return the tokens of one document, integer [length]."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def select(self, first: int, last: int) -> TokenStore:
        """Return the documents from ``first`` up to, without, ``last``; nothing is copied."""
        offsets = self.offsets[first : last + 1]
        tokens = self.tokens[offsets[0] : offsets[-1]]
        return TokenStore(
            tokens, offsets - offsets[0], vocab_size=self._declared_vocab_size, name=self.name
        )


def largest_token(store: TokenStore) -> tuple[int, int]:
    """Return the largest token of a store and the position where it first stands."""
    best, where = -1, -1
    for start in range(0, store.num_tokens, _SCAN_TOKENS):
        chunk = store.tokens[start : start + _SCAN_TOKENS]
        position = int(chunk.argmax())
        if chunk[position] > best:
            best, where = int(chunk[position]), start + position
    return best, where


def check_length(sequence_length: int, model_positions: int) -> None:
    """Check that a model can read sequences of a length.

    Raises:
        ConfigError: The sequences are longer than the model.
    """
    if sequence_length > model_positions:
        reason = f"the sequences are longer than the {model_positions} positions of the model"
        remedy = f"Give at most {model_positions}, or a model with more positions"
        raise ConfigError("--sequence_length", sequence_length, reason, remedy)


def split_store(store: TokenStore, fraction: float = 0.05) -> tuple[TokenStore, TokenStore]:
    """Split tokens into train and held-out ones by position, as Megatron's ``--split`` does.

    Args:
        store: The tokens to split.
        fraction: Share of the documents, from the end, that is held out: at least one. The only
            document of a store is cut by that share of its tokens.

    Raises:
        DataError: There are fewer than two tokens.
        ConfigError: The fraction is out of range.
    """
    check_fraction(fraction)
    if store.num_documents > 1:
        held_out = min(max(round(store.num_documents * fraction), 1), store.num_documents - 1)
        cut = store.num_documents - held_out
        return store.select(0, cut), store.select(cut, store.num_documents)
    if store.num_tokens < 2:  # noqa: PLR2004
        reason = f"{store.num_tokens} tokens cannot be split for evaluation"
        raise DataError("--data", store.name, reason, "Give more data")
    cut = min(max(round(store.num_tokens * (1.0 - fraction)), 1), store.num_tokens - 1)
    offsets = np.array([0, cut, store.num_tokens], dtype=np.int64)
    halves = TokenStore(
        store.tokens, offsets, vocab_size=store._declared_vocab_size, name=store.name
    )
    return halves.select(0, 1), halves.select(1, 2)


def tokenize(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerFast,
    cache_dir: Path,
    *,
    name: str | None = None,
    progress: Progress | None = None,
) -> TokenStore:
    """Encode documents, each followed by the end-of-document token, or open them from the cache.

    The cache entry is named by the hash of the texts and of the tokenizer. Several processes may
    call this at once: one encodes, the others wait. Special tokens that are spelled out in a text
    are encoded as text. Texts above 256 Ki characters are encoded in pieces cut at line ends.

    Args:
        documents: The documents, in the order in which they are stored.
        tokenizer: A fast tokenizer with an end-of-text or separator token.
        cache_dir: Folder of the cache.
        name: Where the texts come from, for messages; by default the cache entry.
        progress: Called now and then with the characters done and in total, if there is work.

    Raises:
        DataError: There are no documents, the tokenizer has no token to end one with, or the cache
            cannot be written.
    """
    if not documents:
        reason = "there are no documents to encode"
        raise DataError("--data", "", reason, "Give files that hold text")
    end_token = end_token_of(tokenizer)
    settings = ("tokens", str(_FORMAT_VERSION), definition_of(tokenizer), str(end_token))
    key = content_key((*settings, content_key(document.text for document in documents)))
    folder = Path(cache_dir) / f"tokens-{key[:32]}"

    def build(target: Path) -> None:
        _write(target, documents, tokenizer, end_token, progress)

    build_once(folder, build, lambda entry: _open(entry) is not None)
    store = _open(folder)
    if store is None:
        reason = "the cache entry was damaged while it was in use"
        raise DataError("cache_dir", str(folder), reason, "Start again")
    store.name = store.name if name is None else name
    return store


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the type that Megatron would give the tokens of such a vocabulary."""
    return np.dtype(np.uint16 if vocab_size < _LARGEST_UINT16_VOCABULARY else np.int32)


def end_token_of(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the token that ends a document.

    Raises:
        DataError: The tokenizer has none.
    """
    for token in (tokenizer.eos_token_id, tokenizer.sep_token_id):
        if token is not None:
            return int(token)
    reason = "it has neither an end-of-text nor a separator token to end a document with"
    raise DataError("--tokenizer", tokenizer.name_or_path, reason, "Add an eos_token to it")


def definition_of(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return what decides the tokens of a text, as JSON that ``tokenizers`` reads."""
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    # Traces of earlier calls, not properties of the tokenizer.
    del definition["truncation"], definition["padding"]
    return json.dumps(definition, sort_keys=True)


def pieces_of(
    documents: Iterable[Document],
    encode: Callable[[str], Sequence[int]],
    characters: int = 1 << 18,
) -> Iterator[tuple[str, bool]]:
    """Yield texts of about so many characters, and whether each is the last of its document.

    They are cut where the tokens stay the same, and not at all if ``encode`` tells a beginning
    from a continuation.
    """
    for document in documents:
        start, text = 0, document.text
        while len(text) - start > characters and _can_cut(encode):
            line_end = _LINE_END.search(text, start + characters)
            if line_end is None:
                break
            yield text[start : line_end.start()], False
            start = line_end.start()
        yield text[start:], True


def _can_cut(encode: Callable[[str], Sequence[int]]) -> bool:
    return [*encode("".join(_PROBE))] == [token for part in _PROBE for token in encode(part)]


def _batches(
    documents: Iterable[Document], encode: Callable[[str], Sequence[int]]
) -> Iterator[list[tuple[str, bool]]]:
    batch: list[tuple[str, bool]] = []
    size = 0
    for piece in pieces_of(documents, encode):
        batch.append(piece)
        size += len(piece[0]) + 1
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _NpyAppender:
    """A one-dimensional ``.npy`` file whose length is known when it is closed.

    numpy pads the header so that it keeps its size when the first dimension grows.
    """

    def __init__(self, file: BinaryIO, dtype: np.dtype[Any]) -> None:
        self._file = file
        self._dtype = dtype
        self.length = 0
        self._write_header()

    def append(self, values: Sequence[int]) -> None:
        self._file.write(np.asarray(values, dtype=self._dtype).tobytes())
        self.length += len(values)

    def finish(self) -> None:
        self._file.seek(0)
        self._write_header()

    def _write_header(self) -> None:
        descr = np.lib.format.dtype_to_descr(self._dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)


def _write(
    folder: Path,
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerFast,
    end_token: int,
    progress: Progress | None,
) -> None:
    total = sum(len(document.text) for document in documents)
    offsets, done = [0], 0
    with (folder / "tokens.npy").open("wb") as file:
        appender = _NpyAppender(file, token_dtype(len(tokenizer)))
        for batch in _batches(documents, partial(tokenizer.encode, add_special_tokens=False)):
            for ids, (text, is_last) in zip(_encode(tokenizer, batch), batch, strict=True):
                appender.append([*ids, end_token] if is_last else ids)
                if is_last:
                    offsets.append(appender.length)
                done += len(text)
            if progress is not None:
                progress(done, total)
        appender.finish()
    np.save(folder / "offsets.npy", np.array(offsets, dtype=np.int64))
    description = {
        "format": _FORMAT_VERSION,
        "num_tokens": appender.length,
        "num_documents": len(documents),
        "vocab_size": len(tokenizer),
    }
    (folder / "store.json").write_text(json.dumps(description), encoding="ascii")


def _encode(tokenizer: PreTrainedTokenizerFast, batch: list[tuple[str, bool]]) -> list[list[int]]:
    encoded = tokenizer(
        [text for text, _ in batch],
        add_special_tokens=False,
        split_special_tokens=True,  # a text cannot forge the end of a document
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    return encoded["input_ids"]


def _open(folder: Path) -> TokenStore | None:
    """Open a cache entry, or return None if it is missing or not whole."""
    try:
        description = json.loads((folder / "store.json").read_text(encoding="ascii"))
        tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        offsets = np.load(folder / "offsets.npy")
    except (OSError, ValueError, EOFError):
        return None
    expected = (description.get("num_documents", -1) + 1, description.get("num_tokens"))
    if (len(offsets), len(tokens)) != expected or offsets[-1] != len(tokens):
        return None
    return TokenStore(tokens, offsets, vocab_size=int(description["vocab_size"]), name=str(folder))
