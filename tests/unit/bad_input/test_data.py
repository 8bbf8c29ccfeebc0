# SPDX-License-Identifier: Apache-2.0
"""Data that cannot be read: names, texts, tables, labels, tokenizers, shares."""

from pathlib import Path
from tempfile import TemporaryDirectory

import datasets
import pandas
import pyarrow
import pytest
from pyarrow import parquet

from wavemare.data.chat import read_chats
from wavemare.data.classification import load_classification
from wavemare.data.megatron_order import split_ranges
from wavemare.data.sources import resolve
from wavemare.data.text import load_text
from wavemare.data.tokenizer import load_tokenizer
from wavemare.errors import ConfigError, DataError
from wavemare.recipes.gpt.pretrain import PretrainArguments
from wavemare.training.text import find_data, read_text


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path_factory):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    cache = tmp_path_factory.mktemp("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)


NAMES = [
    "",
    "nosuch.txt",
    "~nosuchuser/x.txt",
    pytest.param("/" + "x" * 5000, id="a long name"),
    pytest.param("a\0b.txt", id="a zero byte"),
    "hub:",
    "owner/name",
    "wikitxt",
    "nosuch/*.jsonl",
    "-1 a 2 b",
    "nan a 2 b",
    "0 a 0 b",
    "0.3 a 0.7 b",
    "0.3 . 0.7 b",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_data(refused, name):
    refused(lambda: load_text(name), DataError, "--data")


FILES = [
    ("a.txt", ""),
    pytest.param("a.txt", " \n\n", id="a blank file"),
    pytest.param("a.txt", b"abc\xff", id="not UTF-8"),
    ("a.txt", "héllo".encode("utf-16")),
    ("a.pdf", "x"),
    pytest.param("a.csv", "a,b\n1,2\n", id="no text column"),
    pytest.param("a.csv", "text\n", id="a header alone"),
    ("a.csv", "text,label\na, b, c,1\nd,2\n"),
    pytest.param("a.jsonl", '{"text":"a"}\n{"text":\n', id="half a line of JSON"),
    pytest.param("a.jsonl", '{"text": 1}\n', id="numbers for text"),
    pytest.param("a.jsonl", '{"text":"\\ud800"}\n', id="half a character"),
    pytest.param("a.jsonl", '{"text":"a","text":"b"}', id="two texts"),
    pytest.param("a.jsonl", "[" * 99999, id="deep nesting"),
    pytest.param("a.jsonl", '{"text": null}\n', id="null for text"),
    ("a.json", "3"),
    pytest.param("a.parquet", "text" * 9, id="text as Parquet"),
    ("dataset_info.json", "{}"),
]


@pytest.mark.parametrize(("name", "content"), FILES)
def test_a_file_of_data(refused, write, name, content):
    file = write(f"data/{name}", content)
    spec = str(file.parent if name.startswith("dataset_info") else file)
    refused(lambda: load_text(spec), DataError, "--data")


def load_chats(spec):
    with TemporaryDirectory() as folder:
        return read_chats(resolve(spec), Path(folder))


READERS = {
    "text": (load_text, ("text",)),
    "chats": (load_chats, ("prompt", "completion")),
    "labels": (lambda spec: load_classification(resolve(spec)), ("text", "label")),
}


@pytest.mark.parametrize("kind", ["parquet", "saved", "jsonl", "csv"])
@pytest.mark.parametrize("reader", READERS)
def test_bytes_that_are_no_text(refused, tmp_path, reader, kind):
    load, (*others, column) = READERS[reader]
    content = [b"good", b"\xff\xfe", b"good"]
    _, *buffers = pyarrow.array(content, pyarrow.binary()).buffers()
    bad = pyarrow.Array.from_buffers(pyarrow.string(), 3, [None, *buffers])
    table = pyarrow.table({**{name: ["a", "b", "c"] for name in others}, column: bad})
    file = tmp_path / f"a.{kind}"
    if kind == "parquet":
        parquet.write_table(table, file)
    elif kind == "saved":
        datasets.Dataset(table).save_to_disk(str(file))
    elif kind == "csv":
        rows = [b",".join([b"a"] * len(others) + [text]) for text in content]
        file.write_bytes(b"\n".join([",".join([*others, column]).encode(), *rows]))
    else:
        head = "".join(f'"{name}":"a",' for name in others) + f'"{column}":"'
        file.write_bytes(b"\n".join(b"{" + head.encode() + text + b'"}' for text in content))
    refused(lambda: load(str(file)), DataError, "--data")


def test_dates_and_numbers_for_answers(refused, tmp_path):
    for values in ([1, 2], [1.5, 2.5], pandas.to_datetime(["2024-01-01", "2024-01-02"])):
        file = tmp_path / "a.parquet"
        pandas.DataFrame({"prompt": ["a", "b"], "completion": values}).to_parquet(file)
        refused(lambda: load_chats(str(file)), DataError, "--data")  # noqa: B023


@pytest.mark.parametrize("files", [{}, {"a.txt": "a", "b.jsonl": "{}"}])
def test_a_folder_of_no_kind_or_of_several(refused, write, tmp_path, files):
    for name, content in files.items():
        write(name, content)
    refused(lambda: resolve(str(tmp_path)), DataError, "--data")


LABELS = [
    "abc",
    pytest.param("words,label\na,1\nb,2\n", id="no text column"),
    pytest.param("text\na\nb\n", id="no labels"),
    pytest.param("text,label\na,1\nb,1\nc,1\n", id="one label"),
    pytest.param("text,label\na,1\n", id="one row"),
    pytest.param("text,label\na,1.5\nb,2.5\n", id="fractions"),
    pytest.param("text,label\na,x\nb,\n", id="a label is missing"),
    pytest.param("text,label\n ,1\n ,2\n", id="no text"),
]


@pytest.mark.parametrize("content", LABELS)
def test_labels(refused, write, content):
    file = str(write("a.txt" if content == "abc" else "labels.csv", content))
    refused(lambda: load_classification(resolve(file)), DataError, "--data")


FAST = '{"tokenizer_class": "PreTrainedTokenizerFast"}'
TOKENIZERS = [
    None,
    {},
    {"tokenizer.json": "{", "tokenizer_config.json": "{}"},
    {"tokenizer.json": "{}", "tokenizer_config.json": FAST},
]


@pytest.mark.parametrize("files", TOKENIZERS)
def test_a_tokenizer(refused, write, tmp_path, files):
    folder = tmp_path / "tokenizer"
    if files is not None:
        folder.mkdir()
        for name, content in files.items():
            write(f"tokenizer/{name}", content)
    refused(lambda: load_tokenizer(folder), DataError, "--tokenizer")


SPLITS = [
    "a",
    "",
    "1,2,3,4",
    "0,0,0",
    "969;30;1",
]


@pytest.mark.parametrize("split", SPLITS)
def test_shares(refused, split):
    refused(lambda: split_ranges(split, 10), ConfigError, "--split")


def test_a_text_that_is_too_short_is_named_by_its_file(refused, write, tmp_path):
    options = {"data": str(write("a.txt", "few words. " * 9)), "cache": str(tmp_path)}
    arguments = PretrainArguments(**options, vocab_size=300)
    text = read_text(find_data(arguments), arguments, special_tokens="gpt")
    act = lambda: text.causal_samples(128, num_samples=1, seed=0)  # noqa: E731
    refused(act, DataError, "--data")
    assert "a.txt" in text.source.name


@pytest.mark.parametrize("read", [load_text, load_classification])
def test_a_cache_of_datasets_that_cannot_be_made_is_named(refused, monkeypatch, tmp_path, read):
    (tmp_path / "a.csv").write_text(
        "text,label\n" + "".join(f"text {n},{n % 2}\n" for n in range(40))
    )
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", "/proc/nohome/datasets")
    source = resolve(str(tmp_path / "a.csv"))
    refused(lambda: read(source), DataError, "HF_HOME")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    assert read(source)
