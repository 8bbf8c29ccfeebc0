# SPDX-License-Identifier: Apache-2.0
"""An endless, shuffled, sharded stream of micro-batches whose position is one integer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

import numpy as np
from numpy.typing import NDArray

from wavemare.errors import CheckpointError, ConfigError, DataError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader, Dataset

_STREAM = 0  # keeps these random numbers apart from those of the masking


class IndexedDataset(Protocol):
    """A dataset of known length; ``at(index, epoch)`` is used instead of indexing if it exists."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class ResumableLoader(Iterator[Any]):
    """Micro-batches of one data rank.

    The stream of samples is one permutation of the dataset after another, one per epoch, each
    determined by seed and epoch. At position ``consumed_samples`` the next micro-batch of rank
    ``r`` holds the ``micro_batch_size`` samples from ``consumed_samples + r * micro_batch_size``
    on, and then all ranks move on together. With ``shares`` each rank has a size of its own, and
    they follow each other in the same way. So a global batch holds the same samples however many
    ranks share it, and a run resumes at the exact sample, also with another number of ranks.

    Args:
        dataset: The samples.
        micro_batch_size: Samples per micro-batch and rank.
        data_rank: Place of this process among those that read different data.
        data_world_size: Number of processes that read different data.
        seed: Determines the permutations.
        shuffle: Whether epochs are permuted; if not, each is in the dataset's order.
        shares: Samples per micro-batch of each rank (``wavemare.balance.shares``), which sum to
            ``micro_batch_size * data_world_size``; None for equal ones.

    Attributes:
        consumed_samples: Position in the stream: samples given out by all ranks together.

    Raises:
        DataError: The dataset is empty.
        ConfigError: A number is out of range.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        *,
        micro_batch_size: int,
        data_rank: int,
        data_world_size: int,
        seed: int,
        shuffle: bool = True,
        shares: Sequence[int] | None = None,
    ) -> None:
        if micro_batch_size < 1:
            reason = "a micro-batch holds one sample or more"
            raise ConfigError("micro_batch_size", micro_batch_size, reason, "Give at least 1")
        if not 0 <= data_rank < data_world_size:
            reason = f"the rank lies outside 0 to {data_world_size - 1}"
            remedy = "Give a rank of the data-parallel group"
            raise ConfigError("data_rank", data_rank, reason, remedy)
        if len(dataset) == 0:
            raise DataError("--data", 0, "the dataset holds no samples", "Give more data")
        self._dataset = dataset
        self._stride = data_world_size * micro_batch_size
        shares = shares or [micro_batch_size] * data_world_size
        if len(shares) != data_world_size or sum(shares) != self._stride or min(shares) < 1:
            reason = f"they are not one or more samples for each of {data_world_size} ranks"
            remedy = f"Give each rank one or more, {self._stride} in all"
            raise ConfigError("shares", list(shares), reason, remedy)
        self._first, self._own = sum(shares[:data_rank]), shares[data_rank]
        self._seed = seed
        self._shuffle = shuffle
        self.consumed_samples = 0
        # A global batch may straddle two epochs.
        self._permutation = lru_cache(maxsize=2)(self._permute)

    @classmethod
    def of(cls, engine: Any, dataset: IndexedDataset, *, seed: int, shuffle: bool = True) -> Self:
        """Return the micro-batches of this rank of an engine; see the class."""
        return cls(
            dataset,
            micro_batch_size=engine.train_micro_batch_size_per_gpu(),
            data_rank=engine.data_rank,
            data_world_size=engine.data_world_size,
            seed=seed,
            shuffle=shuffle,
            shares=engine.settings.balance.shares,
        )

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        from torch.utils.data import default_collate

        start = self.consumed_samples + self._first
        batch = [self._sample(start + i) for i in range(self._own)]
        self.consumed_samples += self._stride
        return default_collate(batch)

    def state_dict(self) -> dict[str, int | bool]:
        """Return the position and what it is relative to."""
        return {
            "consumed_samples": self.consumed_samples,
            "seed": self._seed,
            "num_samples": len(self._dataset),
            "shuffle": self._shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to the position of a checkpoint.

        Raises:
            CheckpointError: The position belongs to another dataset, seed or order.
        """
        for key, own in self.state_dict().items():
            if key not in state:
                reason = "the checkpoint does not hold it"
                raise CheckpointError(f"data.{key}", None, reason, "Use an undamaged checkpoint")
            if key != "consumed_samples" and state[key] != own:
                reason = f"the checkpoint was made with this, the run has {own!r}"
                remedy = "Resume with the same data, sequence length and seed"
                if not self._shuffle:  # Megatron's order depends on all samples of the training
                    remedy += ", and the same --max_steps"
                raise CheckpointError(f"data.{key}", state[key], reason, remedy)
        self.consumed_samples = int(state["consumed_samples"])

    def _sample(self, position: int) -> Any:
        epoch, place = divmod(position, len(self._dataset))
        index = int(self._permutation(epoch)[place])
        at = getattr(self._dataset, "at", None)
        return self._dataset[index] if at is None else at(index, epoch)

    def _permute(self, epoch: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(len(self._dataset))
        sequence = np.random.SeedSequence(self._seed, spawn_key=(_STREAM, epoch))
        return np.random.Generator(np.random.PCG64(sequence)).permutation(len(self._dataset))


def evaluation_batches(
    dataset: IndexedDataset,
    micro_batch_size: int,
    data_rank: int = 0,
    data_world_size: int = 1,
    limit: int | None = None,
) -> DataLoader[Any]:
    """Return a dataset's batches in its order, equally many on all ranks, each read when used.

    All batches are full. The samples at the end that do not fill one batch for every rank are left
    out; nothing is evaluated twice.

    Args:
        dataset: The samples, read by index.
        micro_batch_size: Samples per batch and rank at most; fewer where there are few samples.
        data_rank: Place of this process among those that read different data.
        data_world_size: Number of processes that read different data.
        limit: Samples over all ranks, spread over the whole set, whose documents or classes may be
            in order; each rank reads one at least. None for all.

    Raises:
        DataError: The samples are fewer than the ranks.
    """
    import torch
    from torch.utils.data import DataLoader, Subset

    from wavemare.data.tokens import spread

    size = len(dataset)
    if size < data_world_size:
        reason = f"it gives {size} validation samples, fewer than the {data_world_size} data ranks"
        raise DataError("--data", size, reason, "Give more text")
    count = min(max(size if limit is None else limit, data_world_size), size)
    micro = min(micro_batch_size, count // data_world_size)
    stride = micro * data_world_size

    chosen = spread(size, count)[: count // stride * stride].reshape(-1, data_world_size, micro)
    own: Subset[Any] = Subset(cast("Dataset[Any]", dataset), chosen[:, data_rank].ravel().tolist())
    # With a generator of its own it leaves torch's alone.
    return DataLoader(own, batch_size=micro, generator=torch.Generator())
