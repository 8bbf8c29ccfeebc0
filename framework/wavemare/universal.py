# SPDX-License-Identifier: Apache-2.0
"""``python -m wavemare.universal``: DeepSpeed's ``ds_to_universal``, run safely.

The options are DeepSpeed's: ``--input_folder`` and ``--output_folder``. Files that would run code
are refused.
"""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import chdir
from pathlib import Path

from deepspeed.checkpoint import ds_to_universal

from wavemare.engine.checkpoint.files import safe_loading, taken_literally
from wavemare.errors import CheckpointError, os_errors
from wavemare.failure import run_main
from wavemare.files import replace_folder

_OPTIMIZER_STATES = "_optim_states.pt"


def main() -> None:
    """Convert a checkpoint so that any number of data-parallel ranks can load it.

    Raises:
        CheckpointError: The input is no folder with optimizer states, or a file holds more than
            tensors and plain values.
    """
    arguments = ds_to_universal.parse_arguments()
    folder = Path(arguments.input_folder)
    if next(folder.glob(f"*{_OPTIMIZER_STATES}"), None) is None:
        reason = "there is no such folder"
        if folder.is_dir():
            reason = "it has no optimizer states, so it is no checkpoint that can be converted"
        remedy = "Give the folder of one tag, such as checkpoints/step-000100"
        raise CheckpointError("--input_folder", str(folder), reason, remedy)
    if (folder / "replicas").is_dir():
        reason = "it is of local steps, and DeepSpeed would join its replicas into one model"
        remedy = "Go on from a model that save_pretrained exported"
        raise CheckpointError("--input_folder", str(folder), reason, remedy)
    arguments.input_folder = source = os.path.abspath(arguments.input_folder)
    output = Path(arguments.output_folder).absolute()
    # DeepSpeed reads the output's name as a regular expression.
    arguments.output_folder = partial = f".universal-{secrets.token_hex(8)}"
    with os_errors(
        CheckpointError, "--output_folder", str(output), "it cannot be made", "Name another"
    ):
        output.parent.mkdir(parents=True, exist_ok=True)
    with chdir(output.parent), safe_loading(source), taken_literally(source):
        try:
            ds_to_universal.main(arguments)
            replace_folder(partial, output)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


if __name__ == "__main__":
    run_main(main)
