# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from wavemare.data.documents import Document
from wavemare.data.sources import Kind, load_documents, resolve
from wavemare.data.tables import ColumnDocuments
from wavemare.errors import DataError


def write_rows(path: Path, texts: list[str], column: str = "text") -> Path:
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


def everything(corpus: object) -> list[str]:
    return sorted(d.text for d in (*corpus.train, *corpus.held_out))  # type: ignore[attr-defined]


def test_default() -> None:
    assert resolve(None) == resolve("stdlib")
    assert resolve(None).kind is Kind.DEFAULT


def test_text_files_folder_and_glob(tmp_path: Path) -> None:
    for i in range(30):
        (tmp_path / f"sub{i % 2}").mkdir(exist_ok=True)
        (tmp_path / f"sub{i % 2}" / f"{i}.txt").write_text(f"document {i}\nline\n")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "hidden.txt").write_text("hidden")
    (tmp_path / "picture.png").write_bytes(b"png")
    folder = load_documents(str(tmp_path))
    expected = sorted(f"document {i}\nline\n" for i in range(30))
    assert everything(folder) == expected
    assert folder.train
    assert folder.held_out
    pattern = load_documents(str(tmp_path / "**" / "*.txt"))
    assert (pattern.train, pattern.held_out) == (folder.train, folder.held_out)
    assert everything(load_documents(str(tmp_path / "sub0"))) == expected[:0] + sorted(
        f"document {i}\nline\n" for i in range(0, 30, 2)
    )
    assert {d.name for d in folder.train} <= {f"sub{i % 2}/{i}.txt" for i in range(30)}


def test_one_text_file_is_split_by_position(tmp_path: Path) -> None:
    text = "".join(f"line {i}\n" for i in range(200))
    (tmp_path / "book.txt").write_text(text)
    corpus = load_documents(str(tmp_path / "book.txt"))
    assert corpus.train[0].text + corpus.held_out[0].text == text
    assert corpus.train[0].name == "book.txt (start)"


@pytest.mark.parametrize("extension", [".jsonl", ".json", ".csv", ".tsv", ".parquet"])
def test_tables(tmp_path: Path, extension: str) -> None:
    texts = [f"row {i}, it's null" for i in range(40)] + ["null", "NA"]
    path = write_rows(tmp_path / f"rows{extension}", texts)
    corpus = load_documents(str(path), cache_dir=tmp_path / "cache")
    assert everything(corpus) == sorted(texts)
    assert corpus.held_out
    again = load_documents(str(path), cache_dir=tmp_path / "cache")
    assert list(again.held_out) == list(corpus.held_out)


def test_tables_and_text_are_split_alike(tmp_path: Path) -> None:
    texts = [f"document {i}" for i in range(60)]
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "texts" / f"{i}.txt").write_text(text)
    path = write_rows(tmp_path / "rows.jsonl", texts)
    table = load_documents(str(path), cache_dir=tmp_path / "cache")
    files = load_documents(str(tmp_path / "texts"))
    assert {d.text for d in table.held_out} == {d.text for d in files.held_out}


def test_quotes_in_a_tsv_are_text(tmp_path: Path) -> None:
    texts = ['he said "no', '"never closed', '"yes" and "no"', "third"]
    path = write_rows(tmp_path / "rows.tsv", texts)
    corpus = load_documents(str(path), cache_dir=tmp_path / "cache")
    assert everything(corpus) == sorted(texts)


def test_column_documents_is_a_sequence() -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"text": [f"row {i}" for i in range(2500)], "n": [0] * 2500})
    documents = ColumnDocuments(rows, "text", "made")
    assert len(documents) == 2500
    assert list(documents) == [documents[i] for i in range(2500)]
    assert documents[7] == Document("made[7]", "row 7")
    assert documents[3:5] == [documents[3], documents[4]]
    assert [d.text for d in documents.select([9, 3])] == ["row 9", "row 3"]


def test_saved_dataset_with_its_own_validation_split(tmp_path: Path) -> None:
    import datasets

    saved = datasets.DatasetDict(
        {
            "train": datasets.Dataset.from_dict({"text": ["a", "", "b"]}),
            "test": datasets.Dataset.from_dict({"text": ["t"]}),
            "validation": datasets.Dataset.from_dict({"text": ["v", None]}),
        }
    )
    saved.save_to_disk(str(tmp_path / "saved"))
    corpus = load_documents(str(tmp_path / "saved"))
    assert [d.text for d in corpus.train] == ["a", "b"]
    assert [d.text for d in corpus.held_out] == ["v"]


def test_saved_dataset_without_train_split(tmp_path: Path) -> None:
    import datasets

    part = datasets.Dataset.from_dict({"text": ["a", "b"]})
    datasets.DatasetDict({"left": part, "right": part}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match=r"no split 'train' but 'left', 'right'"):
        load_documents(str(tmp_path / "saved"))


def test_megatron_prefix(tmp_path: Path) -> None:
    for name in ("my.corpus.bin", "my.corpus.idx"):
        (tmp_path / name).write_bytes(b"x")
    expected = resolve(str(tmp_path / "my.corpus"))
    assert expected.kind is Kind.MEGATRON
    assert expected.files == (tmp_path / "my.corpus",)
    for extension in (".bin", ".idx"):
        assert resolve(str(tmp_path / f"my.corpus{extension}")).files == expected.files
    with pytest.raises(DataError, match=r"holds tokens, not text"):
        load_documents(expected)
    (tmp_path / "my.corpus.bin").unlink()
    with pytest.raises(DataError, match=r"my\.corpus\.bin does not exist.*side by side"):
        resolve(str(tmp_path / "my.corpus"))


def test_names_of_datasets() -> None:
    assert resolve("imdb").kind is Kind.HUB
    source = resolve("hub:Salesforce/wikitext:wikitext-2-raw-v1")
    assert (source.dataset, source.config) == ("Salesforce/wikitext", "wikitext-2-raw-v1")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no/such/file", "Check the path"),
        ("owner/name", "write hub:owner/name"),
        ("corpus.txt", "no such file"),
        ("*.nothing", "no file with a known extension.*.jsonl"),
        ("{tmp}/bok.txt", "Did you mean .*book.txt"),
        ("{tmp}/book.docx", "extension of book.docx is not known.*.parquet"),
        ("{tmp}/empty.txt", "0 bytes"),
        ("{tmp}/blank.txt", "holds no text besides blanks"),
        ("{tmp}/void", "no file with a known extension"),
        ("{tmp}", "several kinds: .* of json.*glob"),
        ("{tmp}/latin.txt", "not UTF-8.*byte 3.*Convert"),
        ("{tmp}/prefix.idx", "prefix.bin does not exist"),
        ("{tmp}/columns.jsonl", "no column 'text'. The columns are 'words', 'n'"),
        ("{tmp}/numbers.jsonl", "column 'text' holds int64, not text"),
        ("{tmp}/broken.jsonl", "cannot be read as json: JSON parse error"),
        ("{tmp}/header.csv", "is empty|cannot be read"),
        ("hub:", "no dataset is named"),
        ("no_such_dataset_xyz", "cannot be read as hub|cannot be reached"),
    ],
)
def test_errors_are_typed_and_fast(tmp_path: Path, spec: str, message: str) -> None:
    (tmp_path / "book.txt").write_text("text")
    (tmp_path / "book.docx").write_text("text")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text(" \n\n")
    (tmp_path / "latin.txt").write_bytes(b"abc\xe9")
    (tmp_path / "prefix.idx").write_bytes(b"x")
    (tmp_path / "void").mkdir()
    (tmp_path / "header.csv").write_text("text,n\n")
    write_rows(tmp_path / "columns.jsonl", ["a", "b"], column="words")
    (tmp_path / "numbers.jsonl").write_text('{"text": 1}\n{"text": 2}\n')
    (tmp_path / "broken.jsonl").write_text('{"text": "a",\n')
    start = time.monotonic()
    with pytest.raises(DataError, match=message) as caught:
        load_documents(spec.format(tmp=tmp_path), cache_dir=tmp_path / "cache")
    assert time.monotonic() - start < 10
    assert caught.value.key == "--data"
    assert caught.value.remedy


def test_resolving_never_uses_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert resolve("imdb").dataset == resolve("hub:imdb").dataset == "imdb"
    for spec in ("owner/name", "x.jsonl"):
        with pytest.raises(DataError, match=spec):
            resolve(spec)


def test_an_unreachable_hub_is_told_from_a_missing_dataset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    def fail(*_: object, **__: object) -> None:
        raise OSError("name resolution")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", fail)
    with pytest.raises(DataError, match=r"cannot be reached.*HF_HUB_OFFLINE=1"):
        load_documents("imdb")


def test_a_blend_names_weights_and_prefixes(tmp_path: Path) -> None:
    for name in ("a.idx", "a.bin", "b.idx", "b.bin"):
        (tmp_path / name).touch()
    source = resolve(f"0.3 {tmp_path}/a 7 {tmp_path}/b.bin")
    assert source.kind is Kind.MEGATRON
    assert source.files == (tmp_path / "a", tmp_path / "b")
    assert source.weights == (0.3, 7.0)
    with pytest.raises(DataError, match=r"c\.bin does not exist"):
        resolve(f"0.3 {tmp_path}/a 0.7 {tmp_path}/c")
