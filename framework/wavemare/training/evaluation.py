# SPDX-License-Identifier: Apache-2.0
"""The loss of validation samples, shared among the data-parallel ranks of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wavemare.data.loader import IndexedDataset, evaluation_batches

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


def evaluation_loader(
    engine: Any, samples: IndexedDataset, limit: int | None = None
) -> DataLoader[Any]:
    """Return this rank's micro-batches of a validation set, equally many on every rank.

    Args:
        engine: Of `wavemare.initialize`.
        samples: The validation set.
        limit: Samples over all ranks at most, spread over the whole set; None for all.

    Raises:
        DataError: The samples are fewer than the data-parallel ranks.
    """
    return evaluation_batches(
        samples,
        engine.train_micro_batch_size_per_gpu(),
        engine.data_rank,
        engine.data_world_size,
        limit,
    )


def evaluate(engine: Any, loader: DataLoader[Any]) -> float:
    """Return the mean loss of an `evaluation_loader`'s samples, the same on all ranks."""
    return float(engine.eval_batch(iter(loader), num_micro_batches=len(loader)))


def count_samples(engine: Any, loader: DataLoader[Any], samples: IndexedDataset) -> dict[str, int]:
    """Return as results how many samples all ranks' loaders hold, and of how many they are."""
    own: Any = loader.dataset
    used = len(own) * int(engine.data_world_size)
    return {"eval samples": used, "held-out samples": len(samples)}
