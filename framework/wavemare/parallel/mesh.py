"""The ranks as a grid: some share a model's tensors, others train the same share on other data."""

from __future__ import annotations

from typing import Any

from torch import distributed as dist

from wavemare.errors import ConfigError

__all__ = ["TensorMesh"]


class TensorMesh:
    """Consecutive ranks share the tensors of a model; ranks at the same place in them share data.

    With 2 ranks to a model, ranks 0 and 1 hold one and ranks 2 and 3 another; 0 and 2 hold the
    same share. It is what DeepSpeed calls an ``mpu``, with the names of Megatron-LM's functions.
    All ranks make it together, after ``torch.distributed`` is initialized.

    Args:
        tensor_parallel: Number of ranks to a model.

    Raises:
        ConfigError: It does not divide the number of ranks.
    """

    def __init__(self, tensor_parallel: int) -> None:
        world_size = dist.get_world_size()
        if tensor_parallel < 1 or world_size % tensor_parallel:
            divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
            raise ConfigError(
                "tensor_parallel",
                tensor_parallel,
                f"{world_size} ranks cannot be cut into groups of that size",
                f"Give one of {', '.join(map(str, divisors))}, or start more ranks",
            )
        rank = dist.get_rank()
        models = [
            list(range(first, first + tensor_parallel))
            for first in range(0, world_size, tensor_parallel)
        ]
        replicas = [list(ranks) for ranks in zip(*models, strict=True)]
        self._model_ranks = next(ranks for ranks in models if rank in ranks)
        self._data_ranks = next(ranks for ranks in replicas if rank in ranks)
        # Every rank takes part in making every group, in the same order.
        self._model_group = _make_groups(models)[models.index(self._model_ranks)]
        self._data_group = _make_groups(replicas)[replicas.index(self._data_ranks)]

    def get_model_parallel_group(self) -> Any:
        """Return the group of ranks that share this rank's model."""
        return self._model_group

    def get_model_parallel_rank(self) -> int:
        """Return this rank's place in its model."""
        return self._model_ranks.index(dist.get_rank())

    def get_model_parallel_world_size(self) -> int:
        """Return the number of ranks to a model."""
        return len(self._model_ranks)

    # DeepSpeed asks for tensor parallelism by these names first. A model here is split in no
    # other way.
    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_tensor_model_parallel_src_rank(self) -> int:
        """Return the global rank of the first rank of this rank's model."""
        return self._model_ranks[0]

    def get_data_parallel_group(self) -> Any:
        """Return the group of ranks that hold the same share of a model."""
        return self._data_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Return the global ranks of the data-parallel group."""
        return list(self._data_ranks)

    def get_data_parallel_rank(self) -> int:
        """Return this rank's place among those that hold the same share."""
        return self._data_ranks.index(dist.get_rank())

    def get_data_parallel_world_size(self) -> int:
        """Return the number of models."""
        return len(self._data_ranks)


def _make_groups(groups: list[list[int]]) -> list[Any]:
    return [dist.new_group(ranks) for ranks in groups]
