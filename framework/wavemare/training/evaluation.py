# SPDX-License-Identifier: Apache-2.0
"""Losses on validation samples, the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wavemare.data.loader import evaluation_batches

__all__ = ["Evaluation"]


class Evaluation:
    """Validation samples, shared among the data-parallel ranks of an engine.

    Args:
        engine: Of `wavemare.initialize`.
        samples: A data set; its items are those of the training.

    Raises:
        DataError: The samples are fewer than the data-parallel ranks.
    """

    def __init__(self, engine: Any, samples: Any) -> None:
        self.engine = engine
        self._samples = samples
        self._iterate(1)  # too few samples are refused before the training

    def loss(self, num_samples: int | None = None) -> float:
        """Return the mean loss of samples, spread over the whole set; None for all of them."""
        batches = self.batches(num_samples)
        return float(self.engine.eval_batch(iter(batches), num_micro_batches=len(batches)))

    def batches(self, num_samples: int | None = None) -> list[Any]:
        """Return this rank's micro-batches, equally many on every rank, at least one.

        Args:
            num_samples: Samples over all ranks; None for all.
        """
        return list(self._iterate(num_samples))

    def _iterate(self, num_samples: int | None) -> Iterator[Any]:
        return evaluation_batches(
            self._samples,
            self.engine.train_micro_batch_size_per_gpu(),
            self.engine.data_rank,
            self.engine.data_world_size,
            num_samples,
        )
