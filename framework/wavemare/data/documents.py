# SPDX-License-Identifier: Apache-2.0
"""Documents, corpora and the deterministic split into train and held-out documents."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload

from wavemare.errors import ConfigError, DataError

__all__ = [
    "Corpus",
    "Document",
    "ReadDocuments",
    "check_fraction",
    "hash_fraction",
    "split_indices",
    "split_text",
]


@dataclass(frozen=True, slots=True)
class Document:
    """One text that stands by itself: nothing is predicted across its edges.

    Attributes:
        name: Where the text comes from (a relative path, or a file and row).
        text: The text, never blank.
    """

    name: str
    text: str


class ReadDocuments(Sequence[Document]):
    """Documents that are read when they are asked for."""

    @abstractmethod
    def read(self, index: int) -> Document:
        """Return one of them."""

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> list[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | list[Document]:
        if isinstance(index, slice):
            return [self.read(i) for i in range(*index.indices(len(self)))]
        return self.read(index)


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and documents kept apart for evaluation.

    Attributes:
        name: The corpus as the user knows it, for messages and reports.
        train: Documents to train on, at least one.
        held_out: Documents to evaluate on, at least one.
    """

    name: str
    train: Sequence[Document]
    held_out: Sequence[Document]


def hash_fraction(key: str) -> float:
    """Map a text to a number in [0, 1) that is the same on every machine."""
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6]) / 2**48


def check_fraction(fraction: float) -> None:
    """Refuse a held-out share that leaves nothing to train on or to evaluate on.

    Raises:
        ConfigError: The fraction is outside the open interval from 0 to 1.
    """
    if not 0.0 < fraction < 1.0:
        reason = "the share of held-out documents must lie between 0 and 1"
        raise ConfigError("held_out_fraction", fraction, reason, "Give a share such as 0.05")


def split_indices(
    texts: Iterable[str | None], fraction: float, *, name: str
) -> tuple[list[int], list[int]]:
    """Split documents by the hash of their text.

    Equal texts always fall on the same side, and a document keeps its side when others are added.
    Blank texts are on neither side.

    Args:
        texts: The texts in the order of the corpus.
        fraction: Share of the documents that is held out, at least one where there are two.
        name: The corpus, for the error.

    Returns:
        Indices of the train texts and of the held-out texts, both ascending. The second list is
        empty only if there is a single document: see ``split_text``.

    Raises:
        DataError: There is no text at all.
    """
    fractions = {i: hash_fraction(text) for i, text in enumerate(texts) if text and text.strip()}
    if not fractions:
        reason = "the corpus is empty: it holds no text besides blanks"
        raise DataError("--data", name, reason, "Give files that hold text")
    if len(fractions) == 1:
        return list(fractions), []
    held_out = {i for i, value in fractions.items() if value < fraction}
    if not held_out:
        held_out = {i for i, value in fractions.items() if value == min(fractions.values())}
    if len(held_out) == len(fractions):
        held_out -= {i for i, value in fractions.items() if value == max(fractions.values())}
    if not held_out:  # one text, again and again: there is nothing else to hold out
        held_out = {max(fractions)}
    return [i for i in fractions if i not in held_out], sorted(held_out)


def split_text(document: Document, fraction: float) -> tuple[Document, Document]:
    """Split the only document of a corpus by position, at a line end if one is near.

    Args:
        document: The document to cut.
        fraction: Share of the text, from its end, that is held out; a line end may add or take up
            to half of it.

    Raises:
        DataError: The text is too short to be cut in two.
    """
    text = document.text
    first = len(text) - len(text.lstrip()) + 1  # neither part may be blank
    last = len(text.rstrip()) - 1
    if first > last:
        reason = f"a single document of {len(text)} characters cannot be split for evaluation"
        raise DataError("--data", document.name, reason, "Give more text")
    target = min(max(int(len(text) * (1.0 - fraction)), first), last)
    around = (text.rfind("\n", first, target) + 1, text.find("\n", target, last) + 1)
    reach = len(text) * fraction / 2
    near = [end for end in around if first <= end <= last and abs(end - target) <= reach]
    cut = min(near, key=lambda end: abs(end - target), default=target)
    return (
        Document(f"{document.name} (start)", text[:cut]),
        Document(f"{document.name} (end)", text[cut:]),
    )
