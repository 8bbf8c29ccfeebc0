# SPDX-License-Identifier: Apache-2.0
"""Marks the waits of torch: every collective, DeepSpeed's too, waits in one of these methods.

A mark costs 3 microseconds. With NCCL ``Work.wait`` returns at once, and the host waits for its
device: NCCL's own watchdog ends such a run.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d
from torch.utils.file_baton import FileBaton

from wavemare.comm.waits import waiting

__all__ = ["limit_collectives", "mark_torch"]


def mark_torch() -> None:
    """Mark the waits of torch from now on; a second call does nothing."""
    if not hasattr(distributed.Work.wait, "__wrapped__"):
        _mark(distributed.Work, "wait", _collective)
        _mark(distributed_c10d.Store, "wait", lambda _: "the store of the process group")
        _mark(distributed_c10d.Store, "get", lambda _: "the store of the process group")
        _mark(FileBaton, "wait", _lock)


def limit_collectives(limits: dict[str, timedelta], seconds: float | None) -> None:
    """Let collectives over gloo fail after so many seconds, in all groups.

    Args:
        limits: Keeps the own limit of each group.
        seconds: None for the groups' own limits.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        return
    cpu = torch.device("cpu")
    for group, name in list(distributed_c10d._world.pg_names.items()):
        backend = group._get_backend(cpu) if cpu in group._device_types else None
        if isinstance(backend, distributed_c10d.ProcessGroupGloo):
            own = limits.setdefault(name, backend.options._timeout)
            backend._set_default_timeout(own if seconds is None else timedelta(seconds=seconds))


def _mark(owner: Any, name: str, describe: Callable[[Any], str]) -> None:
    method = getattr(owner, name)

    @functools.wraps(method)
    def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        with waiting(describe(self)):
            return method(self, *args, **kwargs)

    setattr(owner, name, marked)


def _collective(_: Any) -> str:
    caller = sys._getframe(2)  # the caller of `marked`
    of_torch = str(caller.f_globals.get("__name__")).startswith("torch.distributed")
    return caller.f_code.co_name if of_torch else "a message or collective"


def _lock(baton: FileBaton) -> str:
    lock = f"the lock {baton.lock_file_path} of an extension build"
    return f"{lock}; if no build is running, remove that file"
