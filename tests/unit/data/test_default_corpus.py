# SPDX-License-Identifier: Apache-2.0
import json.decoder
from pathlib import Path

import pytest

from wavemare.data.default_corpus import is_held_out, load_default_corpus, read_standard_library
from wavemare.errors import DataError


def test_the_library_is_complete_and_ordered(default_corpus):
    names = [d.name for d in read_standard_library()]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py", "asyncio/events.py"} <= set(names)
    assert not any(
        part in {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
        for name in names
        for part in name.split("/")
    )
    everything = {d.name: d.text for d in (*default_corpus.train, *default_corpus.held_out)}
    assert sorted(everything) == names
    source = Path(json.decoder.__file__).read_text(encoding="utf-8")
    assert everything["json/decoder.py"] == source


def test_held_out_is_a_small_share(default_corpus):
    train = sum(len(d.text) for d in default_corpus.train)
    held_out = sum(len(d.text) for d in default_corpus.held_out)
    assert train > 5_000_000
    assert 0.01 < held_out / (train + held_out) < 0.10
    assert all(is_held_out(d.name) for d in default_corpus.held_out)


def test_the_split_does_not_depend_on_the_place(tmp_path):
    for root in (tmp_path / "a", tmp_path / "b"):
        for i in range(60):
            file = root / f"package{i % 3}" / f"module{i}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"x = {i}\n")
    first = load_default_corpus(0.3, root=tmp_path / "a")
    assert first == load_default_corpus(0.3, root=tmp_path / "b")
    assert {d.name for d in first.held_out} == {
        d.name for d in read_standard_library(tmp_path / "a") if is_held_out(d.name, 0.3)
    }


def test_what_is_left_out(tmp_path):
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nx = '\xe9'\n")
    (tmp_path / "broken.py").write_bytes(b"x = '\xe9'\n")
    (tmp_path / "unknown.py").write_bytes(b"# coding: no-such-codec\n")
    (tmp_path / "blank.py").write_text("\n\n")
    (tmp_path / "notes.txt").write_text("no source")
    (tmp_path / "_sysconfigdata_linux.py").write_text("x = '/home/me'\n")
    for folder in ("tests", "site-packages", "config-3.11-x", "__pycache__", "pydoc_data"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "module.py").write_text("x = 1\n")
    documents = read_standard_library(tmp_path)
    assert [(d.name, d.text) for d in documents] == [
        ("latin.py", "# -*- coding: latin-1 -*-\nx = '\u00e9'\n")
    ]


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_no_sources(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"--data.*no \.py sources.*corpus of your own with --data"):
        load_default_corpus(root=tmp_path / name)
