# SPDX-License-Identifier: Apache-2.0
"""SIGKILL at any instant of saving loses nothing that was complete."""

import random
import signal

import pytest

from wavemare.engine.manifest import MANIFEST, complete_tags

CHANGES_PER_SAVE = 40
"""Files and folders that a rank makes, renames and removes in a save, roughly."""


@pytest.fixture
def killed(launch, tmp_path):
    """Run the program again and again; each run checks what the one before has left."""

    def killed(moments, *, ranks, seed, clocks=0.5):
        drawn = random.Random(seed)
        work = tmp_path / "work"
        work.mkdir()
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
