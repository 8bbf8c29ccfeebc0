# SPDX-License-Identifier: Apache-2.0
"""Keeping other libraries from drowning the progress line."""

from __future__ import annotations

import logging
import os
import sys

# Read by the libraries when they are imported.
_VARIABLES = {
    "TRANSFORMERS_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# Called where the libraries have been imported.
_MUTES = (
    ("transformers.utils.logging", "set_verbosity_error"),
    ("transformers.utils.logging", "disable_progress_bar"),
    ("datasets.utils.logging", "set_verbosity_error"),
    ("datasets.utils.tqdm", "disable_progress_bars"),
    ("huggingface_hub.utils.logging", "set_verbosity_error"),
    ("huggingface_hub.utils.tqdm", "disable_progress_bars"),
)


def quiet_libraries() -> None:
    """Show errors alone of DeepSpeed, transformers and datasets, and none of their bars.

    It may be called before or after they are imported, and imports none of them. With
    ``WAVEMARE_VERBOSE=1`` it does nothing.
    """
    if os.environ.get("WAVEMARE_VERBOSE", "0") == "1":
        return
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    deepspeed_logger = logging.getLogger("DeepSpeed")
    deepspeed_logger.setLevel(logging.ERROR)
    # DeepSpeed sets the level when it is imported, and its handler repeats it: a filter stays.
    deepspeed_logger.addFilter(_errors_only)
    for name, method in _MUTES:
        if (module := sys.modules.get(name)) is not None:
            getattr(module, method)()


def _errors_only(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
