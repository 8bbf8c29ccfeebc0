# SPDX-License-Identifier: Apache-2.0
"""How long a restart has taken: from the death of a rank to the end of the first step after it."""

from __future__ import annotations

import os
import time

from wavemare.engine.launch.environment import REPLICA, RESTARTED
from wavemare.engine.observe.choices import tell

_PARTS = {
    "imports": "of imports",
    "engine": "until the engine was made",
    "load": "until the load",
    "loaded": "of the load",
}
"""The places that a process gets to, in this order, and the time before each in words."""
_reached: dict[str, float] = {}


def reached(place: str) -> None:
    """Note when a process that was started again has got to one of these places first.

    Args:
        place: ``"imports"``: the imports are over; ``"engine"``: the engine is being made;
            ``"load"`` and ``"loaded"``: a checkpoint is being loaded, and has been.
    """
    if RESTARTED in os.environ:
        _reached.setdefault(place, time.time())


def tell_first_step(step: int) -> None:
    """Say once, on rank 0, how long after the death of a rank this first step has ended.

    The supervisor of ``wavemare train`` and ``wavemare launch`` says when the rank died.

    Args:
        step: The optimizer step, from 1.
    """
    if (told := os.environ.pop(RESTARTED, None)) is None:
        return
    (died_at, begun), now = map(float, told.split()), time.time()
    parts, last = [f"{begun - died_at:.1f} s until this process started"], begun
    for place, words in _PARTS.items():
        if place in _reached:
            parts.append(f"{_reached[place] - last:.1f} s {words}")
            last = _reached[place]
    _reached.clear()
    replica = os.environ.get(REPLICA)
    what = "restart" if replica is None else f"restart of replica {replica}"
    tell(
        f"{what}: step {step} ended {now - died_at:.1f} s after the death of a rank: "
        f"{', '.join(parts)}, {now - last:.1f} s until the end of the step"
    )
