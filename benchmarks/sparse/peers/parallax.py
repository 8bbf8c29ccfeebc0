# SPDX-License-Identifier: Apache-2.0
"""Parallax (EuroSys'19): parameter servers for sparse variables, all-reduce for dense ones.

Every rank is also the server of a range of each sparse variable's rows, as its servers share hosts
with its workers. A worker pushes the rows of its gradient, and pulls the sums of all rows. In the
paper it pulls the variable's rows of its next batch; here the optimizer runs on all ranks.
"""

from __future__ import annotations

from torch import Tensor

from benchmarks.sparse.peers.base import sum_at_ranges
from wavemare.comm.transport import Transport


def parallax(table: Tensor, blocks: Tensor, transport: Transport) -> None:
    """Sum one sparse variable, whose rows are the blocks: sends (N-1)/N (d + u) of it."""
    ids, sums = sum_at_ranges(transport, (blocks, table[blocks]), len(table))
    table[ids] = sums
