# SPDX-License-Identifier: Apache-2.0
"""Ranks agree in a store on the name of the group that they open together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from uuid import uuid4

from torch.distributed.distributed_c10d import Store

from wavemare.comm.waits import waiting
from wavemare.errors import CommError

__all__ = ["agree_on_name"]

_KEY = "wavemare-attempt"
_PAUSE_S = 0.01


@waiting("the other ranks, to agree on a name")
def agree_on_name(store: Store, rank: int, ranks: Sequence[int], timeout: timedelta) -> str:
    """Return a new name that these ranks share, whatever earlier attempts have left.

    A collective would not do: a rank that calls it alone breaks the group for the attempts that
    follow. Each rank writes a word of its own, which the first rank answers with the name; a rank
    that finds its answer acknowledges it. Words of earlier attempts have no reader.

    Args:
        store: The same for all attempts.
        rank: Of this process.
        ranks: All ranks of the group, the same everywhere.
        timeout: Time to wait for the other ranks.

    Raises:
        CommError: Some ranks have not called in this time.
    """
    own = uuid4().hex
    deadline = time.monotonic() + timeout.total_seconds()

    def pause(missing: list[int]) -> None:
        if time.monotonic() > deadline:
            reason = f"they have not come in {timeout.total_seconds():g} s"
            raise CommError("ranks", missing, reason, "Look at what they have printed")
        time.sleep(_PAUSE_S)

    if rank != ranks[0]:
        store.set(f"{_KEY}/hello/{rank}", own)
        while not store.check([f"{_KEY}/answer/{own}"]):
            pause([ranks[0]])
        name = store.get(f"{_KEY}/answer/{own}").decode()
        store.set(f"{_KEY}/heard/{name}/{rank}", "")
        return name
    missing = set(ranks[1:])
    while missing:
        for other in sorted(missing):
            hello = f"{_KEY}/hello/{other}"
            if store.check([f"{_KEY}/heard/{own}/{other}"]):
                missing.discard(other)
            elif store.check([hello]):
                store.set(f"{_KEY}/answer/{store.get(hello).decode()}", own)
        if missing:
            pause(sorted(missing))
    return own
