# SPDX-License-Identifier: Apache-2.0
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from wavemare.data.documents import Document
from wavemare.data.tokenizer import train_tokenizer
from wavemare.data.tokens import (
    TokenStore,
    largest_token,
    pieces_of,
    split_store,
    token_dtype,
    tokenize,
)
from wavemare.errors import DataError


def expected_ids(tokenizer, text, end):
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], end]


def test_documents_survive(tmp_path, documents, gpt_tokenizer):
    store = tokenize(documents, gpt_tokenizer, tmp_path)
    assert (store.num_documents, store.vocab_size) == (len(documents), 280)
    assert store.num_tokens == store.offsets[-1] == len(store.tokens)
    assert isinstance(store.tokens, np.memmap)
    assert store.tokens.dtype == np.uint16
    for i, document in enumerate(documents):
        assert store.document(i).tolist() == expected_ids(gpt_tokenizer, document.text, 0)
    with pytest.raises(IndexError):
        store.document(len(documents))


def test_bert_documents_end_with_a_separator(tmp_path, documents, bert_tokenizer):
    store = tokenize(documents, bert_tokenizer, tmp_path)
    assert {int(store.document(i)[-1]) for i in range(len(documents))} == {3}
    assert 2 not in store.tokens


def test_a_text_cannot_forge_the_end_of_a_document(tmp_path, gpt_tokenizer):
    text = "a<|endoftext|>b"
    store = tokenize([Document("forged", text)], gpt_tokenizer, tmp_path)
    assert store.document(0).tolist().count(0) == 1
    assert gpt_tokenizer.decode(store.document(0)[:-1].tolist()) == text


def test_a_long_document_has_the_tokens_of_its_whole_text(tmp_path, gpt_tokenizer):
    text = "wave sea\n mare\n\ntide  pipe\n" * 12_000
    store = tokenize([Document("long", text)], gpt_tokenizer, tmp_path)
    assert store.document(0).tolist() == expected_ids(gpt_tokenizer, text, 0)


GPT4 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.mark.parametrize("kind", ["gpt2", "prefix", "gpt4", "metaspace"])
def test_pieces_have_the_tokens_of_the_whole(kind):
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
    texts = ["".join(draw.choice(signs) for _ in range(60)) for _ in range(60)]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["?"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)

    def encode(text):
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    cuts = 0
    for text in texts:
        pieces = list(pieces_of([Document("", text)], encode, characters=20))
        assert "".join(piece for piece, _ in pieces) == text
        assert [is_last for _, is_last in pieces] == [False] * (len(pieces) - 1) + [True]
        assert [token for piece, _ in pieces for token in encode(piece)] == encode(text)
        cuts += len(pieces) - 1
    assert (cuts > 0) == (kind in ("gpt2", "gpt4"))


def test_tokens_come_from_the_cache_if_text_and_tokenizer_are_equal(
    tmp_path, documents, gpt_tokenizer, bert_tokenizer
):
    total = sum(len(document.text) for document in documents)

    def encodes(documents, tokenizer):
        seen = []
        tokenize(documents, tokenizer, tmp_path, progress=lambda *at: seen.append(at))
        assert not seen or seen[-1] == (total, total)
        return bool(seen)

    assert encodes(documents, gpt_tokenizer)
    gpt_tokenizer(["a", "b c"], padding=True, truncation=True, max_length=3)  # leaves a trace
    renamed = [Document(f"other {d.name}", d.text) for d in documents]
    assert not encodes(renamed, gpt_tokenizer)
    assert encodes(documents, train_tokenizer(["other"], 280, kind="gpt"))
    assert encodes(documents, bert_tokenizer)
    assert encodes(documents[::-1], gpt_tokenizer)
    joined = [Document("joined", documents[0].text + documents[1].text), *documents[2:]]
    assert encodes(joined, gpt_tokenizer)


@pytest.mark.parametrize("name", ["tokens.npy", "offsets.npy", "store.json"])
@pytest.mark.parametrize("damage", ["truncate", "empty", "remove", "shorten"])
def test_a_damaged_cache_entry_is_built_again(
    tmp_path, documents, gpt_tokenizer, name, damage, caplog
):
    first = np.array(tokenize(documents, gpt_tokenizer, tmp_path).tokens)
    (file,) = tmp_path.glob(f"*/{name}")
    if damage == "remove":
        file.unlink()
    elif damage == "shorten" and file.suffix == ".npy":
        np.save(file, np.array(np.load(file)[:-1]))
    else:
        file.write_bytes(file.read_bytes()[: 0 if damage == "empty" else -7])
    again = tokenize(documents, gpt_tokenizer, tmp_path)
    assert np.array_equal(again.tokens, first)
    assert again.offsets[-1] == len(first)
    assert "is damaged and is built again" in caplog.text


def test_inputs_that_cannot_be_tokenized(tmp_path, documents, gpt_tokenizer):
    from tokenizers import Tokenizer, models

    with pytest.raises(DataError, match=r"--data.*no documents.*Give files"):
        tokenize([], gpt_tokenizer, tmp_path)
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    with pytest.raises(DataError, match=r"--tokenizer.*neither an end-of-text.*eos_token"):
        tokenize(documents, bare, tmp_path)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cache_dir.*cannot be written.*another cache folder"):
        tokenize(documents, gpt_tokenizer, tmp_path / "file" / "cache")


def test_large_vocabularies_are_int32():
    assert (token_dtype(65_499), token_dtype(65_500)) == (np.uint16, np.int32)


def test_callers_at_once_encode_once(tmp_path, documents, gpt_tokenizer):
    encoding = threading.Barrier(2)
    calls = []

    def work():
        encoding.wait()
        store = tokenize(documents, gpt_tokenizer, tmp_path, progress=lambda *at: calls.append(at))
        assert store.num_documents == len(documents)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(work) for _ in range(2)]:
            done.result()
    assert len(calls) == 1


def test_vocab_size_is_counted_where_it_is_not_declared(make_store):
    assert make_store([[1, 9], [4]]).vocab_size == 10
    assert make_store([[1, 9], [4]], vocab_size=50).vocab_size == 50


@pytest.mark.parametrize("place", [0, 7, 1 << 24, (1 << 24) + 8])
def test_the_largest_token_and_its_first_place(place):
    tokens = np.zeros((1 << 24) + 10, dtype=np.uint8)
    tokens[[place, -1]] = 9
    tokens[place // 2] += 1
    assert largest_token(TokenStore(tokens, np.array([0, len(tokens)]))) == (tokens.max(), place)


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=2, max_size=30),
    st.floats(0.01, 0.99),
)
def test_split_store_by_document(make_store, documents, fraction):
    train, held_out = split_store(make_store(documents), fraction)
    assert train.num_documents >= 1
    assert held_out.num_documents >= 1
    both = [
        part.document(i).tolist() for part in (train, held_out) for i in range(part.num_documents)
    ]
    assert both == documents
    assert abs(held_out.num_documents - fraction * len(documents)) <= 1


def test_split_store_of_one_document(make_store):
    train, held_out = split_store(make_store([list(range(100))]), 0.05)
    assert (train.num_tokens, held_out.num_tokens) == (95, 5)
    assert held_out.document(0).tolist() == [95, 96, 97, 98, 99]
    with pytest.raises(DataError, match=r"1 tokens cannot be split.*Give more"):
        split_store(make_store([[1]]))
