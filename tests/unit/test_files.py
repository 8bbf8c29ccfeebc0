# SPDX-License-Identifier: Apache-2.0
"""Atomic files and folders: the old content or the new, and nothing left behind."""

import ctypes
import os
from types import SimpleNamespace

import pytest

from wavemare import files


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_file_is_written_into_new_folders(tmp_path):
    files.atomic_write_text(tmp_path / "a" / "b.txt", "caf\u00e9\n")
    assert (tmp_path / "a" / "b.txt").read_bytes() == b"caf\xc3\xa9\n"
    assert names(tmp_path / "a") == ["b.txt"]


def test_file_has_the_mode_that_open_would_give(tmp_path):
    (tmp_path / "plain").write_text("x")
    files.atomic_write_text(tmp_path / "ours", "x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_symbolic_link_stays_a_link(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    files.atomic_write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch, broken):
    target = tmp_path / "file"
    target.write_text("old")

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, broken, fail)
    with pytest.raises(OSError, match="No space"):
        files.atomic_write_text(target, "new")
    assert target.read_text() == "old"
    assert names(tmp_path) == ["file"]


EXCHANGE = ctypes.CDLL(None, use_errno=True).renameat2


@pytest.fixture(params=["exchange", "two renames"])
def library(request, monkeypatch):
    """The C library; that of NFS, for one, cannot exchange two names."""
    calls = {"renameat2": EXCHANGE} if request.param == "exchange" else {}
    library = SimpleNamespace(**calls)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: library)
    return library


def two_folders(tmp_path):
    source, target = tmp_path / ".model.partial", tmp_path / "model"
    for folder, name in ((source, "fresh"), (target, "stale")):
        folder.mkdir()
        (folder / name).write_text(name)
    return source, target


@pytest.mark.usefixtures("library")
def test_folder_replaces_the_old_one_whole(tmp_path):
    source, target = two_folders(tmp_path)
    files.replace_folder(source, target)
    assert names(target) == ["fresh"]
    assert names(tmp_path) == ["model"]


@pytest.mark.usefixtures("library")
def test_folder_replaces_a_file(tmp_path):
    source, target = two_folders(tmp_path)
    (target / "stale").unlink()
    target.rmdir()
    target.write_text("a file")
    files.replace_folder(source, target)
    assert names(target) == ["fresh"]
    assert names(tmp_path) == ["model"]


class Killed(BaseException):
    """Ends what is under way without a chance to mend anything, as SIGKILL does."""


@pytest.mark.parametrize("last", range(12))
def test_whatever_call_is_the_last_one_the_folder_is_old_or_new(
    tmp_path, monkeypatch, library, last
):
    source, target = two_folders(tmp_path)
    calls = []

    def counted(module, name):
        real = getattr(module, name)

        def call(*args, **kwargs):
            if len(calls) >= last:  # nor do those calls that the handlers of errors make
                raise Killed
            calls.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    with monkeypatch.context() as patched:
        monkeypatch = patched
        for name in ("rename", "fsync", "unlink", "rmdir"):
            counted(os, name)
        if hasattr(library, "renameat2"):
            counted(library, "renameat2")
        try:
            files.replace_folder(source, target)
            ended = True
        except Killed:
            ended = False
    files.restore_folder(target)
    assert names(target) in (["fresh"], ["stale"])
    if ended:
        assert names(target) == ["fresh"]
        assert last >= 5  # else nothing was killed at all
    files.remove_leftovers(tmp_path)
    assert names(tmp_path) == ["model"]


def test_leftovers_are_what_this_module_names_and_nothing_else(tmp_path):
    kept = ["step-1", ".step-1.old", ".hidden", "x.partial", ".notes.0123456.deleted"]
    gone = [".step-1.partial", ".step-1.01234567.old", ".step-0.89abcdef.deleted"]
    for name in kept + gone:
        (tmp_path / name / "inside").mkdir(parents=True)
    (tmp_path / ".latest.01234567.tmp").write_text("")
    (tmp_path / ".step-2.01234567.old").mkdir()  # moved aside, and never replaced
    files.remove_leftovers(tmp_path)
    assert names(tmp_path) == sorted([*kept, "step-2"])


def test_discarded_folder_never_comes_back(tmp_path, monkeypatch):
    _, target = two_folders(tmp_path)

    def killed(path):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(files.shutil, "rmtree", killed)
        with pytest.raises(Killed):
            files.discard_folder(target)
    assert not target.exists()
    files.restore_folder(target)
    assert not target.exists()


def test_contents_then_names_then_the_folder_reach_the_disk(tmp_path, monkeypatch):
    order = []
    synchronize, replace = os.fsync, os.replace

    def fsync(descriptor):
        order.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")).split(".")[-1])
        synchronize(descriptor)

    def rename(old, new):
        order.append("rename")
        replace(old, new)

    monkeypatch.setattr(files.os, "fsync", fsync)
    monkeypatch.setattr(files.os, "replace", rename)
    files.atomic_write_text(tmp_path / "latest", "step-2")
    assert order == ["tmp", "rename", tmp_path.name.split(".")[-1]]


def test_old_folder_comes_back_if_the_rename_fails(tmp_path, monkeypatch):
    source, target = two_folders(tmp_path)
    rename = os.rename

    def fail_once(old, new):
        if old == source:
            raise OSError(5, "Input/output error")
        rename(old, new)

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace())
    monkeypatch.setattr(files.os, "rename", fail_once)
    with pytest.raises(OSError, match="Input/output"):
        files.replace_folder(source, target)
    assert names(target) == ["stale"]
    assert names(tmp_path) == [".model.partial", "model"]
