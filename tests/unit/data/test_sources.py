# SPDX-License-Identifier: Apache-2.0
import json
import json.decoder
import random
import socket
import tracemalloc
from pathlib import Path

import datasets
import pytest

from support.refusals import refuses
from wavemare.data.sources import Kind, read_stdlib, resolve
from wavemare.data.tables import read_json_rows, read_tables
from wavemare.data.text import load_text
from wavemare.errors import DataError


def write_rows(path, texts, column="text"):
    rows = [{column: text, "n": i} for i, text in enumerate(texts)]
    if path.suffix == ".parquet":
        import pandas as pd

        pd.DataFrame(rows).to_parquet(path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        separator = "\t" if path.suffix == ".tsv" else ","
        quote = "" if path.suffix == ".tsv" else '"'
        lines = [f"{quote}{row[column]}{quote}{separator}{row['n']}" for row in rows]
        path.write_text("\n".join([f"{column}{separator}n", *lines]) + "\n")
    return path


def everything(corpus):
    return sorted([*corpus.train["text"], *corpus.validation["text"]])


def test_text_files_folder_and_glob(tmp_path):
    for i in range(30):
        (tmp_path / f"sub{i % 2}").mkdir(exist_ok=True)
        (tmp_path / f"sub{i % 2}" / f"{i}.txt").write_text(f"document {i}\nline\n")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "hidden.txt").write_text("hidden")
    (tmp_path / "picture.png").write_bytes(b"png")
    folder = load_text(str(tmp_path))
    expected = sorted(f"document {i}\nline\n" for i in range(30))
    assert everything(folder) == expected
    assert len(folder.train)
    assert len(folder.validation)
    pattern = load_text(str(tmp_path / "**" / "*.txt"))
    assert list(pattern.train) == list(folder.train)
    assert list(pattern.validation) == list(folder.validation)
    even = sorted(f"document {i}\nline\n" for i in range(0, 30, 2))
    assert everything(load_text(str(tmp_path / "sub0"))) == even


def test_one_text_file_is_split_at_the_nearest_line_end(tmp_path):
    text = "".join(f"line {i}\n" for i in range(200))
    (tmp_path / "book.txt").write_text(text)
    corpus = load_text(str(tmp_path / "book.txt"))
    (start,), (end,) = corpus.train["text"], corpus.validation["text"]
    assert start + end == text
    assert end.startswith("line ")
    assert abs(len(end) - 0.05 * len(text)) < len("line 199\n")


def test_a_line_end_far_away_is_not_used(tmp_path):
    (tmp_path / "book.txt").write_text("title\n" + "x" * 994)
    corpus = load_text(str(tmp_path / "book.txt"))
    assert [len(part["text"][0]) for part in (corpus.train, corpus.validation)] == [950, 50]


def test_the_split_keeps_equal_texts_together_and_sides_when_texts_are_added(tmp_path):
    texts = [f"text {i % 400}" for i in range(800)]
    first = load_text(str(write_rows(tmp_path / "rows.jsonl", texts)))
    train, validation = (list(part["text"]) for part in (first.train, first.validation))
    assert set(train).isdisjoint(validation)
    assert 20 < len(validation) < 70
    more = load_text(str(write_rows(tmp_path / "more.jsonl", [*texts, "one more"])))
    assert list(more.train["text"])[: len(train)] == train
    assert list(more.validation["text"])[: len(validation)] == validation


@pytest.mark.parametrize("extension", [".jsonl", ".json", ".csv", ".tsv", ".parquet"])
def test_tables(tmp_path, extension):
    texts = [f"row {i}, it's null" for i in range(40)] + ["null", "NA"]
    path = write_rows(tmp_path / f"rows{extension}", texts)
    corpus = load_text(str(path))
    assert everything(corpus) == sorted(texts)
    assert len(corpus.validation)
    again = load_text(str(path))
    assert list(again.validation) == list(corpus.validation)


NAMES = [
    "d[1]/a.jsonl",
    "a*.jsonl",
    "a?.jsonl",
    "[!x].csv",
    "{a,b}.tsv",
    "x::y.parquet",
    "zip::b.txt",
    "file:b.jsonl",
    "https:/b.jsonl",
    "**/b.txt",
    "10 books.txt",
    "-b.csv",
    "#b%20.jsonl",
    "sea ünï\n.txt",
    ".hidden.jsonl",
]


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_file_is_taken_literally(tmp_path, monkeypatch, name):
    file = tmp_path / name
    for other in ("d1/a", "ab", "b", "x", "d1/b"):
        decoy = tmp_path / f"{other}{file.suffix}"
        decoy.parent.mkdir(exist_ok=True)
        decoy.write_text("decoy")
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".txt":
        file.write_text("right")
    else:
        write_rows(file, ["right"] * 2)
    monkeypatch.chdir(tmp_path)
    for spec in (str(file), name):
        assert "".join(everything(load_text(spec))).replace("rightright", "right") == "right"


def test_only_the_columns_that_are_used_must_agree(tmp_path):
    others = [1, "x", {"a": 1}, [2], None, float("nan"), "2024-01-01"]
    for i, other in enumerate(others):
        row = {"text": f"2024-01-0{i + 1}", f"m{i // 4}": other}
        (tmp_path / f"{i}.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    together = (tmp_path / "0.jsonl").read_text() + (tmp_path / "1.jsonl").read_text()
    (tmp_path / "0.jsonl").write_text(together)
    texts = everything(load_text(str(tmp_path)))
    assert texts == sorted(2 * [f"2024-01-0{i + 1}" for i in range(7)] + 2 * ["2024-01-02"])


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "json", "csv", "tsv"])
def test_a_byte_order_mark_is_no_text(tmp_path, suffix):
    text = "one two\nthree" if suffix == "txt" else "one"
    content = {"txt": text, "jsonl": json.dumps({"text": text}), "json": json.dumps([text])}
    table = f"text\n{text}\n"
    (tmp_path / f"a.{suffix}").write_text(content.get(suffix, table), encoding="utf-8-sig")
    assert "".join(sorted(everything(load_text(str(tmp_path))), reverse=True)) in (text, "one")


@pytest.mark.parametrize("pattern", ["", "**/*.txt"])
def test_links_are_followed_once(tmp_path, pattern):
    (tmp_path / "data").mkdir()
    (tmp_path / "elsewhere").mkdir()
    for name in ("data/a.txt", "data/b.txt", "elsewhere/c.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "data" / "loop").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "again.txt").symlink_to(tmp_path / "data" / "a.txt")
    (tmp_path / "data" / "more").symlink_to(tmp_path / "elsewhere")
    found = resolve(str(tmp_path / "data" / pattern)).files
    assert [file.name for file in found] == ["a.txt", "b.txt", "c.txt"]


def test_quotes_in_a_tsv_are_text(tmp_path):
    texts = ['he said "no', '"never closed', '"yes" and "no"', "third"]
    path = write_rows(tmp_path / "rows.tsv", texts)
    corpus = load_text(str(path))
    assert everything(corpus) == sorted(texts)


def test_saved_dataset_with_its_own_validation_split(tmp_path):
    texts = {"train": ["a", "", "b"], "test": ["t"], "validation": ["v", None]}
    parts = {name: datasets.Dataset.from_dict({"text": part}) for name, part in texts.items()}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    corpus = load_text(str(tmp_path / "saved"))
    assert list(corpus.train["text"]) == ["a", "b"]
    assert list(corpus.validation["text"]) == ["v"]


def test_saved_dataset_without_train_split(tmp_path):
    part = datasets.Dataset.from_dict({"text": ["a", "b"]})
    datasets.DatasetDict({"left": part, "right": part}).save_to_disk(str(tmp_path / "saved"))
    with refuses(DataError, "--data", str(tmp_path / "saved")):
        load_text(str(tmp_path / "saved"))


def test_megatron_prefix(tmp_path):
    for name in ("my.corpus.bin", "my.corpus.idx"):
        (tmp_path / name).write_bytes(b"x")
    expected = resolve(str(tmp_path / "my.corpus"))
    assert expected.kind is Kind.MEGATRON
    assert expected.files == (tmp_path / "my.corpus",)
    for extension in (".bin", ".idx"):
        assert resolve(str(tmp_path / f"my.corpus{extension}")).files == expected.files
    with refuses(DataError, "--data", str(tmp_path / "my.corpus")):
        load_text(expected)
    (tmp_path / "my.corpus.bin").unlink()
    with refuses(DataError, "--data", str(tmp_path / "my.corpus")):
        resolve(str(tmp_path / "my.corpus"))


def test_names_of_datasets_are_resolved_without_the_network(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert resolve("imdb").kind is Kind.HUB
    assert resolve("imdb").dataset == resolve("hub:imdb").dataset == "imdb"
    assert resolve(None) == resolve("stdlib")
    assert resolve(None).kind is Kind.DEFAULT
    source = resolve("hub:Salesforce/wikitext:wikitext-2-raw-v1")
    assert (source.dataset, source.config) == ("Salesforce/wikitext", "wikitext-2-raw-v1")
    for spec in ("owner/name", "x.jsonl"):
        with refuses(DataError, "--data", spec):
            resolve(spec)


def test_an_unreachable_hub_is_told_from_a_missing_dataset(monkeypatch):
    def fail(*_, **__):
        raise OSError("name resolution")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", fail)
    with refuses(DataError, "--data", "imdb"):
        load_text("imdb")


def test_a_blend_names_weights_and_prefixes(tmp_path):
    for name in ("a.idx", "a.bin", "b.idx", "b.bin"):
        (tmp_path / name).touch()
    source = resolve(f"0.3 {tmp_path}/a 7 {tmp_path}/b.bin")
    assert source.kind is Kind.MEGATRON
    assert source.files == (tmp_path / "a", tmp_path / "b")
    assert source.weights == (0.3, 7.0)


def test_the_library_is_complete_and_ordered():
    library = read_stdlib()
    names = list(library["name"])
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py", "asyncio/events.py"} <= set(names)
    assert not any(
        part in {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
        for name in names
        for part in name.split("/")
    )
    source = Path(json.decoder.__file__).read_text(encoding="utf-8")
    assert library[names.index("json/decoder.py")]["text"] == source


def test_what_is_left_out(tmp_path):
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nx = '\xe9'\n")
    (tmp_path / "broken.py").write_bytes(b"x = '\xe9'\n")
    (tmp_path / "unknown.py").write_bytes(b"# coding: no-such-codec\n")
    (tmp_path / "blank.py").write_text("\n\n")
    (tmp_path / "plain.py").write_text("x = 2\n")
    (tmp_path / "notes.txt").write_text("no source")
    (tmp_path / "_sysconfigdata_linux.py").write_text("x = '/home/me'\n")
    for folder in ("tests", "site-packages", "config-3.11-x", "__pycache__", "pydoc_data"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "module.py").write_text("x = 1\n")
    library = read_stdlib(tmp_path)
    assert library[:] == {
        "name": ["latin.py", "plain.py"],
        "text": ["# -*- coding: latin-1 -*-\nx = '\u00e9'\n", "x = 2\n"],
    }


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_no_sources(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with refuses(DataError, "--data"):
        read_stdlib(tmp_path / name)


@pytest.mark.parametrize("indent", [None, 1])
def test_a_list_of_rows_is_read_in_parts(tmp_path, indent):
    """They are what json reads, also where they are large or look like ends."""
    draw = random.Random(2)
    parts = ['"}, {', "\\", "é☃", "]", "[1, 2]", "\n", "wave " * 20_000]
    rows: list[object] = ["bare", {"text": "".join(parts) * 20}]
    for number in range(200):
        value = "".join(draw.choice(parts) for _ in range(draw.randrange(9)))
        rows.append({"text": value, "n": [number, {"a": None}]})
    file = tmp_path / "rows.json"
    text = json.dumps(rows, indent=indent, ensure_ascii=False)
    file.write_text(f"\n {text} \n")
    expected = [{"text": "bare"}, *rows[1:]]
    tracemalloc.start()
    for found, row in zip(read_json_rows(file), expected, strict=True):
        assert found == row
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * len(text)  # the whole takes 2 bytes for each character, twice
    for wrong in (text[:-1], text[:-3], f"{text},", f"{text} 1", text.replace('"n"', '"n" x', 1)):
        file.write_text(wrong)
        with pytest.raises(DataError):
            list(read_json_rows(file))


def test_a_text_file_is_what_python_reads_of_it(tmp_path):
    for number, raw in enumerate([b"a\r\nb\rc\n", b"\xef\xbb\xbfx\ny", "é☃\r\n𝄞".encode()]):
        file = tmp_path / f"{number}.txt"
        file.write_bytes(raw)
        (table,) = read_tables(Kind.TEXT, str(file), ["text"], ["text"])
        assert table.column("text").to_pylist() == [file.read_text(encoding="utf-8-sig")]
