# SPDX-License-Identifier: Apache-2.0
"""What a run leaves behind and what it shows while it runs."""

from wavemare.observe.events import Events, read_events
from wavemare.observe.live import live_facts
from wavemare.observe.memory import MemoryEstimate, estimate_activations, estimate_memory
from wavemare.observe.quiet import quiet_environment, quiet_libraries
from wavemare.observe.recording import Recording
from wavemare.observe.run import Run, read_metrics
from wavemare.observe.screen import Progress, Screen

__all__ = [
    "Events",
    "MemoryEstimate",
    "Progress",
    "Recording",
    "Run",
    "Screen",
    "estimate_activations",
    "estimate_memory",
    "live_facts",
    "quiet_environment",
    "quiet_libraries",
    "read_events",
    "read_metrics",
]
