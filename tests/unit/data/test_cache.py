# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavemare.data.cache import build_once, content_key
from wavemare.errors import DataError

PARTS = st.lists(st.text(alphabet="ab\x00\ud800", max_size=4), max_size=4)


@given(PARTS, PARTS)
def test_keys_are_equal_only_for_equal_parts(first: list[str], second: list[str]) -> None:
    assert (content_key(first) == content_key(second)) == (first == second)


def is_whole(folder: Path) -> bool:
    return (folder / "done").exists()


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        build_once(tmp_path / "entry", fail, is_whole)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


def test_damaged_entries_and_leftovers_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "entry").mkdir()
    (tmp_path / "entry" / "half").write_text("x")
    (tmp_path / ".entry.host-1.partial").mkdir()
    build_once(tmp_path / "entry", lambda folder: (folder / "done").touch(), is_whole)
    assert [path.name for path in (tmp_path / "entry").iterdir()] == ["done"]
    assert not list(tmp_path.glob("*.partial"))
    assert not list(tmp_path.glob(".*.partial"))


def build_slowly(folder: Path) -> None:
    time.sleep(0.3)
    (folder / f"by-{os.getpid()}").touch()
    with (folder.parent / "builds").open("a") as file:
        file.write("x")
    (folder / "done").touch()


def run(folder: Path) -> None:
    build_once(folder, build_slowly, is_whole)
    assert is_whole(folder)


def test_processes_at_once_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=run, args=(tmp_path / "entry",)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0, 0, 0, 0]
    assert (tmp_path / "builds").read_text() == "x"


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cache_dir.*cannot be written.*another cache folder"):
        build_once(tmp_path / "file" / "entry", lambda folder: None, is_whole)
