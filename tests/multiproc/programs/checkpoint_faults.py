# SPDX-License-Identifier: Apache-2.0
"""Checkpoints written behind training, damaged, hostile, and on a disk that is full.

Arguments: result folder, work folder, action, then what the action needs.
"""

import json
import os
import resource
import shutil
import signal
import sys
import threading
from pathlib import Path

import torch
from common import build_gpt2, configuration, leave, token_batches, weights_digest

import wavemare
from wavemare.engine.checkpoint import files as checkpoint_files
from wavemare.engine.checkpoint.manifest import MANIFEST, checksum
from wavemare.errors import CheckpointError
from wavemare.failure import run_main

RANK = int(os.environ["RANK"])


def build(case, **section):
    pipeline = {} if case.isdigit() else {"stages": 2, "inputs": ["input_ids"]}
    if case == "pipemare":
        pipeline |= {"schedule": "pipemare", "pipemare": {"drain_interval": 1}}
    config = configuration(
        int(case) if case.isdigit() else 1, wavemare={"pipeline": pipeline, "checkpoint": section}
    )
    engine = wavemare.initialize(model=build_gpt2(), config=config)[0]
    data = token_batches(RANK if case.isdigit() else 0)
    return engine, ({"input_ids": batch, "labels": batch} for batch in data)


def refused(action):
    try:
        action()
    except CheckpointError as error:
        return {"file": error.value, "reason": error.reason, "remedy": error.remedy}
    return None


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def background(folder, case):
    """Train on while a writer that is held up has all still to write; then resume from that."""
    engine, batches = build(case)
    engine.train_batch(batches)
    engine.save_checkpoint(str(folder), "front", save_latest=False)
    background = engine.settings.checkpoint.model_copy(update={"background": True})
    engine.settings = engine.settings.model_copy(update={"checkpoint": background})
    held, write = threading.Event(), checkpoint_files.write_file

    def wait_and_write(*args, **kwargs):
        assert threading.current_thread() is not threading.main_thread()
        held.wait(500)
        return write(*args, **kwargs)

    checkpoint_files.write_file = wait_and_write
    engine.save_checkpoint(str(folder), "back")
    losses = [engine.train_batch(batches).item() for _ in range(2)]
    torch.distributed.barrier()
    absent = not (folder / "back").exists() and not (folder / "latest").exists()
    held.set()
    engine.save_checkpoint(str(folder), "later", save_latest=False)  # waits for the one before
    present = (folder / "back" / MANIFEST).exists() and (folder / "latest").read_text() == "back"
    weights = weights_digest(engine)
    engine.destroy()
    checkpoint_files.write_file = write
    lists = [json.loads((folder / tag / MANIFEST).read_text()) for tag in ("front", "back")]
    alive = [t.name for t in threading.enumerate() if t.name == "wavemare-checkpoint"]

    again, batches = build(case)
    again.load_checkpoint(str(folder))
    for _ in range(2):
        next(batches)
    resumed = [again.train_batch(batches).item() for _ in range(2)]
    return {
        "absent": absent,
        "present": present,
        "alive": alive,
        "files": [found["files"] for found in lists],
        "later": (folder / "later" / MANIFEST).exists(),
        "losses": [losses, resumed],
        "weights": [weights, weights_digest(again)],
    }


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "weights": ("*model_states.pt", flip),
    "moments": ("*rank_1_*optim_states.pt", flip),
    "random": ("wavemare_rank_00001_state.pt", flip),
    "cut": ("*rank_1_*optim_states.pt", lambda file: os.truncate(file, 999)),
    "missing": ("wavemare_rank_00000_state.pt", Path.unlink),
    "extra": (
        "*rank_1_*optim_states.pt",
        lambda file: shutil.copy(file, str(file).replace("rank_1", "rank_2")),
    ),
}


def damage(folder, case):
    """Save, damage one file after the other, and try to load."""
    engine, batches = build(case)
    engine.train_batch(batches)
    engine.save_checkpoint(str(folder), "older")
    engine.train_batch(batches)
    engine.save_checkpoint(str(folder), "newer")
    fresh, _ = build(case)
    before, found = weights_digest(fresh), {}
    for name, (pattern, spoil) in DAMAGES.items():
        torch.distributed.barrier()
        if RANK == 0:
            shutil.copytree(folder / "newer", folder / ".kept", copy_function=os.link)
            file = max((folder / "newer").glob(pattern))
            content = file.read_bytes()
            file.unlink()  # not the other name's content
            file.write_bytes(content)
            spoil(file)
        torch.distributed.barrier()
        found[name] = refused(lambda: fresh.load_checkpoint(str(folder)))
        found[name]["untouched"] = weights_digest(fresh) == before and fresh.global_steps == 0
        torch.distributed.barrier()
        if RANK == 0:
            shutil.rmtree(folder / "newer")
            os.rename(folder / ".kept", folder / "newer")
    torch.distributed.barrier()
    fresh.load_checkpoint(str(folder), "older")
    found["older"] = fresh.global_steps
    fresh.load_checkpoint(str(folder))
    found["newer"] = fresh.global_steps
    return found


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def hostile(folder, case):
    """Put a file that runs code, with the right checksum, in place of each file."""
    engine, batches = build(case)
    engine.train_batch(batches)
    engine.save_checkpoint(str(folder), "good")
    found = {}
    for number, file in enumerate(sorted((folder / "good").glob("*.pt"))):
        for listed in (True, False):
            tag = f"evil-{number}-{listed}"
            shutil.copytree(folder / "good", folder / tag)
            marker, evil = folder / f"marker-{tag}", folder / tag / file.name
            torch.save({"module": Evil(marker), "optimizer_state_dict": Evil(marker)}, evil)
            if listed:
                manifest = json.loads((folder / tag / MANIFEST).read_text())
                manifest["files"][file.name] = vars(checksum(evil))
                (folder / tag / MANIFEST).write_text(json.dumps(manifest))
            else:  # as stock DeepSpeed leaves a folder
                (folder / tag / MANIFEST).unlink()
            fresh, _ = build(case)
            error = refused(lambda fresh=fresh, tag=tag: fresh.load_checkpoint(str(folder), tag))
            found[f"{file.name} {listed}"] = [error, marker.exists()]
    return found


def full(folder, case):
    """Save where rank 1 may write no large files; then where it may."""
    engine, batches = build("1", background=case == "background")
    engine.train_batch(batches)
    engine.save_checkpoint(str(folder), "one")
    engine.finish_saving()
    kept = {path.name: path.stat().st_size for path in (folder / "one").iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if RANK == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, limits[1]))
    engine.train_batch(batches)

    def save(tag):
        engine.save_checkpoint(str(folder), tag)
        engine.finish_saving()

    errors = [refused(lambda tag=tag: save(tag)) for tag in ("two", "one")]
    if case == "background":
        engine.save_checkpoint(str(folder), "three")
        for thread in threading.enumerate():
            if thread.name == "wavemare-checkpoint":
                thread.join()
        errors.append(refused(lambda: engine.train_batch(batches)))
        torch.distributed.barrier()
        engine.save_checkpoint(str(folder), "four")
        errors.append(refused(engine.destroy))
    found = {"errors": errors, "there": names(folder), "latest": (folder / "latest").read_text()}
    found["kept"] = kept == {p.name: p.stat().st_size for p in (folder / "one").iterdir()}
    torch.distributed.barrier()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    save("after")
    return {**found, "after": (folder / "latest").read_text()}


def too_small(folder, case):
    """Save until the disk is full, and let the error end the process."""
    engine, batches = build("1", background=case == "background")
    for step in range(100):
        engine.train_batch(batches)
        engine.save_checkpoint(str(folder), f"step-{step:02}")
    engine.finish_saving()


def lost(folder, case):
    """Wait for what is written in the background, while a rank is killed that writes its part."""
    engine, batches = build(case, background=True)
    engine.train_batch(batches)
    if RANK == 1:
        checkpoint_files.write_file = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
    engine.save_checkpoint(str(folder), "one")
    engine.finish_saving()


if __name__ == "__main__":
    wavemare.init_distributed()
    work, action, cases = Path(sys.argv[2]), sys.argv[3], sys.argv[4:]
    if action == "too_small":
        run_main(lambda: too_small(work, cases[0]))
        raise AssertionError("the disk was never full")
    if action == "lost":
        run_main(lambda: lost(work, cases[0]))
        raise AssertionError("the other rank was not missed")
    leave({case: globals()[action](work / case, case) for case in cases})
