# SPDX-License-Identifier: Apache-2.0
import json.decoder
from pathlib import Path

import pytest

from wavemare.data.default_corpus import read_standard_library
from wavemare.data.text import load_text
from wavemare.errors import DataError


def test_the_library_is_complete_and_ordered():
    library = read_standard_library()
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


def test_validation_is_a_small_share():
    corpus = load_text(None)
    train, validation = (sum(map(len, part["text"])) for part in (corpus.train, corpus.validation))
    assert train > 5_000_000
    assert 0.01 < validation / (train + validation) < 0.10
    everything = sorted([*corpus.train["text"], *corpus.validation["text"]])
    assert everything == sorted(read_standard_library()["text"])


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
    library = read_standard_library(tmp_path)
    assert library[:] == {
        "name": ["latin.py", "plain.py"],
        "text": ["# -*- coding: latin-1 -*-\nx = '\u00e9'\n", "x = 2\n"],
    }


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_no_sources(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"--data.*no \.py sources.*corpus of your own with --data"):
        read_standard_library(tmp_path / name)
