# SPDX-License-Identifier: Apache-2.0
"""What a soak watches: losses after a restart, and what processes hold."""

import json
import os

import pytest

from wavemare.bench.soak.watch import Losses, Sizes
from wavemare.cli.bench_soak import problems


def write(file, losses, mode="w"):
    with file.open(mode) as lines:
        lines.writelines(json.dumps({"step": s, "loss": v}) + "\n" for s, v in losses)


def test_steps_that_are_trained_again_are_compared(tmp_path):
    file = tmp_path / "metrics.jsonl"
    losses = Losses(file)
    losses.update()  # before there is a file
    write(file, [(1, 5.0), (2, 4.5)])
    losses.update()
    write(file, [(3, 4.2), (4, 4.0)], "a")
    with file.open("a") as half:
        half.write('{"step": 5, "lo')  # the rank was killed here
    losses.update()
    assert losses.by_step == {1: 5.0, 2: 4.5, 3: 4.2, 4: 4.0}
    replacement = tmp_path / "new"
    write(replacement, [(1, 5.0), (2, 4.5)])  # resumed after step 2
    os.replace(replacement, file)
    losses.update()
    assert (losses.repeated, losses.different) == (0, [])
    write(file, [(3, 4.2), (4, 4.1), (5, 3.9)], "a")
    losses.update()
    assert losses.repeated == 1
    assert losses.different == [(4, 4.0, 4.1)]
    assert losses.by_step[5] == 3.9


def test_growth_is_that_of_medians_after_the_warm_up():
    sizes = Sizes(os.getpid(), warmup_s=0)
    assert sizes.growth() == {}
    sizes.samples = [{"memory_mib": m, "files": 7.0} for m in [100] * 4 + [101, 300] + [102] * 4]
    assert sizes.growth() == {"memory_mib": pytest.approx(0.02), "files": 0.0}
    # A save under way now and then is no leak; a thread that stays is.
    for threads, growth in (([5, 5, 5, 5, 6, 5, 6, 6, 5, 6], 0.0), ([5] * 5 + [6] * 5, 0.2)):
        leaky = Sizes(os.getpid(), warmup_s=0)
        leaky.samples = [{"threads": float(number), "children": 0.0} for number in threads]
        assert leaky.growth() == {"threads": pytest.approx(growth), "children": 0.0}
    sizes.sample()
    assert len(sizes.samples) == 10  # it does not train yet
    sizes.begin()
    sizes.sample()
    assert sizes.samples[-1]["memory_mib"] > 1
    late = Sizes(os.getpid(), warmup_s=100)
    late.begin()
    late.sample()
    assert late.samples == []


GOOD = {
    "system": "sparse",
    "exit_code": 0,
    "different_losses": 0,
    "reference_differs": 0,
    "growth": {"memory_mib": 0.009, "files": None},
    "shared_memory_segments": 0,
    "faults": {"pause": 1, "kill": 1, "slow link": 1},
    "planned_faults": {"pause": 1, "kill": 1, "slow link": 2},
    "repeated_steps": 3,
    "reference_steps": 300,
    "first_loss": 6.0,
    "last_loss": 5.0,
}


@pytest.mark.parametrize(
    "change",
    [
        {"exit_code": 143},
        {"different_losses": 1},
        {"reference_differs": 2},
        {"growth": {"memory_mib": 0.011}},
        {"shared_memory_segments": 1},
        {"planned_faults": {"pause": 3}},
        {"planned_faults": {"slow link": 3}},
        {"faults": {"pause": 0, "kill": 1}, "planned_faults": {}},
        {"faults": {"pause": 1, "kill": 0}, "planned_faults": {}},
        {"repeated_steps": 0},
        {"reference_steps": 0},
        {"growth": {"memory_mib": None, "files": None}},
        {"last_loss": 6.0},
        {"last_loss": None},
    ],
)
def test_a_soak_fails_for_each_promise_that_is_broken(change):
    assert problems(GOOD, 0.01) == []
    assert len(problems({**GOOD, **change}, 0.01)) == 1
