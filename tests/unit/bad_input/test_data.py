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
from wavemare.data.loader import ResumableLoader
from wavemare.data.megatron_order import split_ranges
from wavemare.data.sources import resolve
from wavemare.data.text import load_text
from wavemare.data.tokenizer import load_tokenizer, train_tokenizer
from wavemare.errors import ConfigError, DataError
from wavemare.recipes.gpt.pretrain import PretrainArguments
from wavemare.training.text import find_text, read_text


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path_factory):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    cache = tmp_path_factory.mktemp("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)


NAMES = [
    ("", "it is empty", "leave the option out"),
    ("nosuch.txt", "no such file", "Check the path"),
    ("~nosuchuser/x.txt", "no such file", "Check the path"),
    pytest.param("/" + "x" * 5000, "File name too long", "Check the path", id="a long name"),
    pytest.param("a\0b.txt", "no such file", "Check the path", id="a zero byte"),
    ("hub:", "no dataset is named", "Give a file"),
    ("owner/name", "no such file", "hub:owner/name"),
    ("wikitxt", "cannot be read as hub", "format"),
    ("nosuch/*.jsonl", "no file with a known extension", ".jsonl"),
    ("-1 a 2 b", "weights are 0 or more", "0.3 A 0.7 B"),
    ("nan a 2 b", "weights are 0 or more", "0.3 A 0.7 B"),
    ("0 a 0 b", "one is above", "0.3 A 0.7 B"),
    ("0.3 a 0.7 b", "a.bin does not exist", "side by side"),
    ("0.3 . 0.7 b", "names a folder", "FOLDER/NAME"),
]


@pytest.mark.parametrize(("name", "reason", "remedy"), NAMES)
def test_a_name_of_data(refused, name, reason, remedy):
    refused(lambda: load_text(name), DataError, "--data", reason, remedy)


FILES = [
    ("a.txt", "", "every file has 0 bytes"),
    pytest.param("a.txt", " \n\n", "no text besides blanks", id="a blank file"),
    pytest.param("a.txt", b"abc\xff", "in position 3: invalid start byte", id="not UTF-8"),
    ("a.txt", "héllo".encode("utf-16"), "Convert the files to UTF-8"),
    ("a.pdf", "x", "the extension of a.pdf is not known"),
    pytest.param("a.csv", "a,b\n1,2\n", "The columns are 'a', 'b'", id="no text column"),
    pytest.param("a.csv", "text\n", "cannot be read as csv", id="a header alone"),
    ("a.csv", "text,label\na, b, c,1\nd,2\n", "first row of a.csv has 4 fields, its header 2"),
    pytest.param("a.jsonl", '{"text":"a"}\n{"text":\n', "in row 1", id="half a line of JSON"),
    pytest.param("a.jsonl", '{"text": 1}\n', "holds int64, not text", id="numbers for text"),
    pytest.param("a.jsonl", '{"text":"\\ud800"}\n', "Convert the files", id="half a character"),
    pytest.param("a.jsonl", '{"text":"a","text":"b"}', "'text' appears twice", id="two texts"),
    pytest.param("a.jsonl", "[" * 99999, "nested too deeply", id="deep nesting"),
    pytest.param("a.jsonl", '{"text": null}\n', "no text besides blanks", id="null for text"),
    ("a.json", "3", "row 0 is no object"),
    pytest.param("a.parquet", "text" * 9, "not a parquet file", id="text as Parquet"),
    ("dataset_info.json", "{}", "cannot be read as saved"),
]


@pytest.mark.parametrize(("name", "content", "said"), FILES)
def test_a_file_of_data(refused, write, name, content, said):
    file = write(f"data/{name}", content)
    spec = str(file.parent if name.startswith("dataset_info") else file)
    refused(lambda: load_text(spec), DataError, "--data", spec, said)


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
    refused(lambda: load(str(file)), DataError, "--data", str(file), "Convert the files to UTF-8")


def test_dates_and_numbers_for_answers(refused, tmp_path):
    for values in ([1, 2], [1.5, 2.5], pandas.to_datetime(["2024-01-01", "2024-01-02"])):
        file = tmp_path / "a.parquet"
        pandas.DataFrame({"prompt": ["a", "b"], "completion": values}).to_parquet(file)
        refused(lambda: load_chats(str(file)), DataError, "--data", "not text")  # noqa: B023


def test_a_folder_without_text(refused, tmp_path):
    refused(lambda: resolve(str(tmp_path)), DataError, "--data", "Known extensions are .txt")


def test_a_folder_of_several_kinds(refused, write, tmp_path):
    write("a.txt", "a")
    write("b.jsonl", "{}")
    refused(lambda: resolve(str(tmp_path)), DataError, "--data", "1 of json, 1 of text", "glob")


def test_a_misspelt_file(refused, write):
    spec = str(write("book.txt", "text")).replace("book", "bok")
    said = ("no such file", "Did you mean", "book.txt")
    refused(lambda: load_text(spec), DataError, "--data", *said)


LABELS = [
    pytest.param("words,label\na,1\nb,2\n", "no column 'text'", id="no text column"),
    pytest.param("text\na\nb\n", "no column 'label'", id="no labels"),
    pytest.param("text,label\na,1\nb,1\nc,1\n", "one label only, 1", id="one label"),
    pytest.param("text,label\na,1\n", "a single text cannot be split", id="one row"),
    pytest.param("text,label\na,1.5\nb,2.5\n", "row 0 has the label 1.5", id="fractions"),
    pytest.param("text,label\na,x\nb,\n", "row 1 has the label ''", id="a label is missing"),
    pytest.param("text,label\n ,1\n ,2\n", "no row holds text", id="no text"),
]


@pytest.mark.parametrize(("content", "said"), LABELS)
def test_labels(refused, write, content, said):
    file = str(write("labels.csv", content))
    refused(lambda: load_classification(resolve(file)), DataError, "--data", file, said)


def test_a_text_without_labels(refused, write):
    file = str(write("a.txt", "abc"))
    refused(lambda: load_classification(resolve(file)), DataError, "--data", "no labels", ".tsv")


FAST = '{"tokenizer_class": "PreTrainedTokenizerFast"}'
TOKENIZERS = [
    (None, "no such folder"),
    ({}, "no tokenizer that can be loaded"),
    ({"tokenizer.json": "{", "tokenizer_config.json": "{}"}, "loaded: Expecting"),
    ({"tokenizer.json": "{}", "tokenizer_config.json": FAST}, "no tokenizer that can be loaded"),
]


@pytest.mark.parametrize(("files", "said"), TOKENIZERS)
def test_a_tokenizer(refused, write, tmp_path, files, said):
    folder = tmp_path / "tokenizer"
    if files is not None:
        folder.mkdir()
        for name, content in files.items():
            write(f"tokenizer/{name}", content)
    said = (said, "written by save_pretrained")
    refused(lambda: load_tokenizer(folder), DataError, "--tokenizer", *said)


SPLITS = [
    ("a", "969,30,1"),
    ("", "969,30,1"),
    ("1,2,3,4", "one to three shares"),
    ("0,0,0", "all shares are 0"),
    ("969;30;1", "one to three shares"),
]


@pytest.mark.parametrize(("split", "said"), SPLITS)
def test_shares(refused, split, said):
    refused(lambda: split_ranges(split, 10), ConfigError, "--split", repr(split), said)


def loader(**changes):
    settings = {"micro_batch_size": 1, "data_rank": 0, "data_world_size": 1, "seed": 0, **changes}
    return lambda: ResumableLoader(settings.pop("dataset", [1, 2]), **settings)


CALLS = [
    (lambda: train_tokenizer(["a"], 300, kind="t5"), "kind", "'bert', 'gpt'"),
    (loader(micro_batch_size=0), "micro_batch_size", "at least 1"),
    (loader(data_rank=1), "data_rank", "outside 0 to 0"),
]


@pytest.mark.parametrize(("act", "key", "said"), CALLS)
def test_a_call(refused, act, key, said):
    refused(act, ConfigError, key, said)


def test_no_samples(refused):
    refused(loader(dataset=[]), DataError, "--data", "no samples")


def test_a_text_that_is_too_short_is_named_by_its_file(refused, write, tmp_path):
    options = {"data": str(write("a.txt", "few words. " * 9)), "cache": str(tmp_path)}
    arguments = PretrainArguments(**options)
    text = read_text(find_text(arguments), arguments, "gpt", vocab_size=300)
    act = lambda: text.causal_samples(128, 1, 0)  # noqa: E731
    refused(act, DataError, "--data", text.source.name, "do not fill one window of 128")
    assert "a.txt" in text.source.name


@pytest.mark.parametrize("read", [load_text, load_classification])
def test_a_cache_of_datasets_that_cannot_be_made_is_named(refused, monkeypatch, tmp_path, read):
    (tmp_path / "a.csv").write_text(
        "text,label\n" + "".join(f"text {n},{n % 2}\n" for n in range(40))
    )
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", "/proc/nohome/datasets")
    source = resolve(str(tmp_path / "a.csv"))
    refused(lambda: read(source), DataError, "HF_HOME", "Set HF_HOME")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    assert read(source)
