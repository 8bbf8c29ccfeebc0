# SPDX-License-Identifier: Apache-2.0
"""Resume, check what was resumed, then train and save without end until SIGKILL comes.

Or, with the arguments result folder, work folder, ``forks`` and a number of kills: a process of one
rank is forked so often, each fork is killed while it saves, and this process loads what it left.

Arguments: result folder, work folder, ``foreground`` or ``background``, then ``after SECONDS`` (of
saving; a shell kills this process) or ``at COUNT`` (the process kills itself before it changes the
file system for that time), and the rank that this is for, or -1 for all. The work folder has the
checkpoints, ``steps``, where the digest of the weights after each step is kept by the first run
that gets there, and ``journal``, lines of ``begun STEP`` and ``saved STEP``. The result folder gets
``resumed_RANK`` when all ranks have resumed.
"""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import deepspeed
import torch
from common import build_gpt2, configuration, leave, token_batches, weights_digest

import wavemare
from wavemare.engine import checkpoint
from wavemare.engine.checkpoint_config import CheckpointConfig
from wavemare.engine.manifest import read_manifest, resolve_tag, verify_contents

STEPS = 300
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def kill_after(seconds: float) -> None:
    subprocess.Popen(["sh", "-c", f"sleep {seconds:.4f}; kill -9 {os.getpid()}"])


def kill_at(count: int) -> None:
    def hook(event: str, arguments: tuple) -> None:
        nonlocal count
        writes = event == "open" and isinstance(arguments[1], str) and arguments[1][:1] in "wax"
        if not writes and event not in CHANGES:
            return
        count -= 1
        if count == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def note(work: Path, line: str) -> None:
    with (work / "journal").open("a") as journal:
        journal.write(f"{line}\n")


def check_digest(work: Path, rank: int, step: int, digest: str) -> None:
    """Compare with what another run had after the step, or keep it for the next run."""
    file = work / "steps" / f"{step:04d}-{rank}"
    if file.exists() and len(file.read_text()) == len(digest):
        assert file.read_text() == digest, f"step {step} differs from the run before"
    else:
        file.write_text(digest)


def resume(work: Path, engine) -> int:
    """Load what ``latest`` names; return its step."""
    folder = work / "checkpoints"
    journal = read(work / "journal").split("\n")[:-1]
    begun = [int(line.split()[1]) for line in journal if line.startswith("begun")]
    saved = [int(line.split()[1]) for line in journal if line.startswith("saved")]
    tag = resolve_tag(folder, None)
    if tag is None:
        assert not any(saved)
        return 0
    manifest = read_manifest(folder / tag)  # what is named is complete
    assert manifest is not None
    verify_contents(folder / tag, manifest)
    engine.load_checkpoint(str(folder))
    step = engine.global_steps
    assert step in {*(saved[-1:] or [0]), *begun[-1:]}, "not the last complete one"
    assert step >= max(saved[-1:], default=0), "a complete checkpoint was lost"
    return step


def main(work: Path, how: str, kind: str, number: str, victim: str) -> None:
    section = {"checkpoint": {"keep": 2, "background": how == "background"}}
    config = configuration(1, wavemare=section)
    engine = wavemare.initialize(model=build_gpt2(), config=config)[0]
    rank = torch.distributed.get_rank()
    (work / "steps").mkdir(exist_ok=True)
    first = resume(work, engine)
    torch.distributed.barrier()
    # All ranks have done so before the barrier behind which the kill is prepared.
    Path(sys.argv[1], f"resumed_{rank}").touch()
    if rank == 0:
        note(work, f"saved {first}")
    if first:
        check_digest(work, rank, first, weights_digest(engine))
    batches = token_batches(rank)
    for _ in range(first * 2):
        next(batches)
    torch.distributed.barrier()
    if int(victim) in {-1, rank}:
        kill_after(float(number)) if kind == "after" else kill_at(int(number))
    for step in range(first + 1, first + STEPS):
        engine.train_batch({"input_ids": b, "labels": b} for b in batches)
        check_digest(work, rank, step, weights_digest(engine))
        engine.finish_saving()
        if rank == 0:
            if step > first + 1:
                note(work, f"saved {step - 1}")
            note(work, f"begun {step}")
        # Every other one replaces a folder, the one that ``latest`` names at that moment.
        tag = "same" if step % 3 else f"step-{step}"
        engine.save_checkpoint(str(work / "checkpoints"), tag)
    raise AssertionError("nobody has killed this process")


def set_all(engine, step: int) -> None:
    """Set weights and averages to a number, which a checkpoint must hold in all of its files."""
    engine.global_steps = step
    with torch.no_grad():
        for weight in engine.module.parameters():
            weight.fill_(step)
        for state in engine.optimizer.state.values():
            state["exp_avg"].fill_(step)
    for group in getattr(engine.optimizer, "single_partition_of_fp32_groups", []):
        group.data.fill_(step)


def values(engine) -> set[float]:
    averages = [state["exp_avg"] for state in engine.optimizer.state.values()]
    return {float(v) for t in [*engine.module.parameters(), *averages] for v in t.unique()}


def save_for_ever(engine, work: Path, first: int, background: bool) -> None:
    """In a fork, which has none of the threads of its process group, and needs none: one rank."""
    deepspeed.comm.barrier = lambda *args, **kwargs: None
    checkpoint.meet_by_collective = lambda value: [value]
    engine._meet_in_store = lambda: lambda value: [value]
    engine.checkpoint_settings = CheckpointConfig(keep=2, background=background)
    for step in itertools.count(first + 1):
        set_all(engine, step)
        note(work, f"begun {step}")
        engine.save_checkpoint(str(work / "checkpoints"), "same" if step % 3 else f"step-{step}")
        engine.finish_saving()
        note(work, f"saved {step}")


def forks(work: Path, kills: int) -> dict:
    """Kill forks; return how many steps they had saved, and what each of them was doing."""
    config = configuration(0, checkpoint={"tag_validation": "Ignore"})
    engine = wavemare.initialize(model=build_gpt2(), config=config)[0]
    batches = ({"input_ids": b, "labels": b} for b in token_batches(0))
    engine.train_batch(batches)  # makes the optimizer's states
    drawn = random.Random(7)
    done, partial = 0, 0
    for kill in range(kills):
        child = os.fork()
        if child == 0:
            save_for_ever(engine, work, done, background=bool(kill % 2))
        while f"begun {done + 1}\n" not in read(work / "journal"):
            time.sleep(0.001)
        time.sleep(drawn.uniform(0.0, 0.2))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        partial += len(list((work / "checkpoints").glob(".*")))
        done = max(done, resume(work, engine))
        assert values(engine) == {float(done)} or done == 0
        note(work, f"saved {done}")
    loss = engine.train_batch(batches)  # it goes on
    return {"saved": done, "partial": partial, "finite": bool(torch.isfinite(loss))}


def read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


if __name__ == "__main__":
    wavemare.init_distributed()
    if sys.argv[3] == "forks":
        leave(forks(Path(sys.argv[2]), int(sys.argv[4])))
        sys.exit()
    try:
        main(Path(sys.argv[2]), *sys.argv[3:7])
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the other rank has gone: nothing is left to wait for
