# SPDX-License-Identifier: Apache-2.0
"""Data that cannot be read: names, texts, tables, labels, tokenizers, shares."""

import pytest

from wavemare.data import (
    ResumableLoader,
    load_classification,
    load_documents,
    load_tokenizer,
    resolve,
    split_ranges,
    train_tokenizer,
)
from wavemare.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


NAMES = [
    pytest.param("", "it is empty", "leave the option out", id="nothing"),
    pytest.param("  ", "it is empty", "leave the option out", id="blanks"),
    pytest.param("nosuch.txt", "no such file", "Check the path", id="a missing file"),
    pytest.param("~nosuchuser/x.txt", "no such file", "Check the path", id="the home of nobody"),
    pytest.param("/" + "x" * 5000, "File name too long", "Check the path", id="a long name"),
    pytest.param("a\0b.txt", "no such file", "Check the path", id="a zero byte"),
    pytest.param("hub:", "no dataset is named", "Give a file", id="a hub's nothing"),
    pytest.param("wikitxt", "cannot be read as hub", "format", id="no such dataset, offline"),
    pytest.param("nosuch/*.jsonl", "no file with a known extension", ".jsonl", id="an empty glob"),
    pytest.param("-1 a 2 b", "weights are 0 or more", "0.3 A 0.7 B", id="a negative weight"),
    pytest.param("nan a 2 b", "weights are 0 or more", "0.3 A 0.7 B", id="a weight of nan"),
    pytest.param("0 a 0 b", "one is above", "0.3 A 0.7 B", id="no weight above 0"),
    pytest.param("0.3 a 0.7 b", "a.bin does not exist", "side by side", id="a blend of nothing"),
    pytest.param("0.3 . 0.7 b", "names a folder", "FOLDER/NAME", id="a folder in a blend"),
]


@pytest.mark.parametrize(("name", "reason", "remedy"), NAMES)
def test_a_name_of_data(refused, name, reason, remedy):
    refused(lambda: load_documents(name), DataError, "--data", reason, remedy)


FILES = [
    pytest.param("a.txt", "", "every file has 0 bytes", id="an empty file"),
    pytest.param("a.txt", " \n\n", "no text besides blanks", id="a blank file"),
    pytest.param("a.txt", b"abc\xff", "invalid start byte at byte 3", id="not UTF-8"),
    pytest.param("a.txt", "héllo".encode("utf-16"), "Convert the file to UTF-8", id="UTF-16"),
    pytest.param("a.pdf", "x", "the extension of a.pdf is not known", id="a PDF"),
    pytest.param("a.txt.gz", "x", "extension of a.txt.gz", id="compressed text"),
    pytest.param("a.csv", "a,b\n1,2\n", "The columns are 'a', 'b'", id="no text column"),
    pytest.param("a.csv", "text\n", "cannot be read as csv", id="a header alone"),
    pytest.param(
        "a.csv",
        "text,label\na, b, c,1\nd,2\n",
        "first row of a.csv has 4 fields, its header 2",
        id="commas without quotes",
    ),
    pytest.param("a.csv", 'text\n"abc\n', "cannot be read as csv", id="an open quote"),
    pytest.param("a.jsonl", '{"text":"a"}\n{"text":\n', "in row 1", id="half a line of JSON"),
    pytest.param("a.jsonl", '{"text": 1}\n', "holds int64, not text", id="numbers for text"),
    pytest.param("a.jsonl", '{"text": null}\n', "no text besides blanks", id="null for text"),
    pytest.param("a.jsonl", '{"text": ["a"]}\n', "not text", id="lists for text"),
    pytest.param("a.json", "3", "cannot be read as json", id="a number for a table"),
    pytest.param("a.parquet", "text" * 9, "not a parquet file", id="text as Parquet"),
    pytest.param("dataset_info.json", "{}", "cannot be read as saved", id="half a saved dataset"),
]


@pytest.mark.parametrize(("name", "content", "said"), FILES)
def test_a_file_of_data(refused, write, tmp_path, name, content, said):
    file = write(f"data/{name}", content)
    spec = str(file.parent if name.startswith("dataset_info") else file)
    refused(lambda: load_documents(spec, cache_dir=tmp_path), DataError, "--data", spec, said)


def test_a_folder_without_text(refused, tmp_path):
    refused(lambda: resolve(str(tmp_path)), DataError, "--data", "Known extensions are .txt")


def test_a_folder_of_several_kinds(refused, write, tmp_path):
    write("a.txt", "a")
    write("b.jsonl", "{}")
    refused(lambda: resolve(str(tmp_path)), DataError, "--data", "1 of json, 1 of text", "glob")


LABELS = [
    pytest.param("text\na\nb\n", "no column 'label'", id="no labels"),
    pytest.param("text,label\na,1\nb,1\nc,1\n", "one label only, 1", id="one label"),
    pytest.param("text,label\na,1\n", "a single text cannot be split", id="one row"),
    pytest.param("text,label\na,1.5\nb,2.5\n", "row 0 has the label 1.5", id="fractions"),
    pytest.param("text,label\na,x\nb,\n", "row 1 has the label ''", id="a label is missing"),
    pytest.param("text,label\n ,1\n ,2\n", "no row holds text", id="no text"),
]


@pytest.mark.parametrize(("content", "said"), LABELS)
def test_labels(refused, write, tmp_path, content, said):
    file = str(write("labels.csv", content))
    refused(lambda: load_classification(file, cache_dir=tmp_path), DataError, "--data", file, said)


def test_a_text_without_labels(refused, write):
    file = str(write("a.txt", "abc"))
    refused(lambda: load_classification(file), DataError, "--data", "no labels", ".tsv")


TOKENIZERS = [
    pytest.param(None, "no such folder", id="no folder"),
    pytest.param({}, "no tokenizer that can be loaded", id="an empty folder"),
    pytest.param(
        {"tokenizer.json": "{", "tokenizer_config.json": "{}"}, "loaded: Expecting", id="half JSON"
    ),
    pytest.param(
        {
            "tokenizer.json": "{}",
            "tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast"}',
        },
        "no tokenizer that can be loaded",
        id="an empty definition",
    ),
]


@pytest.mark.parametrize(("files", "said"), TOKENIZERS)
def test_a_tokenizer(refused, write, tmp_path, files, said):
    folder = tmp_path / "tokenizer"
    if files is not None:
        folder.mkdir()
        for name, content in files.items():
            write(f"tokenizer/{name}", content)
    refused(
        lambda: load_tokenizer(folder), DataError, "--tokenizer", said, "written by save_pretrained"
    )


SPLITS = [
    pytest.param("a", "969,30,1", id="a letter"),
    pytest.param("", "969,30,1", id="nothing"),
    pytest.param("-1,2", "one to three shares", id="below 0"),
    pytest.param("1,2,3,4", "one to three shares", id="four shares"),
    pytest.param("0,0,0", "all shares are 0", id="zeros"),
    pytest.param("nan,1", "one to three shares", id="nan"),
    pytest.param("969;30;1", "one to three shares", id="semicolons"),
]


@pytest.mark.parametrize(("split", "said"), SPLITS)
def test_shares(refused, split, said):
    refused(lambda: split_ranges(split, 10), ConfigError, "--split", repr(split), said)


def loader(**changes):
    settings = {"micro_batch_size": 1, "data_rank": 0, "data_world_size": 1, "seed": 0, **changes}
    return lambda: ResumableLoader(settings.pop("dataset", [1, 2]), **settings)


CALLS = [
    pytest.param(
        lambda: load_documents("stdlib", held_out_fraction=0),
        (ConfigError, "held_out_fraction", "between 0 and 1"),
        id="nothing held out",
    ),
    pytest.param(
        lambda: train_tokenizer(["a"], 10, kind="gpt"),
        (ConfigError, "vocab_size", "Give at least 257"),
        id="fewer tokens than bytes",
    ),
    pytest.param(
        lambda: train_tokenizer(["a"], 300, kind="t5"),
        (ConfigError, "kind", "'bert', 'gpt'"),
        id="a kind of tokenizer",
    ),
    pytest.param(
        loader(micro_batch_size=0), (ConfigError, "micro_batch_size", "at least 1"), id="no sample"
    ),
    pytest.param(
        loader(data_rank=1), (ConfigError, "data_rank", "outside 0 to 0"), id="a rank too many"
    ),
    pytest.param(loader(dataset=[]), (DataError, "--data", "no samples"), id="no samples at all"),
]


@pytest.mark.parametrize(("act", "expected"), CALLS)
def test_a_call(refused, act, expected):
    refused(act, *expected)
