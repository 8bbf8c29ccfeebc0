# SPDX-License-Identifier: Apache-2.0
"""How ranks ask their parent for a share of a core, by files."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from wavemare.bench.throttle import Throttle
from wavemare.errors import LaunchError
from wavemare.files import atomic_write_text

__all__ = ["ask_for_share", "shares_on_demand"]

_POLL_S = 0.02
_TIMEOUT_S = 60.0
_ASKED, _DONE = "share-asked-{}.json", "share-done-{}.json"


@contextmanager
def shares_on_demand(
    throttle: Throttle, pids: Callable[[], Mapping[int, int]] | None = None
) -> Iterator[Path]:
    """Let ranks choose their own shares by `ask_for_share`.

    Args:
        throttle: Open.
        pids: Returns rank -> process number on this machine, for ranks whose own numbers are
            others; None for ranks that know their numbers.

    Yields:
        The folder that they ask in; it is gone afterwards.
    """
    ended = threading.Event()
    with tempfile.TemporaryDirectory(prefix="wavemare-shares-") as name:
        folder = Path(name)
        thread = threading.Thread(target=_serve, args=(throttle, folder, pids, ended), daemon=True)
        thread.start()
        try:
            yield folder
        finally:
            ended.set()
            thread.join()


def ask_for_share(
    folder: Path, rank: int, share: float | None, timeout_s: float = _TIMEOUT_S
) -> None:
    """Have this process limited.

    Args:
        folder: That of `shares_on_demand`.
        rank: Of this process; no other one asks by it.
        share: Of a core; None for no limit.
        timeout_s: How long to wait for it.

    Raises:
        LaunchError: It was not done in time.
    """
    done = folder / _DONE.format(rank)
    done.unlink(missing_ok=True)
    atomic_write_text(folder / _ASKED.format(rank), json.dumps([os.getpid(), share]))
    deadline = time.monotonic() + timeout_s
    while not done.exists():
        if time.monotonic() > deadline:
            reason = "nobody has limited this rank"
            raise LaunchError("share", share, reason, "Look at the output of the command")
        time.sleep(_POLL_S)


def _serve(
    throttle: Throttle,
    folder: Path,
    pids: Callable[[], Mapping[int, int]] | None,
    ended: threading.Event,
) -> None:
    prefix, suffix = _ASKED.split("{}")
    while not ended.wait(_POLL_S):
        for file in folder.glob(f"{prefix}*{suffix}"):
            rank = int(file.name.removeprefix(prefix).removesuffix(suffix))
            pid, share = json.loads(file.read_text(encoding="utf-8"))
            file.unlink()
            throttle.limit(pid if pids is None else pids()[rank], share)
            atomic_write_text(folder / _DONE.format(rank), "done")
