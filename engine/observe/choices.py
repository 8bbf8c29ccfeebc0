# SPDX-License-Identifier: Apache-2.0
"""What each ``"auto"`` has become, and why, in one line that a user sees."""

from __future__ import annotations

import logging
import sys

from wavemare.engine.launch.group import environment_rank

logger = logging.getLogger("wavemare")


def tell_choice(key: str, chosen: object, reason: str) -> None:
    """Say on rank 0 what an ``"auto"`` has become, and why.

    The line is a record of the level INFO. Python shows no such record where a program has not
    configured its logging; there the line goes to the standard error.

    Args:
        key: The key or the option that is ``"auto"``.
        chosen: What is used in its place.
        reason: Why, as the end of a sentence.
    """
    tell(f"{key} auto: {chosen}: {reason}")


def tell(line: str) -> None:
    """Show a line on rank 0, as `tell_choice` does."""
    if not _is_first():
        return
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(line)
    else:
        print(line, file=sys.stderr, flush=True)


def _is_first() -> bool:
    dist = sys.modules.get("torch.distributed")  # options are read before torch is imported
    if dist is not None and dist.is_initialized():
        return bool(dist.get_rank() == 0)
    return environment_rank() == 0
