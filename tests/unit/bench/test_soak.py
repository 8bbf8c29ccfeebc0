# SPDX-License-Identifier: Apache-2.0
"""What a soak watches: losses after a restart, and what processes hold."""

import json
import os
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from types import SimpleNamespace

import pytest

from wavemare.bench.soak.faults import draw_faults
from wavemare.bench.soak.run import SYSTEMS, Soak, configuration
from wavemare.bench.soak.watch import Losses, Sizes, left_behind, shared_memory_segments
from wavemare.cli.bench_soak import _problems
from wavemare.engine.config import check_config

MIB = 2**20


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


def test_pages_of_a_file_that_another_process_leaves_are_no_growth(tmp_path):
    (tmp_path / "library").write_bytes(bytes(64 * MIB))
    program = """
import mmap, sys
file = open("library", "rb")
library = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
seen, own = sum(library[::4096]), b"x" * int(sys.argv[1])
print("ready", flush=True)
input()
"""

    def start(bytes_of_its_own):
        words = [sys.executable, "-c", program, str(bytes_of_its_own)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen(words, cwd=tmp_path, text=True, **pipes)

    with start(0) as small, start(32 * MIB) as large:
        sizes = [Sizes(process.pid, warmup_s=0) for process in (small, large)]
        try:
            for process, of in zip((small, large), sizes, strict=True):
                assert process.stdout.readline() == "ready\n"
                of.begin()
                of.sample()
            large.kill()
            os.waitid(os.P_PID, large.pid, os.WEXITED | os.WNOWAIT)  # its parent knows nothing yet
            for of in sizes:
                of.sample()
        finally:
            small.kill()
            large.kill()
    (before, after), (own,) = [[sample["memory_mib"] for sample in of.samples] for of in sizes]
    assert after == pytest.approx(before, abs=1)
    assert own - before == pytest.approx(32, abs=1)


def test_segments_of_a_process_that_stay_are_found():
    sizes, segment = Sizes(os.getpid(), warmup_s=0), SharedMemory(create=True, size=100)
    try:
        sizes.sample()
        assert segment.name in sizes.segments
        assert left_behind(sizes.segments) >= {segment.name}
    finally:
        segment.close()
        segment.unlink()
    assert segment.name not in left_behind(sizes.segments)
    assert shared_memory_segments(2**22 + 1) == set()


def test_faults_are_drawn_again_from_their_seed():
    faults = draw_faults(120, 2, 7, links=True)
    assert faults == draw_faults(120, 2, 7, links=True) != draw_faults(120, 2, 8, links=True)
    assert faults == sorted(faults)
    assert {fault.kind for fault in faults} == {"pause", "kill", "slow link"}
    assert all(180 <= fault.at_s <= 120 * 60 - 180 for fault in faults)
    assert "slow link" not in {f.kind for f in draw_faults(120, 2, 7, links=False)}
    assert {fault.kind for fault in draw_faults(1, 2, 7, links=True)} >= {"pause", "kill"}


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_configurations_can_be_run(system):
    check_config(configuration(system), world_size=2)


@pytest.mark.timeout(60)  # not as long as the soak
@pytest.mark.parametrize(("minutes", "late"), [(60.0, False), (0.01, True)])
def test_a_fault_that_cannot_be_inflicted_fails_the_soak(tmp_path, monkeypatch, minutes, late):
    """At once, and also in the last moment, when nobody looks any more."""
    soak = Soak("sparse", minutes, 0, tmp_path, 0.0, 1, lambda _: None)

    def inflict(started, stop, link):
        assert not late or stop.wait(10)
        raise OSError("tc is not there")

    def lasting(*_):
        pytest.fail("the soak goes on")

    monkeypatch.setattr(soak, "_inflict", inflict)
    monkeypatch.setattr(soak, "_find_ranks", lambda *_: None)
    monkeypatch.setattr(soak, "_await_steps", lasting)
    job = SimpleNamespace(pid=os.getpid(), poll=lambda: None)
    losses = SimpleNamespace(by_step={1: 5.0}, update=lambda: None)
    with pytest.raises(OSError, match="tc is not there"):
        soak._train(job, losses, None)


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
    assert _problems(GOOD, 0.01) == []
    assert len(_problems({**GOOD, **change}, 0.01)) == 1
