# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint of a Trainer a run goes on from, by what killed saves have left."""

import json

import pytest

from support.refusals import refuses
from wavemare.errors import LaunchError
from wavemare.hf import newest_checkpoint

TOPOLOGY = {"data": 1, "pipe": 2, "model": 1, "zero_stage": 0}


def save(output, step, *, ranks=2):
    """Write a checkpoint's files as a Trainer with our engine does; return its folder."""
    folder = output / f"checkpoint-{step}"
    own = folder / f"global_step{step}"
    own.mkdir(parents=True)
    (own / "weights.pt").write_bytes(b"12345678")
    topology = {**TOPOLOGY, "world_size": ranks}
    (own / "wavemare.json").write_text(
        json.dumps({"topology": topology, "files": {"weights.pt": 8}})
    )
    (folder / "latest").write_text(own.name)
    for name in (
        [f"rng_state_{rank}.pth" for rank in range(ranks)] if ranks > 1 else ["rng_state.pth"]
    ):
        (folder / name).write_bytes(b"1")
    (folder / "trainer_state.json").write_text("{}")
    return folder


LOST = {
    "last file": lambda folder: (folder / "trainer_state.json").unlink(),
    "half of the last file": lambda folder: (folder / "trainer_state.json").write_text('{"a'),
    "latest": lambda folder: (folder / "latest").unlink(),
    "the name in latest": lambda folder: (folder / "latest").write_text(""),
    "another rank's random state": lambda folder: (folder / "rng_state_1.pth").unlink(),
    "the engine's file": lambda folder: (folder / "global_step100/weights.pt").unlink(),
    "half of the engine's file": lambda f: (f / "global_step100/weights.pt").write_bytes(b"12"),
    "half of the list": lambda f: (f / "global_step100/wavemare.json").write_text('{"files"'),
}


@pytest.mark.parametrize("lost", LOST)
def test_a_checkpoint_without_a_file_is_passed_over(tmp_path, lost):
    assert newest_checkpoint(tmp_path / "none yet") is None
    whole, newer = save(tmp_path, 20), save(tmp_path, 100)
    (tmp_path / "checkpoint-best").mkdir()  # somebody's own
    assert newest_checkpoint(tmp_path) == str(newer)  # by number, not by letters
    LOST[lost](newer)
    assert newest_checkpoint(str(tmp_path)) == str(whole)


def test_checkpoints_without_a_list_of_files_count_by_their_last_file(tmp_path):
    one = save(tmp_path, 1, ranks=1)
    assert newest_checkpoint(tmp_path) == str(one)
    stock = save(tmp_path, 2)
    (stock / "global_step2/wavemare.json").unlink()
    assert newest_checkpoint(tmp_path) == str(stock)
    plain = tmp_path / "checkpoint-3"
    plain.mkdir()
    (plain / "trainer_state.json").write_text("{}")  # a model alone: nothing to go on from
    assert newest_checkpoint(tmp_path) == str(stock)
    (plain / "optimizer.pt").write_bytes(b"1")
    assert newest_checkpoint(tmp_path) == str(plain)


def test_processes_that_have_not_met_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refuses(LaunchError, "WORLD_SIZE", 2):
        newest_checkpoint(tmp_path)
