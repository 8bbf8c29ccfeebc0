# SPDX-License-Identifier: Apache-2.0
"""Atomic files and folders: the old content or the new, and nothing left behind."""

import os
import signal
import threading

import pytest

from wavemare import files


def names(folder):
    return sorted(path.name for path in folder.iterdir())


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


def two_folders(tmp_path):
    source, target = tmp_path / ".model.partial", tmp_path / "model"
    for folder, name in ((source, "fresh"), (target, "stale")):
        folder.mkdir()
        (folder / name).write_text(name)
    return source, target


def test_folder_replaces_the_old_one_whole(tmp_path):
    source, target = two_folders(tmp_path)
    files.replace_folder(source, target)
    assert names(target) == ["fresh"]
    assert names(tmp_path) == ["model"]


@pytest.mark.parametrize("old", ["file", "folder", "link to a folder", "dangling link", "nothing"])
@pytest.mark.parametrize("new", ["file", "folder"])
def test_a_path_replaces_whatever_is_there(new, old, tmp_path):
    source, target, linked = (tmp_path / name for name in ("source", "target", "linked"))
    linked.mkdir()
    (linked / "theirs").write_text("theirs")
    for path, kind in ((source, new), (target, old)):
        if kind == "file":
            path.write_text("content")
        elif kind == "folder":
            path.mkdir()
            (path / f"of {path.name}").write_text("content")
        elif kind != "nothing":
            path.symlink_to(linked if kind == "link to a folder" else tmp_path / "nowhere")
    files.replace_path(source, target)
    assert not target.is_symlink()
    assert [p.name for p in target.iterdir()] == ["of source"] if new == "folder" else True
    assert target.is_file() == (new == "file")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["linked", "target"]
    assert (linked / "theirs").read_text() == "theirs"


def test_folder_replaces_a_file(tmp_path):
    source, target = two_folders(tmp_path)
    (target / "stale").unlink()
    target.rmdir()
    target.write_text("a file")
    files.replace_folder(source, target)
    assert names(target) == ["fresh"]
    assert names(tmp_path) == ["model"]


def in_a_process_that_ends(work):
    """Run work in a child process; return whether it came to its end."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("last", range(12))
def test_whatever_call_is_the_last_one_the_folder_is_old_or_new(tmp_path, last):
    source, target = two_folders(tmp_path)
    source = source.rename(files.temporary_sibling(target))
    calls = []

    def counted(module, name):
        real = getattr(module, name)

        def call(*args, **kwargs):
            if len(calls) >= last:
                os.kill(os.getpid(), signal.SIGKILL)
            calls.append(name)
            return real(*args, **kwargs)

        setattr(module, name, call)

    def replace():
        for name in ("rename", "fsync", "unlink", "rmdir"):
            counted(os, name)
        files.replace_folder(source, target)

    ended = in_a_process_that_ends(replace)
    files.restore_folder(target)
    assert names(target) in (["fresh"], ["stale"])
    if ended:
        assert names(target) == ["fresh"]
        assert last >= 5  # else nothing was killed at all
    files.remove_leftovers(tmp_path)
    left = names(tmp_path)
    assert left in (["model"], [source.name, "model"])  # this process made the source


def test_a_reader_leaves_a_writer_that_lives_alone(tmp_path):
    source, target = two_folders(tmp_path)
    source = source.rename(files.temporary_sibling(target))
    target.rename(files.temporary_sibling(target, "old"))  # the writer is between two renames
    slow = threading.Timer(0.3, os.rename, (source, target))
    slow.start()
    files.restore_folder(target)
    slow.join()
    assert names(target) == ["fresh"]


def test_only_what_processes_that_ended_have_left_is_removed(tmp_path):

    def leave(step):
        for kind in ("partial", "old", "deleted"):
            (files.temporary_sibling(tmp_path / step, kind) / "inside").mkdir(parents=True)
        files.temporary_sibling(tmp_path / "latest", "tmp").write_text("")

    strangers = ["step-1", ".step-1.partial", ".mine.partial", ".step-1.01234567.old", ".hidden"]
    for name in strangers:
        (tmp_path / name / "inside").mkdir(parents=True)
    leave("step-1")
    alive = set(names(tmp_path))
    # The same process number elsewhere, and one that another process has got since.
    (own,) = tmp_path.glob(".step-1.wavemare-*.partial")
    _, machine, pid, start, _ = own.name.split("-")[1:]
    elsewhere = own.with_name(own.name.replace(machine, f"{int(machine, 16) ^ 1:x}"))
    earlier = own.with_name(own.name.replace(f"-{pid}-{start}-", f"-{pid}-{int(start) - 1}-"))
    assert in_a_process_that_ends(lambda: leave("step-2"))
    assert len(names(tmp_path)) == len(alive) + 4
    for folder in (elsewhere, earlier):
        folder.mkdir()
    files.remove_leftovers(tmp_path)
    assert set(names(tmp_path)) == {*alive, elsewhere.name, "step-2"}  # which got its name back


def test_discarded_folder_never_comes_back(tmp_path, monkeypatch):
    _, target = two_folders(tmp_path)

    def killed(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(files.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            files.discard_folder(target)
    assert not target.exists()
    files.restore_folder(target)
    assert not target.exists()


def test_old_folder_comes_back_if_the_rename_fails(tmp_path, monkeypatch):
    source, target = two_folders(tmp_path)
    rename = os.rename

    def fail_once(old, new):
        if old == source:
            raise OSError(5, "Input/output error")
        rename(old, new)

    monkeypatch.setattr(files.os, "rename", fail_once)
    with pytest.raises(OSError, match="Input/output"):
        files.replace_folder(source, target)
    assert names(target) == ["stale"]
    assert names(tmp_path) == [".model.partial", "model"]


def test_folders_that_go_meanwhile_are_left_out(tmp_path):
    """A folder is seen in its parent, and is removed before it is entered."""
    for _ in range(10):
        folders = [tmp_path / str(number) for number in range(300)]
        for folder in folders:
            folder.mkdir()
        thread = threading.Thread(target=lambda gone=folders: [each.rmdir() for each in gone])
        thread.start()
        files.sync_tree(tmp_path)
        thread.join()
