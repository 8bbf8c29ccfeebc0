# SPDX-License-Identifier: Apache-2.0
"""Ranks complete a checkpoint together or not at all; here ranks are threads."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from support.refusals import refuses
from wavemare.engine.checkpoint import save as checkpoint_save
from wavemare.engine.checkpoint.files import RankFiles
from wavemare.engine.checkpoint.manifest import MANIFEST, read_manifest, verify_contents
from wavemare.engine.checkpoint.save import BackgroundSave, Save
from wavemare.errors import CheckpointError
from wavemare.files import temporary_sibling

TOPOLOGY = {"world_size": 1, "data": 1, "pipe": 1, "model": 1, "zero_stage": 1, "cuts": None}


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(checkpoint_save, "gather", lambda value, group: [value])


def prepare(folder, tag, rank=0, *, keep=None, background=True, **more):
    """Return a save with one file of this rank taken."""
    partial = more.get("partial", folder / f".{tag}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    files = RankFiles(rank, background=background)
    files.take({"rank": rank, "weight": torch.full((10,), rank)}, str(partial / f"{rank}.pt"))
    return Save(
        files=files,
        folder=folder,
        tag=tag,
        partial=partial,
        manifest=(
            {"format": 2, "saved": f"2026-01-02T{tag}", "topology": TOPOLOGY}
            | {"runs": [more.get("run", "run")]}
            if rank == 0
            else None
        ),
        save_latest=more.get("save_latest", True),
        keep=keep,
    )


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_folder_appears_with_all_files_in_its_list(tmp_path):
    save = prepare(tmp_path, "one")
    (save.partial / "zero_to_fp32.py").write_text("copied by DeepSpeed")
    save.complete()
    assert names(tmp_path) == ["latest", "one"]
    manifest = read_manifest(tmp_path / "one")
    assert sorted(manifest["files"]) == ["0.pt", "zero_to_fp32.py"]
    assert set(manifest["files"]["0.pt"]) == {"bytes", "xxh3"}
    verify_contents(tmp_path / "one", manifest)
    assert (tmp_path / "latest").read_text() == "one"


def test_without_latest_nothing_is_named_nor_removed(tmp_path):
    prepare(tmp_path, "one", keep=1).complete()
    prepare(tmp_path, "two", keep=1, save_latest=False).complete()
    assert names(tmp_path) == ["latest", "one", "two"]
    assert (tmp_path / "latest").read_text() == "one"


def test_what_a_name_promises_is_on_the_disk_before_the_name(tmp_path, monkeypatch):
    done = []

    def spy(name, label):
        real = getattr(os, name)

        def call(*args, **kwargs):
            result = real(*args, **kwargs)
            done.append(label(*args))
            return result

        monkeypatch.setattr(os, name, call)

    def synced(descriptor):
        return "sync " + os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))

    spy("fsync", synced)
    spy("rename", lambda old, new: f"name {os.path.basename(new)}")
    spy("replace", lambda old, new: f"name {os.path.basename(new)}")
    (tmp_path / "run").mkdir()
    save = prepare(tmp_path / "run", "one")
    (save.partial / "inner").mkdir()
    (save.partial / "inner" / "copied").write_text("x")
    save.complete()
    order = [step for step in done if not step.endswith(".tmp")]
    assert order == [
        "sync 0.pt",
        "sync copied",
        f"name {MANIFEST}",
        "sync .one.partial",
        "sync inner",
        "sync .one.partial",
        "name one",
        "sync run",
        "name latest",
        "sync run",
    ]


def test_one_that_cannot_be_removed_does_not_spoil_the_new_one(tmp_path, monkeypatch, caplog):
    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkpoint_save, "keep_last", refuse)
    prepare(tmp_path, "one", keep=1).complete()
    assert read_manifest(tmp_path / "one") is not None
    assert "could not be removed" in caplog.text


@pytest.mark.parametrize("background", [False, True])
def test_a_failure_leaves_what_was_there(tmp_path, background):
    prepare(tmp_path, "one").complete()
    before = (tmp_path / "one" / MANIFEST).read_text()
    save = prepare(tmp_path, "one", background=background)
    save.files.take({"big": torch.zeros(1000)}, "/dev/full")
    with pytest.raises(CheckpointError) as caught:
        save.complete()
    assert caught.value.value == str(tmp_path / "one")
    reason = caught.value.reason
    assert "rank 0 could not write full (No space left on device)" in reason
    assert "are free there" in reason
    assert names(tmp_path) == ["latest", "one"]
    assert (tmp_path / "one" / MANIFEST).read_text() == before


def test_a_file_that_changed_while_it_was_written_is_a_failure(tmp_path):
    save = prepare(tmp_path, "one", background=False)
    with (save.partial / "0.pt").open("ab") as file:
        file.write(b"more")
    with refuses(CheckpointError, "checkpoint", str(tmp_path / "one")):
        save.complete()
    assert names(tmp_path) == []


def in_threads(saves):
    with ThreadPoolExecutor(len(saves)) as pool:
        running = [pool.submit(save.complete) for save in saves]
        return [future.exception(timeout=300) for future in running]


@pytest.mark.parametrize("tags", [("same", "same"), ("one", "two")], ids=str)
def test_two_engines_share_a_folder(tmp_path, tags):
    """Of two saves of a tag at once the last one is kept, or one is refused; none is mixed."""
    for _ in range(20):
        saves = []
        for run, tag in enumerate(tags):
            own = {"run": f"run {run}", "keep": 1, "partial": temporary_sibling(tmp_path / tag)}
            saves.append(prepare(tmp_path, tag, **own))
            saves[run].files.take({}, str(saves[run].partial / f"of run {run}.pt"))
        errors = [error for error in in_threads(saves) if error is not None]
        assert all(isinstance(error, CheckpointError) for error in errors)
        assert len(errors) <= (tags[0] == tags[1])
        assert names(tmp_path) == sorted({*tags, "latest"})
        assert (tmp_path / "latest").read_text() in tags
        for tag in tags:
            manifest = read_manifest(tmp_path / tag)
            verify_contents(tmp_path / tag, manifest)
            assert names(tmp_path / tag) == ["0.pt", f"of {manifest['runs'][0]}.pt", MANIFEST]


def in_background(save):
    """Complete a save in its thread; return its error."""
    running = BackgroundSave(save, None)
    try:
        running.wait()
    except CheckpointError as error:
        assert running.has_failed
        return error


def test_background_saves_leave_no_thread_and_no_descriptor(tmp_path):
    prepare(tmp_path, "one").complete()
    assert in_background(prepare(tmp_path, "one")) is None
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for number in range(20):
        save = prepare(tmp_path, "one")
        if number % 10 == 0:
            save.files.take({}, "/dev/full")
        error = in_background(save)
        assert (error is None) == bool(number % 10)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    assert names(tmp_path) == ["latest", "one"]


def test_a_latest_that_cannot_be_written_leaves_the_complete_checkpoint(tmp_path):
    (tmp_path / "latest").mkdir()
    with refuses(CheckpointError, "checkpoint", str(tmp_path / "one")):
        prepare(tmp_path, "one").complete()
    verify_contents(tmp_path / "one", read_manifest(tmp_path / "one"))


def test_files_that_the_owner_cannot_see_fail_the_save(tmp_path):
    """As where a folder lies on the disk of each node; with node-local storage that is wanted."""
    for node_local in (False, True):
        save = prepare(tmp_path, "one", background=False)
        other = {"written": {"/elsewhere/1.pt": {"bytes": 1, "xxh3": ""}}, "failure": None}
        save.node_local = node_local
        reports = [save.files.report(), {**other, "node": "another"}]
        found = save._finish(reports)
        if node_local:
            assert found is None
        else:
            assert "1.pt, which another rank wrote, is not there" in found[1]
            assert names(tmp_path) == []
