# SPDX-License-Identifier: Apache-2.0
"""SIGKILL at any instant of saving loses nothing that was complete."""

import json
import random
import signal

import pytest

from wavemare.engine.checkpoint.manifest import MANIFEST, complete_tags
from wavemare.files import temporary_sibling

CHANGES_PER_SAVE = 40
"""Files and folders that a rank makes, renames and removes in a save, roughly."""


def put_strangers(checkpoints):
    """Put beside the checkpoints what another job writes and has written, and files of a user."""
    other = checkpoints / "of another job"
    (other / "part").mkdir(parents=True)
    topology = dict.fromkeys(("world_size", "data", "pipe", "model", "zero_stage"), 1)
    listed = {"format": 2, "saved": "2000", "runs": ["another"], "topology": topology, "files": {}}
    (other / MANIFEST).write_text(json.dumps(listed))
    for folder in (temporary_sibling(checkpoints / "same"), checkpoints / ".same.partial"):
        folder.mkdir()
        (folder / "rank_0.pt").write_text("being written")
    (checkpoints / ".mine.partial").write_text("of the user")
    return sorted(path for path in checkpoints.rglob("*"))


@pytest.fixture
def killed(launch, tmp_path):
    """Run the program again and again; each run checks what the one before has left."""

    def killed(moments, *, ranks, seed, clocks=0.5):
        drawn = random.Random(seed)
        work = tmp_path / "work"
        strangers = put_strangers(work / "checkpoints")
        for moment in range(moments):
            how = drawn.choice(["foreground", "background"])
            by_clock = drawn.random() < clocks
            victim = drawn.randrange(-1, ranks) if ranks > 1 else 0
            most = 8 if victim > 0 else CHANGES_PER_SAVE  # it writes two files of each save
            number = drawn.uniform(0.0, 0.5) if by_clock else drawn.randint(1, 3 * most)
            folder = tmp_path / f"run-{moment}"
            folder.mkdir()
            words = [work, how, "after" if by_clock else "at", number, victim]
            run = launch("checkpoint_kills.py", *words, ranks=ranks, folder=folder, own=True)
            story = (moment, words[1:], run.codes, [text[-3000:] for text in run.outputs])
            # No kill comes before all have resumed: one that has not has failed, or hung.
            assert all((folder / f"resumed_{rank}").exists() for rank in range(ranks)), story
            # The victim ended by its own kill, and the other noticed that.
            assert not run.ended_by_harness, (run.ended_by_harness, story)
            victims = range(ranks) if victim == -1 else [victim]
            assert any(run.codes[rank] == -signal.SIGKILL for rank in victims), story
            assert not any("AssertionError" in text for text in run.outputs), story
            assert all(path.exists() for path in strangers), story
        return work

    return killed


def check_saved(work, kills):
    saved = [line for line in (work / "journal").read_text().split("\n") if "saved" in line]
    assert len(saved) > kills  # each attempt notes what it found, and some have saved more
    listed = {path.parent.name for path in (work / "checkpoints").glob(f"*/{MANIFEST}")}
    assert listed
    assert listed == set(complete_tags(work / "checkpoints"))


@pytest.mark.world_size(2)
def test_three_kills_of_two_ranks(killed):
    check_saved(killed(3, ranks=2, seed=2, clocks=0), 3)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.timeout(1500)
def test_fifty_kills(killed, ranks):
    check_saved(killed(50, ranks=ranks, seed=ranks), 50)
