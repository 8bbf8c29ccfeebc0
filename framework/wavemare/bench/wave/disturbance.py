# SPDX-License-Identifier: Apache-2.0
"""Whether other programs took processor time from a measurement, and waiting until they do not."""

from __future__ import annotations

import time
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist

__all__ = ["LIMIT", "Patience", "others_share"]

LIMIT = 0.05
"""A step is disturbed if other programs had more than this share of the cores."""
_LOOK_S = 0.5


class Usage(NamedTuple):
    """Processor time so far.

    Args:
        time_s: By a clock.
        all_s: Seconds of all programs on all cores.
        own_s: Of this process.
    """

    time_s: float
    all_s: float
    own_s: float

    @classmethod
    def now(cls) -> Usage:
        """Look at the clocks."""
        times = psutil.cpu_times()
        # What the kernel does for messages counts for nobody.
        busy = times.user + times.nice + times.system
        return cls(time.perf_counter(), busy, time.process_time())


def others_share(before: Usage, after: Usage, own_s: float, cores: int) -> float:
    """Return which share of a machine's cores programs other than the ranks had.

    Args:
        before: At the beginning.
        after: At the end.
        own_s: Seconds of all ranks in between.
        cores: Of the machine.
    """
    seconds = after.time_s - before.time_s
    return max(0.0, after.all_s - before.all_s - own_s) / (seconds * cores)


class Patience:
    """Tells steps that other programs have disturbed, so that they are measured again.

    All ranks must be on one machine, and call together.

    Args:
        seconds: After so many in all, disturbed steps count as they are.

    Attributes:
        repeated: Steps that were disturbed and did not count.
        disturbed: Those that did count.
    """

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._cores = psutil.cpu_count() or 1
        self.repeated = 0
        self.disturbed = 0

    def begin(self) -> None:
        """Begin to watch."""
        self._before = Usage.now()

    def accepts(self) -> bool:
        """Say whether what ran since `begin` counts; if not, wait for a better time."""
        after = Usage.now()
        own = torch.tensor(after.own_s - self._before.own_s, dtype=torch.float64)
        dist.all_reduce(own)
        disturbed = others_share(self._before, after, float(own), self._cores) > LIMIT
        late = time.monotonic() > self._deadline
        verdict = torch.tensor([disturbed, late], dtype=torch.int32)
        dist.all_reduce(verdict, op=dist.ReduceOp.MAX)
        disturbed, late = verdict.bool().tolist()
        if not disturbed:
            return True
        if late:
            self.disturbed += 1
            return True
        self.repeated += 1
        self._wait()
        return False

    def _wait(self) -> None:
        """Wait until the machine is idle."""
        if dist.get_rank() == 0:
            while time.monotonic() < self._deadline:
                before = Usage.now()
                time.sleep(_LOOK_S)
                after = Usage.now()
                if others_share(before, after, 0.0, self._cores) <= LIMIT:
                    break
        dist.barrier()
