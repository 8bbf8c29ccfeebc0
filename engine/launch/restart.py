# SPDX-License-Identifier: Apache-2.0
"""What a process knows of the attempts before it: a launcher has started it again."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["COUNT", "STARTED", "job_started", "restart_count"]

COUNT = "WAVEMARE_RESTART_COUNT"
STARTED = "WAVEMARE_JOB_STARTED"
"""Set by ``wavemare train --max-restarts``: the attempt, and when the first began (Unix time)."""

_TORCHRUN = "TORCHELASTIC_RESTART_COUNT"
_SLACK_S = 1.0
"""Of a file system's clock."""


def restart_count(environment: Mapping[str, str] = os.environ) -> int:
    """Return how often a launcher has started the ranks anew, 0 in the first attempt."""
    texts = (environment.get(name, "") for name in (COUNT, _TORCHRUN))
    return max((int(text) for text in texts if text.isascii() and text.isdecimal()), default=0)


def job_started(environment: Mapping[str, str] = os.environ) -> float:
    """Return when the job's first attempt began, as Unix time: what is older is another run's."""
    import psutil

    try:
        return float(environment[STARTED]) - _SLACK_S
    except (KeyError, ValueError):
        # torchrun's agent, which starts all attempts of its ranks, is their parent.
        return float(psutil.Process(os.getppid()).create_time()) - _SLACK_S
