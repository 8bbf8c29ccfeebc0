# SPDX-License-Identifier: Apache-2.0
"""Whether torch's elastic agent restarts this process, and how its attempts are kept apart."""

from __future__ import annotations

import os

from wavemare.errors import LaunchError

__all__ = ["agent_started", "init_attempt", "may_restart"]

_CLOCK_SLACK_S = 1.0
"""By how much the clock of a file system may be behind."""


def may_restart() -> bool:
    """Whether torch's elastic agent (``--max-restarts``) starts the ranks again after a failure."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def agent_started() -> float:
    """Return when the elastic agent started (Unix time): older checkpoints are of another run."""
    import psutil

    return float(psutil.Process(os.getppid()).create_time()) - _CLOCK_SLACK_S


def init_attempt(backend: str) -> None:
    """Initialize ``torch.distributed`` in an attempt under ``torchrun --max-restarts``.

    The agent keeps one store for all attempts. Without a prefix, ranks would read the addresses of
    dead ranks there (https://github.com/pytorch/pytorch/issues/135712).

    Args:
        backend: Such as ``gloo``.

    Raises:
        LaunchError: Several agents share the store, and may count attempts differently.
    """
    from deepspeed.constants import default_pg_timeout as timeout
    from torch.distributed.distributed_c10d import PrefixStore, init_process_group
    from torch.distributed.rendezvous import rendezvous

    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
        raise LaunchError(
            "--max-restarts",
            os.environ["TORCHELASTIC_MAX_RESTARTS"],
            "on several hosts restarted ranks may read the addresses of dead ranks in torchrun's "
            "store",
            "Export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and give torchrun --rdzv-backend c10d",
        )
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    store = PrefixStore(f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
