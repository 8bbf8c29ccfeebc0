# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from wavemare.data import tokens as tokens_module
from wavemare.data.documents import Document
from wavemare.data.tokenizer import train_tokenizer
from wavemare.data.tokens import TokenStore, largest_token, split_store, tokenize
from wavemare.errors import DataError

MakeStore = Callable[..., TokenStore]


def expected_ids(tokenizer: PreTrainedTokenizerFast, text: str, end: int) -> list[int]:
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], end]


def test_documents_survive(
    tmp_path: Path, documents: list[Document], gpt_tokenizer: PreTrainedTokenizerFast
) -> None:
    store = tokenize(documents, gpt_tokenizer, tmp_path)
    assert (store.num_documents, store.vocab_size) == (len(documents), 280)
    assert store.num_tokens == store.offsets[-1] == len(store.tokens)
    assert isinstance(store.tokens, np.memmap)
    assert store.tokens.dtype == np.uint16
    for i, document in enumerate(documents):
        assert store.document(i).tolist() == expected_ids(gpt_tokenizer, document.text, 0)
    with pytest.raises(IndexError):
        store.document(len(documents))


def test_bert_documents_end_with_a_separator(
    tmp_path: Path, documents: list[Document], bert_tokenizer: PreTrainedTokenizerFast
) -> None:
    store = tokenize(documents, bert_tokenizer, tmp_path)
    assert {int(store.document(i)[-1]) for i in range(len(documents))} == {3}
    assert 2 not in store.tokens


def test_a_text_cannot_forge_the_end_of_a_document(
    tmp_path: Path, gpt_tokenizer: PreTrainedTokenizerFast
) -> None:
    text = "a<|endoftext|>b"
    store = tokenize([Document("forged", text)], gpt_tokenizer, tmp_path)
    assert store.document(0).tolist().count(0) == 1
    assert gpt_tokenizer.decode(store.document(0)[:-1].tolist()) == text


@pytest.fixture(scope="module")
def blank_line_tokenizer() -> PreTrainedTokenizerFast:
    """Joins runs of blanks, so that a cut within one would show."""
    blanks = ["a\n\nb \n\n\n  a\t\n \nab", "b  \n\n a\n\n\n\n", "\n \n\n a\n\t\n"]
    return train_tokenizer(blanks * 9, 300, kind="gpt")


@settings(max_examples=200)
@given(st.lists(st.text(alphabet="ab \n\n\t", max_size=60), min_size=1, max_size=4))
def test_long_documents_are_cut_without_a_trace(
    blank_line_tokenizer: PreTrainedTokenizerFast, texts: list[str]
) -> None:
    made = [Document(str(i), text) for i, text in enumerate(texts)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens_module, "_PIECE_CHARACTERS", 5)
        patch.setattr(tokens_module, "_BATCH_CHARACTERS", 17)
        encode = partial(blank_line_tokenizer.encode, add_special_tokens=False)
        pieces = [piece for batch in tokens_module._batches(made, encode) for piece in batch]
        ids = [
            i
            for batch in tokens_module._batches(made, encode)
            for i in tokens_module._encode(blank_line_tokenizer, batch)
        ]
    assert "".join(text for text, _ in pieces) == "".join(texts)
    assert sum(is_last for _, is_last in pieces) == len(texts)
    whole = [i for text in texts for i in expected_ids(blank_line_tokenizer, text, 0)[:-1]]
    assert [i for piece in ids for i in piece] == whole


def test_progress_and_cache(
    tmp_path: Path,
    documents: list[Document],
    gpt_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokens_module, "_BATCH_CHARACTERS", 1000)
    seen: list[tuple[int, int]] = []
    first = tokenize(documents, gpt_tokenizer, tmp_path, progress=lambda *at: seen.append(at))
    total = sum(len(d.text) for d in documents)
    assert len(seen) > 3
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)
    count = len(seen)
    again = tokenize(documents, gpt_tokenizer, tmp_path, progress=lambda *at: seen.append(at))
    assert len(seen) == count
    assert np.array_equal(first.tokens, again.tokens)
    assert np.array_equal(first.offsets, again.offsets)


def test_the_cache_key_covers_texts_and_tokenizer(
    tmp_path: Path,
    documents: list[Document],
    gpt_tokenizer: PreTrainedTokenizerFast,
    bert_tokenizer: PreTrainedTokenizerFast,
) -> None:
    def entries() -> int:
        return len([path for path in tmp_path.iterdir() if path.is_dir()])

    tokenize(documents, gpt_tokenizer, tmp_path)
    gpt_tokenizer(["a", "b c"], padding=True, truncation=True, max_length=3)  # leaves a trace
    renamed = [Document(f"other {d.name}", d.text) for d in documents]
    tokenize(renamed, gpt_tokenizer, tmp_path)
    assert entries() == 1
    tokenize(documents, train_tokenizer(["other"], 280, kind="gpt"), tmp_path)
    assert entries() == 2
    tokenize(documents, bert_tokenizer, tmp_path)
    tokenize(documents[::-1], gpt_tokenizer, tmp_path)
    joined = [Document("joined", documents[0].text + documents[1].text), *documents[2:]]
    tokenize(joined, gpt_tokenizer, tmp_path)
    assert entries() == 5


@pytest.mark.parametrize("name", ["tokens.npy", "offsets.npy", "store.json"])
@pytest.mark.parametrize("damage", ["truncate", "empty", "remove"])
def test_a_damaged_entry_is_built_again(
    tmp_path: Path,
    documents: list[Document],
    gpt_tokenizer: PreTrainedTokenizerFast,
    name: str,
    damage: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = np.array(tokenize(documents, gpt_tokenizer, tmp_path).tokens)
    (file,) = tmp_path.glob(f"*/{name}")
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: -7 if damage == "truncate" else 0])
    again = tokenize(documents, gpt_tokenizer, tmp_path)
    assert np.array_equal(again.tokens, first)
    assert "is damaged and is built again" in caplog.text


@pytest.mark.parametrize("name", ["tokens.npy", "offsets.npy"])
def test_files_of_another_length_are_noticed(
    tmp_path: Path, documents: list[Document], gpt_tokenizer: PreTrainedTokenizerFast, name: str
) -> None:
    first = np.array(tokenize(documents, gpt_tokenizer, tmp_path).tokens)
    (file,) = tmp_path.glob(f"*/{name}")
    np.save(file, np.array(np.load(file)[:-1]))
    again = tokenize(documents, gpt_tokenizer, tmp_path)
    assert np.array_equal(again.tokens, first)
    assert again.offsets[-1] == len(first)


def test_no_documents(tmp_path: Path, gpt_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match=r"--data.*no documents.*Give files"):
        tokenize([], gpt_tokenizer, tmp_path)


def test_a_tokenizer_without_an_end(tmp_path: Path, documents: list[Document]) -> None:
    from tokenizers import Tokenizer, models

    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    with pytest.raises(DataError, match=r"--tokenizer.*neither an end-of-text.*eos_token"):
        tokenize(documents, bare, tmp_path)


def test_large_vocabularies_are_int32(
    tmp_path: Path,
    documents: list[Document],
    gpt_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = np.array(tokenize(documents, gpt_tokenizer, tmp_path / "small").tokens)
    monkeypatch.setattr(tokens_module, "_LARGEST_UINT16_VOCABULARY", 280)
    large = tokenize(documents, gpt_tokenizer, tmp_path / "large").tokens
    assert large.dtype == np.int32
    assert np.array_equal(small, large)


def _work(path: Path, documents: list[Document], tokenizer: PreTrainedTokenizerFast) -> None:
    calls: list[int] = []
    store = tokenize(documents, tokenizer, path, progress=lambda *at: calls.append(1))
    assert store.num_documents == len(documents)
    if calls:
        (path / f"built-{multiprocessing.current_process().name}").touch()


def test_processes_at_once_encode_once(
    tmp_path: Path, documents: list[Document], gpt_tokenizer: PreTrainedTokenizerFast
) -> None:
    context = multiprocessing.get_context("spawn")
    arguments = (tmp_path, documents * 50, gpt_tokenizer)
    workers = [context.Process(target=_work, args=arguments) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert len(list(tmp_path.glob("built-*"))) == 1


def test_vocab_size_is_counted_where_it_is_not_declared(make_store: MakeStore) -> None:
    assert make_store([[1, 9], [4]]).vocab_size == 10
    assert make_store([[1, 9], [4]], vocab_size=50).vocab_size == 50


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 7))
def test_largest_token(values: list[int], chunk: int) -> None:
    store = TokenStore(np.array(values), np.array([0, len(values)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens_module, "_SCAN_TOKENS", chunk)
        assert largest_token(store) == (max(values), values.index(max(values)))


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=2, max_size=30),
    st.floats(0.01, 0.99),
)
def test_split_store_by_document(documents: list[list[int]], fraction: float) -> None:
    offsets = np.cumsum([0, *map(len, documents)]).astype(np.int64)
    store = TokenStore(np.array([t for d in documents for t in d], dtype=np.int32), offsets)
    train, held_out = split_store(store, fraction)
    assert train.num_documents >= 1
    assert held_out.num_documents >= 1
    both = [
        part.document(i).tolist() for part in (train, held_out) for i in range(part.num_documents)
    ]
    assert both == documents
    assert abs(held_out.num_documents - fraction * len(documents)) <= 1


def test_split_store_of_one_document(make_store: MakeStore) -> None:
    train, held_out = split_store(make_store([list(range(100))]), 0.05)
    assert (train.num_tokens, held_out.num_tokens) == (95, 5)
    assert held_out.document(0).tolist() == [95, 96, 97, 98, 99]
    with pytest.raises(DataError, match=r"1 tokens cannot be split.*Give more"):
        split_store(make_store([[1]]))


GPT4 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.mark.parametrize("kind", ["gpt2", "prefix", "gpt4", "metaspace"])
def test_pieces_have_the_tokens_of_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where signs draw a line end to them, and where a text begins with a space of its own."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    split = pre_tokenizers.Split(Regex(GPT4), "isolated")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(models.BPE(unk_token="?"))
    tokenizer.pre_tokenizer = {
        "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "prefix": pre_tokenizers.ByteLevel(add_prefix_space=True),
        "gpt4": pre_tokenizers.Sequence([split, plain]),
        "metaspace": pre_tokenizers.Metaspace(),
    }[kind]
    draw = random.Random(1)
    signs = ["sea", "Wave", " ", "  ", "\n", "\n\n", ".", "!?", ")", "12", "_", "\t", "\r\n"]
    texts = ["".join(draw.choice(signs) for _ in range(60)) for _ in range(30)]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["?"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    monkeypatch.setattr(tokens_module, "_PIECE_CHARACTERS", 20)
    cuts = 0
    for text in texts:
        pieces = [piece for piece, _ in tokens_module.pieces_of([Document("", text)], encode)]
        assert [token for piece in pieces for token in encode(piece)] == encode(text)
        cuts += len(pieces) - 1
    assert (cuts > 0) == (kind in ("gpt2", "gpt4"))
