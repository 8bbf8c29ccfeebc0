# SPDX-License-Identifier: Apache-2.0
"""Losses on validation samples, the same on all ranks."""

from __future__ import annotations

from typing import Any

from wavemare.errors import DataError

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
        if len(samples) < engine.data_world_size:
            reason = (
                f"it gives {len(samples)} held-out samples, fewer than the "
                f"{engine.data_world_size} data ranks"
            )
            raise DataError("--data", len(samples), reason, "Give more text")
        self.engine = engine
        self.samples = samples

    def loss(self, num_samples: int | None = None) -> float:
        """Return the mean loss of samples, spread over the whole set; None for all of them."""
        batches = self.batches(num_samples)
        return float(self.engine.eval_batch(iter(batches), num_micro_batches=len(batches)))

    def batches(self, num_samples: int | None = None) -> list[Any]:
        """Return this rank's micro-batches, equally many on every rank.

        Each rank gets at least one. Samples that do not make a batch for every rank are left out.

        Args:
            num_samples: Samples over all ranks; None for all.
        """
        from wavemare.data.loader import evaluation_batches

        ranks = self.engine.data_world_size
        count = min(max(num_samples or len(self.samples), ranks), len(self.samples))
        # Few samples still give every rank a batch.
        micro = min(self.engine.train_micro_batch_size_per_gpu(), max(count // ranks, 1))
        return list(
            evaluation_batches(
                self.samples,
                micro_batch_size=micro,
                data_rank=self.engine.data_rank,
                data_world_size=ranks,
                limit=count,
            )
        )
