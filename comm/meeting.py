# SPDX-License-Identifier: Apache-2.0
"""How ranks that meet in a store know that they mean the same meeting."""

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

    Each rank says hello with a word of its own, to which the first answers; one that finds its
    answer says so. What ended ranks have written has no reader: nobody waits for an answer to their
    words. An attempt of which some ranks knew nothing does no harm either.

    Args:
        store: Of all attempts.
        rank: Of this process.
        ranks: All that take part, the same everywhere.
        timeout: How long to wait for the others.

    Raises:
        CommError: Some have not come by then.
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
