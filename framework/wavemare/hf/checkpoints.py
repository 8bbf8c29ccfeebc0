# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint of a Trainer a run goes on from after a crash."""

from __future__ import annotations

import json
from pathlib import Path

from torch import distributed

from wavemare.engine.checkpoint.manifest import read_manifest, resolve_tag
from wavemare.engine.launch.group import environment_world_size, gather
from wavemare.errors import CheckpointError, LaunchError

_PREFIX = "checkpoint-"


def newest_checkpoint(output_dir: str | Path) -> str | None:
    """Return a Trainer's newest complete checkpoint, the same on all ranks; all ranks call this.

    A run that was killed while it saved leaves a folder without all of its files, which
    transformers' ``get_last_checkpoint`` would take. Here it is passed over::

        trainer = Trainer(model=model, args=args, train_dataset=data)
        trainer.train(resume_from_checkpoint=newest_checkpoint(args.output_dir))

    Files are compared by name and size. Their checksums are compared when the checkpoint is loaded.
    Stock DeepSpeed, and a Trainer without DeepSpeed, note no sizes: there it is enough that the
    file is there that is written last.

    Args:
        output_dir: Of the Trainer. All hosts see the same folder.

    Returns:
        The path of ``checkpoint-N``; None if there is none, and the run begins at the start.

    Raises:
        LaunchError: There are several processes, and they have not met yet.
    """
    processes = environment_world_size()
    if processes > 1 and not distributed.is_initialized():
        reason = "the processes have to agree on it, and have not met yet"
        remedy = "Call newest_checkpoint after the Trainer is made"
        raise LaunchError("WORLD_SIZE", processes, reason, remedy)
    if not distributed.is_initialized():
        return _newest(Path(output_dir))
    newest = _newest(Path(output_dir)) if distributed.get_rank() == 0 else None
    return gather(newest)[0]


def _newest(output_dir: Path) -> str | None:
    steps = {
        int(path.name.removeprefix(_PREFIX)): path
        for path in output_dir.glob(f"{_PREFIX}*")
        if path.name.removeprefix(_PREFIX).isdecimal() and _is_complete(path)
    }
    return str(steps[max(steps)]) if steps else None


def _is_complete(folder: Path) -> bool:
    """Whether a run can go on from a folder of a Trainer."""
    try:
        json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))  # written last
        tag = resolve_tag(folder, None)
        manifest = None if tag is None else read_manifest(folder / tag)
    except (OSError, ValueError, CheckpointError):
        return False
    if tag is None:  # without DeepSpeed; a save with it that did not end has neither
        return (folder / "optimizer.pt").is_file()
    if manifest is None:  # stock DeepSpeed's
        return True
    # Other ranks write their random states at the time of the last file, and may be later.
    count = int(manifest["topology"]["world_size"])
    names = [f"rng_state_{rank}.pth" for rank in range(count)] if count > 1 else ["rng_state.pth"]
    return all((folder / name).is_file() for name in names)
