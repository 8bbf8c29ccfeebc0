# SPDX-License-Identifier: Apache-2.0
"""From text to tokens: encoded, cached, and as the files of ``wavemare data``."""

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from support.refusals import refuses
from wavemare.cli import app
from wavemare.data.encode import build_indexed, cut_text, token_dtype, tokenize
from wavemare.data.indexed import open_indexed, read_indexed
from wavemare.data.tokenizer import train_tokenizer
from wavemare.errors import DataError


def files(prefix):
    return Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()


def column(*texts):
    return Dataset.from_dict({"text": list(texts)})


def expected_ids(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return [*ids, 0]


def test_documents_survive(tmp_path, texts, documents, gpt_tokenizer):
    store = tokenize(documents, gpt_tokenizer, tmp_path, name="made")
    assert (store.num_documents, store.vocab_size, store.name) == (len(documents), 280, "made")
    assert store.num_tokens == store.offsets[-1] == len(store.tokens)
    assert isinstance(store.tokens, np.memmap)
    assert store.tokens.dtype == np.uint16
    for i, text in enumerate(texts):
        assert store.document(i).tolist() == expected_ids(gpt_tokenizer, text)
    with pytest.raises(IndexError):
        store.document(len(documents))


def test_bert_documents_end_with_a_separator(tmp_path, documents, bert_tokenizer):
    store = tokenize(documents, bert_tokenizer, tmp_path, name="made")
    assert {int(store.document(i)[-1]) for i in range(len(documents))} == {3}
    assert 2 not in store.tokens


def test_blank_documents_are_left_out_and_no_text_forges_an_end(tmp_path, gpt_tokenizer):
    text = "a<|endoftext|>b"
    store = tokenize(column(" \n", text, None), gpt_tokenizer, tmp_path, name="made")
    assert store.num_documents == 1
    assert store.document(0).tolist() == expected_ids(gpt_tokenizer, text)
    assert store.document(0).tolist().count(0) == 1
    assert gpt_tokenizer.decode(store.document(0)[:-1].tolist()) == text


def test_a_long_document_has_the_tokens_of_its_whole_text(tmp_path, gpt_tokenizer):
    text = "wave sea\n mare\n\ntide  pipe\n" * 12_000
    store = tokenize(column("sea", text, "mare"), gpt_tokenizer, tmp_path, name="made")
    assert store.document(1).tolist() == expected_ids(gpt_tokenizer, text)
    assert store.num_documents == 3


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
        pieces = [*cut_text(text, encode, characters=20)]
        assert "".join(pieces) == text
        assert [token for piece in pieces for token in encode(piece)] == encode(text)
        cuts += len(pieces) - 1
    assert (cuts > 0) == (kind in ("gpt2", "gpt4"))


def test_tokens_come_from_the_cache_if_text_and_tokenizer_are_equal(
    tmp_path, texts, documents, gpt_tokenizer, bert_tokenizer
):
    def encodes(documents, tokenizer):
        before = {*tmp_path.iterdir()}
        tokenize(documents, tokenizer, tmp_path, name="made")
        return {*tmp_path.iterdir()} != before

    assert encodes(documents, gpt_tokenizer)
    gpt_tokenizer(["a", "b c"], padding=True, truncation=True, max_length=3)  # leaves a trace
    assert not encodes(column(*texts), gpt_tokenizer)
    assert encodes(documents, train_tokenizer(["other"], 280, kind="gpt"))
    assert encodes(documents, bert_tokenizer)
    assert encodes(column(*texts[::-1]), gpt_tokenizer)
    assert encodes(column(texts[0] + texts[1], *texts[2:]), gpt_tokenizer)


def test_callers_at_once_encode_once(monkeypatch, tmp_path, documents, gpt_tokenizer):
    start = threading.Barrier(2)
    calls = []

    def build(*given):
        calls.append(given)
        build_indexed(*given)

    monkeypatch.setattr("wavemare.data.encode.build_indexed", build)

    def work():
        start.wait()
        store = tokenize(documents, gpt_tokenizer, tmp_path, name="made")
        assert store.num_documents == len(documents)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(work) for _ in range(2)]:
            done.result()
    assert len(calls) == 1


def test_inputs_that_cannot_be_tokenized(tmp_path, documents, gpt_tokenizer):
    from tokenizers import Tokenizer, models

    with refuses(DataError, "INPUT"):
        tokenize(column(" "), gpt_tokenizer, tmp_path, name="made")
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [
        ".failed",
        ".lock",
    ]  # no entry is left
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    with refuses(DataError, "--tokenizer", ""):
        tokenize(documents, bare, tmp_path, name="made")
    (tmp_path / "file").write_text("in the way")
    with refuses(DataError, "--cache", str(tmp_path / "file" / "cache")):
        tokenize(documents, gpt_tokenizer, tmp_path / "file" / "cache", name="made")


def test_a_damaged_cache_entry_is_named(tmp_path, documents, gpt_tokenizer):
    tokenize(documents, gpt_tokenizer, tmp_path, name="made")
    (file,) = tmp_path.glob("*/tokens.idx")
    file.write_bytes(file.read_bytes()[:-1])
    with refuses(DataError, "--data", str(file)):
        tokenize(documents, gpt_tokenizer, tmp_path, name="made")


def test_large_vocabularies_are_int32():
    assert (token_dtype(65_499), token_dtype(65_500)) == (np.uint16, np.int32)


def test_without_end_tokens(tmp_path, documents, gpt_tokenizer):
    build_indexed(documents, gpt_tokenizer, tmp_path / "with")
    build_indexed(documents, gpt_tokenizer, tmp_path / "without", append_eod=False)
    first = read_indexed(tmp_path / "with").document(0).tolist()
    assert first[-1] == gpt_tokenizer.eos_token_id
    assert read_indexed(tmp_path / "without").document(0).tolist() == first[:-1]


def test_a_build_that_fails_leaves_nothing(tmp_path, documents, gpt_tokenizer):
    odd = Dataset.from_dict({"text": [1]})
    with pytest.raises(AttributeError):
        build_indexed(odd, gpt_tokenizer, tmp_path / "c")
    assert not list(tmp_path.iterdir())
    build_indexed(documents, gpt_tokenizer, tmp_path / "c")
    before = files(tmp_path / "c")
    with refuses(DataError, "--output", str(tmp_path / "c")):
        build_indexed(documents.select([0]), gpt_tokenizer, tmp_path / "c")
    assert files(tmp_path / "c") == before
    build_indexed(documents.select([0]), gpt_tokenizer, tmp_path / "c", overwrite=True)
    assert read_indexed(tmp_path / "c").num_documents == 1


def run(*arguments):
    result = CliRunner().invoke(app, ["data", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_commands(tmp_path, gpt_tokenizer, monkeypatch):
    for name in ("TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS"):
        monkeypatch.setenv(name, "0")  # the command sets them
    gpt_tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = [{"body": "sea wave"}, {"body": "  "}, {"body": "tide pipe stage"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    options = ("--tokenizer", tmp_path / "tokenizer", "--text-column", "body", "--workers", 1)
    shown = run("build", tmp_path / "rows.jsonl", "--output", tmp_path / "a", *options)
    assert "a: 2 documents," in shown
    run("merge", tmp_path / "a", tmp_path / "a", "--output", tmp_path / "b")
    data = open_indexed(tmp_path / "b")
    assert len(data.bounds) == 5
    facts = json.loads(run("inspect", tmp_path / "b", "--json"))
    assert facts["documents"] == facts["sequences"] == 4
    assert facts["type"] == "uint16"
    assert facts["tokens"] == len(data.tokens) == data.lengths.sum()
    assert facts["longest"] == data.lengths.max()
    text = run("inspect", tmp_path / "b", "--tokenizer", tmp_path / "tokenizer", "--documents", 2)
    assert "'sea wave<|endoftext|>'" in text
    assert "'tide pipe stage<|endoftext|>'" in text
