# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavemare.data.documents import Document, hash_fraction, split_indices, split_text
from wavemare.errors import ConfigError, DataError

TEXTS = st.lists(st.text(alphabet="ab \n", max_size=4), max_size=30)


def test_hash_fraction_is_the_same_everywhere() -> None:
    first_bits = int(hashlib.sha256(b"asyncio/events.py").hexdigest()[:12], 16)
    assert hash_fraction("asyncio/events.py") == first_bits / 2**48


@given(TEXTS, st.floats(0.01, 0.99))
def test_split_covers_every_text_once(texts: list[str], fraction: float) -> None:
    filled = [i for i, text in enumerate(texts) if text.strip()]
    if not filled:
        with pytest.raises(DataError, match="is empty"):
            split_indices(texts, fraction, name="made")
        return
    train, held_out = split_indices(texts, fraction, name="made")
    assert sorted(train + held_out) == filled
    assert train
    assert bool(held_out) == (len(filled) > 1)
    assert train == sorted(train)
    assert held_out == sorted(held_out)


def test_split_keeps_equal_texts_together_and_sides_when_texts_are_added() -> None:
    texts = [f"text {i % 200}" for i in range(400)]
    train, held_out = split_indices(texts, 0.2, name="made")
    assert {texts[i] for i in train}.isdisjoint(texts[i] for i in held_out)
    assert 40 < len(held_out) < 120
    more = split_indices([*texts, "one more"], 0.2, name="made")
    assert more[0][: len(train)] == train
    assert more[1][: len(held_out)] == held_out


@given(st.text(alphabet="abc\n", min_size=2, max_size=300), st.floats(0.01, 0.9))
def test_split_text_loses_nothing(text: str, fraction: float) -> None:
    document = Document("book", text)
    if len(text.strip()) < 2:
        with pytest.raises(DataError, match="cannot be split"):
            split_text(document, fraction)
        return
    start, end = split_text(document, fraction)
    assert start.text + end.text == text
    assert start.text.strip()
    assert end.text.strip()


def test_split_text_cuts_at_the_nearest_line_end() -> None:
    text = "".join(f"line {i}\n" for i in range(100))
    start, end = split_text(Document("book", text), 0.05)
    assert end.text.startswith("line ")
    assert start.text.endswith("\n")
    assert abs(len(end.text) - 0.05 * len(text)) < len("line 99\n")


def test_a_line_end_far_away_is_not_used() -> None:
    start, end = split_text(Document("book", "title\n" + "x" * 994), 0.1)
    assert (len(start.text), len(end.text)) == (900, 100)


def test_one_character_cannot_be_split() -> None:
    with pytest.raises(
        DataError, match=r"--data = 'book'.*1 characters cannot be split.*Give more"
    ):
        split_text(Document("book", "a"), 0.05)


def test_fraction_out_of_range() -> None:
    from wavemare.data.sources import load_documents

    with pytest.raises(ConfigError, match=r"held_out_fraction = 1.0.*between 0 and 1.*0\.05"):
        load_documents(None, held_out_fraction=1.0)
