# SPDX-License-Identifier: Apache-2.0
"""The last word of a rank that ends in good order, for those who wonder where it is."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Farewells"]

logger = logging.getLogger("wavemare")

_KEY = "wavemare/watchdog/farewell"
_STORE_S = 1.0


class Farewells:
    """Kept in the store of the process group; those of the store's own rank are kept here.

    Args:
        store: It may have gone with its rank, or be held by a thread that waits in it.
        token: The job's.
    """

    def __init__(self, store: Any, token: str) -> None:
        self._store = store
        self._prefix = f"{_KEY}/{token}"
        self._heard: dict[int, str] = {}

    def hear(self, rank: int, text: str) -> None:
        """Keep what a rank has said to this one, as the store is going to end with it."""
        self._heard[rank] = text

    def say(self, rank: int, text: str) -> None:
        """Leave this rank's word, if the store takes it within a second."""
        self._ask(lambda: self._store.set(f"{self._prefix}/{rank}", text))

    def of(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return by rank what those have said that have said something."""
        found = {rank: self._heard[rank] for rank in ranks if rank in self._heard}

        def look() -> None:
            for rank in ranks:
                key = f"{self._prefix}/{rank}"
                if rank not in found and self._store.check([key]):
                    found[rank] = self._store.get(key).decode()

        self._ask(look)
        return dict(found)

    @staticmethod
    def _ask(question: Callable[[], object]) -> None:
        def ask() -> None:
            try:
                question()
            except RuntimeError as error:  # torch's store errors: rank 0 has gone already
                logger.debug("the store does not answer: %s", error)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(_STORE_S)
