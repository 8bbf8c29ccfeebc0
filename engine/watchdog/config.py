# SPDX-License-Identifier: Apache-2.0
"""The section ``watchdog``: when silence counts as failure."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from wavemare.section import Section

__all__ = ["WatchdogConfig"]

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class WatchdogConfig(Section):
    """When silence counts as failure."""

    enabled: bool = True
    """Whether a rank that no longer moves ends the run."""

    timeout_s: _Seconds = 300.0
    """Seconds in which a rank finishes the action it is in, or a peer answers a sparse
    collective."""

    start_timeout_s: _Seconds = 1800.0
    """The same for what takes long once: building the engine, the first step, saving and loading
    a checkpoint."""

    folder: str = "wavemare-watchdog"
    """Where every rank writes what it was doing when the run is ended; recipes: ``watchdog`` in
    the run folder."""
