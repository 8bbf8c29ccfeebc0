# SPDX-License-Identifier: Apache-2.0
"""Who shares what with whom, in the words of Megatron-LM and of DeepSpeed alike.

Both call it ``mpu`` and ask it for groups, ranks and sizes, by other names. `ProcessGrid` answers
to all of them; `process_grid` makes one of whatever a script brings. The order of ranks is
Megatron's ``tp-cp-ep-dp-pp`` and DeepSpeed's ``PipeModelDataParallelTopology``, which agree: ranks
that share tensors are neighbours, then come replicas, and stages are the farthest apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import distributed as dist

from wavemare.errors import ConfigError

__all__ = ["Axis", "ProcessGrid", "TensorMesh", "process_grid", "rank_lists", "same_grid"]


@dataclass(frozen=True)
class Axis:
    """The processes with which this one shares something.

    Attributes:
        group: Their process group.
        ranks: Their global ranks, in order, this one among them.
    """

    group: Any
    ranks: tuple[int, ...]

    @property
    def rank(self) -> int:
        """This process's place among them."""
        return self.ranks.index(dist.get_rank())

    @property
    def size(self) -> int:
        """How many they are."""
        return len(self.ranks)


def rank_lists(
    world_size: int, *, tensor: int = 1, pipeline: int = 1
) -> dict[str, list[list[int]]]:
    """Return the ranks of every group, by axis: tensor, pipeline, data and model.

    Args:
        world_size: All processes.
        tensor: Ranks that share each layer.
        pipeline: Stages.

    Raises:
        ConfigError: The processes cannot be divided so.
    """
    if tensor < 1 or pipeline < 1 or world_size % (tensor * pipeline):
        reason = f"{world_size} ranks cannot be cut into models of {tensor} x {pipeline}"
        raise ConfigError("mpu", tensor * pipeline, reason, "Give a divisor, or start more ranks")
    stage = world_size // pipeline
    return {
        "tensor": [list(range(r, r + tensor)) for r in range(0, world_size, tensor)],
        "pipeline": [list(range(r, world_size, stage)) for r in range(stage)],
        "data": [
            list(range(first + r, first + stage, tensor))
            for first in range(0, world_size, stage)
            for r in range(tensor)
        ],
        "model": [
            [first + r + t for first in range(0, world_size, stage) for t in range(tensor)]
            for r in range(0, stage, tensor)
        ],
    }


class ProcessGrid:
    """An ``mpu`` in both dialects.

    Args:
        tensor: Those that share this one's layers.
        pipeline: The stages of its model at its place.
        data: Those that hold the same weights.
        model: All that hold its model.
    """

    def __init__(self, *, tensor: Axis, pipeline: Axis, data: Axis, model: Axis) -> None:
        self.tensor = tensor
        self.pipeline = pipeline
        self.data = data
        self.model = model

    @classmethod
    def of(cls, *, tensor: int = 1, pipeline: int = 1) -> ProcessGrid:
        """Make the groups; all ranks do so together, after ``torch.distributed`` is initialized.

        Raises:
            ConfigError: The processes cannot be divided so.
        """
        lists = rank_lists(dist.get_world_size(), tensor=tensor, pipeline=pipeline)
        return cls(**{name: own_axis(groups) for name, groups in lists.items()})

    # Megatron's dialect. Its functions take whether context-parallel ranks count; there are none.

    def model_parallel_is_initialized(self) -> bool:
        """Whether there are groups."""
        return True

    def get_tensor_model_parallel_group(self, check_initialized: bool = True) -> Any:
        """Return the group of ranks that share this rank's layers."""
        return self.tensor.group

    def get_tensor_model_parallel_rank(self) -> int:
        """Return this rank's place among them."""
        return self.tensor.rank

    def get_tensor_model_parallel_world_size(self) -> int:
        """Return how many they are."""
        return self.tensor.size

    def get_tensor_model_parallel_src_rank(self) -> int:
        """Return the global rank of the first of them."""
        return self.tensor.ranks[0]

    def get_pipeline_model_parallel_group(self, check_initialized: bool = True) -> Any:
        """Return the group of the stages."""
        return self.pipeline.group

    def get_pipeline_model_parallel_rank(self) -> int:
        """Return this rank's stage."""
        return self.pipeline.rank

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Return the number of stages."""
        return self.pipeline.size

    def get_pipeline_model_parallel_first_rank(self) -> int:
        """Return the global rank of the first stage."""
        return self.pipeline.ranks[0]

    def get_pipeline_model_parallel_last_rank(self) -> int:
        """Return the global rank of the last stage."""
        return self.pipeline.ranks[-1]

    def get_pipeline_model_parallel_next_rank(self) -> int:
        """Return the global rank of the next stage, after the last one the first."""
        return self.pipeline.ranks[(self.pipeline.rank + 1) % self.pipeline.size]

    def get_pipeline_model_parallel_prev_rank(self) -> int:
        """Return the global rank of the stage before, before the first one the last."""
        return self.pipeline.ranks[self.pipeline.rank - 1]

    def is_pipeline_first_stage(self, ignore_virtual: bool = True) -> bool:
        """Whether this rank embeds."""
        return self.pipeline.rank == 0

    def is_pipeline_last_stage(self, ignore_virtual: bool = True) -> bool:
        """Whether this rank has the loss."""
        return self.pipeline.rank == self.pipeline.size - 1

    def get_data_parallel_group(self, with_context_parallel: bool = False) -> Any:
        """Return the group of ranks that hold the same weights."""
        return self.data.group

    def get_data_parallel_rank(self, with_context_parallel: bool = False) -> int:
        """Return this rank's place among them."""
        return self.data.rank

    def get_data_parallel_world_size(self, with_context_parallel: bool = False) -> int:
        """Return the number of replicas."""
        return self.data.size

    def get_data_parallel_src_rank(self, with_context_parallel: bool = False) -> int:
        """Return the global rank of the first replica."""
        return self.data.ranks[0]

    def get_context_parallel_world_size(self) -> int:
        """Return 1: sequences are not cut."""
        return 1

    def get_context_parallel_rank(self) -> int:
        """Return 0."""
        return 0

    def get_model_parallel_group(self, check_initialized: bool = True) -> Any:
        """Return the group of all ranks that hold this rank's model."""
        return self.model.group

    def get_model_parallel_src_rank(self) -> int:
        """Return the global rank of the first of them."""
        return self.model.ranks[0]

    # DeepSpeed's dialect, where it differs.

    def get_model_parallel_rank(self) -> int:
        """Return this rank's place in its model."""
        return self.model.rank

    def get_model_parallel_world_size(self) -> int:
        """Return the number of ranks to a model."""
        return self.model.size

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Return the global ranks of the replicas."""
        return list(self.data.ranks)

    def get_global_rank(self) -> int:
        """Return this process's rank among all."""
        return dist.get_rank()

    get_data_parallel_id = get_data_parallel_rank
    get_stage_id = get_pipeline_model_parallel_rank
    get_pipe_parallel_rank = get_pipeline_model_parallel_rank
    get_pipe_parallel_world_size = get_pipeline_model_parallel_world_size
    get_pipe_parallel_group = get_pipeline_model_parallel_group
    get_slice_parallel_rank = get_tensor_model_parallel_rank
    get_slice_parallel_world_size = get_tensor_model_parallel_world_size
    get_slice_parallel_group = get_tensor_model_parallel_group


def own_axis(groups: list[list[int]]) -> Axis:
    """Make groups, in which every rank takes part in the same order, and return this rank's."""
    made = [(ranks, dist.new_group(ranks)) for ranks in groups]
    ranks, group = next(pair for pair in made if dist.get_rank() in pair[0])
    return Axis(group, tuple(ranks))


def process_grid(mpu: Any) -> Any:
    """Return an ``mpu`` that answers in both dialects.

    Args:
        mpu: Megatron's ``parallel_state`` (the module, or an object with its functions),
            DeepSpeed's grid, an object of Megatron's first years (``get_model_parallel_group`` and
            ``get_data_parallel_group``), or a `ProcessGrid`, which is returned as it is. So is an
            mpu of DeepSpeed's sequence parallelism, whose groups are others.

    Raises:
        ConfigError: It has no groups, cuts sequences or experts, or does not cover all processes.
    """
    if isinstance(mpu, ProcessGrid) or _is_sequence_parallel(mpu):
        return mpu
    for name in ("context_parallel", "expert_model_parallel"):
        size = _ask(mpu, f"get_{name}_world_size")
        if size is not None and size() > 1:
            reason = f"it has {size()} ranks of {name.replace('_', ' ')}, which our engines lack"
            raise ConfigError(
                "mpu", _name(mpu), reason, "Use tensor, pipeline and data parallelism"
            )
    data, model = (_group(mpu, f"get_{name}_parallel_group") for name in ("data", "model"))
    staged = _ask(mpu, "get_pipeline_model_parallel_group", "get_pipe_parallel_group")
    # In the first years there were no stages, and what is split are tensors.
    tensor = _ask(mpu, "get_tensor_model_parallel_group", "get_slice_parallel_group")
    everyone = [[rank] for rank in range(dist.get_world_size())]
    grid = ProcessGrid(
        tensor=_axis(tensor()) if tensor else model,
        pipeline=_axis(staged()) if staged else own_axis(everyone),
        data=data,
        model=model,
    )
    sizes = grid.tensor.size, grid.pipeline.size, grid.data.size
    covered = sizes[0] * sizes[1] * sizes[2]
    if covered != dist.get_world_size() or sizes[0] * sizes[1] != grid.model.size:
        reason = (
            f"{sizes[0]} tensor ranks x {sizes[1]} stages x {sizes[2]} replicas do not make "
            f"{dist.get_world_size()} processes, {grid.model.size} to a model"
        )
        raise ConfigError("mpu", _name(mpu), reason, "Initialize it for these processes")
    return grid


def same_grid(mpu: Any, grid: Any) -> None:
    """Check that an ``mpu`` and the grid of a pipeline put this rank in the same place.

    Raises:
        ConfigError: They do not.
    """
    own, built = process_grid(mpu), process_grid(grid)
    for name in ("tensor", "pipeline", "data"):
        found, expected = getattr(own, name).ranks, getattr(built, name).ranks
        if found != expected:
            reason = (
                f"rank {dist.get_rank()} is among the {name} ranks {list(found)} by it, and "
                f"{list(expected)} by the pipeline"
            )
            raise ConfigError("mpu", _name(mpu), reason, "Leave it out, or build both alike")


def _is_sequence_parallel(mpu: Any) -> bool:
    return hasattr(mpu, "initialize_sequence_parallel") or (
        hasattr(mpu, "get_sequence_parallel_world_size")
        and not hasattr(mpu, "get_data_parallel_group")
    )


def _ask(mpu: Any, *names: str) -> Callable[[], Any] | None:
    return next((getattr(mpu, name) for name in names if hasattr(mpu, name)), None)


def _group(mpu: Any, name: str) -> Axis:
    function = _ask(mpu, name)
    if function is None:
        reason = f"it has no {name}"
        remedy = "Give Megatron's parallel_state, DeepSpeed's grid or a ProcessGrid"
        raise ConfigError("mpu", _name(mpu), reason, remedy)
    return _axis(function())


def _axis(group: Any) -> Axis:
    return Axis(group, tuple(dist.get_process_group_ranks(group)))


def _name(mpu: Any) -> str:
    return str(getattr(mpu, "__name__", type(mpu).__name__))


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
