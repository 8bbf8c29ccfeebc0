# SPDX-License-Identifier: Apache-2.0
"""A store for each attempt of a job that torchrun starts again.

torchrun's agent keeps one store for the first attempt and all later ones, and torch writes the
addresses of the ranks there under the same names each time. A rank that is started again may read
the address of one that has ended, and then fails or waits without end
(https://github.com/pytorch/pytorch/issues/135712). The variable ``TORCHELASTIC_RESTART_COUNT`` is
no remedy: agents of other hosts may count otherwise. So the ranks agree on a name that no earlier
attempt had, and all that torch and we write stands behind it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from typing import Any
from uuid import uuid4

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from wavemare.errors import LaunchError

__all__ = ["agree_on_name", "init_method"]

_SCHEME = "wavemare-attempt"
_PAUSE_S = 0.01


def init_method() -> str | None:
    """Return the way in which the ranks meet, for ``init_process_group``; None for its default."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    _register()
    return f"{_SCHEME}://"


@cache
def _register() -> None:
    register_rendezvous_handler(_SCHEME, _meet)


def _meet(url: str, timeout: timedelta, **options: Any) -> Iterator[tuple[Store, int, int]]:
    store, rank, size = next(rendezvous("env://", timeout=timeout, **options))
    name = agree_on_name(store, rank, size, timeout)
    yield PrefixStore(name, store), rank, size


def agree_on_name(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """Return a new name that the ranks of this attempt share, whatever earlier ones have left.

    Each rank says hello with a word of its own, to which rank 0 answers; one that finds its answer
    says so. What ended ranks have written has no reader: nobody waits for an answer to their words.

    Args:
        store: Of all attempts, where the ranks of earlier ones have ended.
        rank: Of this process.
        size: Number of ranks.
        timeout: How long to wait for the others.

    Raises:
        LaunchError: Some have not come by then.
    """
    own = uuid4().hex
    if rank:
        store.set(f"{_SCHEME}/hello/{rank}", own)
        name = store.get(f"{_SCHEME}/answer/{own}").decode()
        store.set(f"{_SCHEME}/heard/{name}/{rank}", "")
        return name
    missing = set(range(1, size))
    deadline = time.monotonic() + timeout.total_seconds()
    while missing:
        for other in sorted(missing):
            hello = f"{_SCHEME}/hello/{other}"
            if store.check([f"{_SCHEME}/heard/{own}/{other}"]):
                missing.discard(other)
            elif store.check([hello]):
                store.set(f"{_SCHEME}/answer/{store.get(hello).decode()}", own)
        if missing:
            if time.monotonic() > deadline:
                reason = f"ranks {sorted(missing)} have not come in {timeout.total_seconds():g} s"
                raise LaunchError("launcher", "torchrun", reason, "Look at what they have printed")
            time.sleep(_PAUSE_S)
    return own
