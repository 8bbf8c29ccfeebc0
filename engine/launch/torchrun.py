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
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from wavemare.comm.meeting import agree_on_name

__all__ = ["init_method"]

_SCHEME = "wavemare-attempt"


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
    name = agree_on_name(store, rank, range(size), timeout)
    yield PrefixStore(name, store), rank, size
