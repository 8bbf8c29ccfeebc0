# SPDX-License-Identifier: Apache-2.0
"""``python -m wavemare.universal``: DeepSpeed's ``ds_to_universal``, run safely.

The options are DeepSpeed's: ``--input_folder`` and ``--output_folder``. Files that would run code
are refused.
"""

from __future__ import annotations

from deepspeed.checkpoint import ds_to_universal

from wavemare.engine.checkpoint_files import safe_loading
from wavemare.failure import run_main

__all__ = ["main"]


def main() -> None:
    """Convert a checkpoint so that any number of data-parallel ranks can load it.

    Raises:
        CheckpointError: A file holds more than tensors and plain values.
    """
    arguments = ds_to_universal.parse_arguments()
    with safe_loading(arguments.input_folder):
        ds_to_universal.main(arguments)


if __name__ == "__main__":
    run_main(main)
