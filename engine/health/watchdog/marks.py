# SPDX-License-Identifier: Apache-2.0
"""Time limits of collectives over gloo."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import distributed
from torch.distributed import distributed_c10d

__all__ = ["limit_collectives"]


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
