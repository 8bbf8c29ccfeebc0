# SPDX-License-Identifier: Apache-2.0
"""The ranks as a grid: some share a model's tensors, others train the same share on other data."""

from __future__ import annotations

from torch import distributed as dist

from wavemare.errors import ConfigError
from wavemare.parallel.grid import ProcessGrid, own_axis, rank_lists

__all__ = ["TensorMesh"]


class TensorMesh(ProcessGrid):
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
        lists = rank_lists(world_size, tensor=tensor_parallel)
        tensor = own_axis(lists["tensor"])
        super().__init__(
            tensor=tensor,
            pipeline=own_axis(lists["pipeline"]),
            data=own_axis(lists["data"]),
            model=tensor,  # split in no other way
        )
