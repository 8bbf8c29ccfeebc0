# SPDX-License-Identifier: Apache-2.0
"""Resume, check what was resumed, then train and save without end until SIGKILL comes.

Arguments: result folder, work folder, ``foreground`` or ``background``, then ``after SECONDS`` (of
saving; a shell kills this process) or ``at COUNT`` (the process kills itself before it changes the
file system for that time), and the rank that this is for, or -1 for all. The work folder has the
checkpoints, ``steps``, where the digest of the weights after each step is kept by the first run
that gets there, and ``journal``, lines of ``begun STEP`` and ``saved STEP``. The result folder gets
``resumed_RANK`` when all ranks have resumed.
"""

import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import torch
from common import build_gpt2, configuration, token_batches, weights_digest

import wavemare
from wavemare.engine.checkpoint.manifest import read_manifest, resolve_tag, verify_contents

STEPS = 300
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def kill_after(seconds):
    subprocess.Popen(["sh", "-c", f"sleep {seconds:.4f}; kill -9 {os.getpid()}"])


def kill_at(count):
    def hook(event, arguments):
        nonlocal count
        writes = event == "open" and isinstance(arguments[1], str) and arguments[1][:1] in "wax"
        if not writes and event not in CHANGES:
            return
        count -= 1
        if count == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def note(work, line):
    with (work / "journal").open("a") as journal:
        journal.write(f"{line}\n")


def check_digest(work, rank, step, digest):
    """Compare with what another run had after the step, or keep it for the next run."""
    file = work / "steps" / f"{step:04d}-{rank}"
    if file.exists() and len(file.read_text()) == len(digest):
        assert file.read_text() == digest, f"step {step} differs from the run before"
    else:
        file.write_text(digest)


def resume(work, engine):
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


def main(work, how, kind, number, victim):
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


def read(file):
    return file.read_text() if file.exists() else ""


if __name__ == "__main__":
    wavemare.init_distributed()
    try:
        main(Path(sys.argv[2]), *sys.argv[3:7])
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the other rank has gone: nothing is left to wait for
