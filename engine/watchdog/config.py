# SPDX-License-Identifier: Apache-2.0
"""The section ``watchdog``: when waiting counts as failure."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from wavemare.section import Section

__all__ = ["WatchdogConfig"]

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_WEEK_S = 7 * 24 * 3600.0


class WatchdogConfig(Section):
    """When waiting counts as failure."""

    enabled: bool = True
    """Whether ranks that wait for a lost one, or all for each other, end the run."""

    timeout_s: _Seconds = 600.0
    """Seconds for which ranks wait before the run is ended; one that computes is never ended.
    Without the watchdog: seconds in which a peer answers a sparse collective."""

    folder: str = "wavemare-watchdog"
    """Where every rank writes what it was doing when the run is ended; recipes: ``watchdog`` in
    the run folder."""

    @property
    def collective_timeout_s(self) -> float:
        """Seconds after which a collective fails by itself, though its peers may only compute."""
        return _WEEK_S if self.enabled else self.timeout_s
