"""Atomic files and folders: the old content or the new, and nothing left behind."""

import os
from pathlib import Path

import pytest

from wavemare import files


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_file_is_written_into_new_folders(tmp_path: Path) -> None:
    files.atomic_write_text(tmp_path / "a" / "b.txt", "caf\u00e9\n")
    assert (tmp_path / "a" / "b.txt").read_bytes() == b"caf\xc3\xa9\n"
    assert names(tmp_path / "a") == ["b.txt"]


def test_file_has_the_mode_that_open_would_give(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("x")
    files.atomic_write_text(tmp_path / "ours", "x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_symbolic_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    files.atomic_write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_failed_write_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    target = tmp_path / "file"
    target.write_text("old")

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, broken, fail)
    with pytest.raises(OSError, match="No space"):
        files.atomic_write_text(target, "new")
    assert target.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_folder_replaces_the_old_one_whole(tmp_path: Path) -> None:
    source, target = tmp_path / "new", tmp_path / "model"
    for folder, name in ((source, "fresh"), (target, "stale")):
        folder.mkdir()
        (folder / name).write_text(name)
    files.replace_folder(source, target)
    assert names(target) == ["fresh"]
    assert names(tmp_path) == ["model"]


def test_old_folder_comes_back_if_the_rename_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "new", tmp_path / "model"
    source.mkdir()
    target.mkdir()
    (target / "kept").write_text("k")
    rename = os.rename

    def fail_once(old: Path, new: Path) -> None:
        if old == source:
            raise OSError(5, "Input/output error")
        rename(old, new)

    monkeypatch.setattr(files.os, "rename", fail_once)
    with pytest.raises(OSError, match="Input/output"):
        files.replace_folder(source, target)
    assert names(target) == ["kept"]
    assert names(tmp_path) == ["model", "new"]
