# SPDX-License-Identifier: Apache-2.0
"""What a run leaves in its folder and shows on the screen while it trains.

In: an engine and its losses. Out: the files that `wavemare report` reads. Read
`recording.py` first.
"""

from wavemare.observe.lines import Events, read_events, read_metrics
from wavemare.observe.quiet import quiet_libraries
from wavemare.observe.recording import Recording
from wavemare.observe.run import Run
from wavemare.observe.screen import Screen, print_rank_0

__all__ = [
    "Events",
    "Recording",
    "Run",
    "Screen",
    "print_rank_0",
    "quiet_libraries",
    "read_events",
    "read_metrics",
]
