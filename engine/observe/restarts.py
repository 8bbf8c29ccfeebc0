# SPDX-License-Identifier: Apache-2.0
"""How long a restart has taken: from the death of a rank to the end of the first step after it."""

from __future__ import annotations

import os
import time

from wavemare.engine.launch.environment import REPLICA, RESTARTED
from wavemare.engine.observe.choices import tell


def tell_first_step(step: int, made_at: float) -> None:
    """Say once, on rank 0, how long after the death of a rank this first step has ended.

    The supervisor of ``wavemare train`` and ``wavemare launch`` says when the rank died.

    Args:
        step: The optimizer step, from 1.
        made_at: When the engine was made (Unix time).
    """
    if (told := os.environ.pop(RESTARTED, None)) is None:
        return
    (died_at, begun), now = map(float, told.split()), time.time()
    replica = os.environ.get(REPLICA)
    what = "restart" if replica is None else f"restart of replica {replica}"
    tell(
        f"{what}: step {step} ended {now - died_at:.1f} s after the death of a rank: "
        f"{begun - died_at:.1f} s until this process started, {made_at - begun:.1f} s of imports "
        f"and set-up, {now - made_at:.1f} s from there to the end of the step"
    )
