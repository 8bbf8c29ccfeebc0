# SPDX-License-Identifier: Apache-2.0
"""Who shares what with whom, in the words of Megatron-LM and of DeepSpeed alike.

Both call it ``mpu`` and ask it for groups, ranks and sizes, by other names. `ProcessGrid` answers
to all of them; `process_grid` makes one of whatever a script brings. The order of ranks is
Megatron's ``tp-cp-ep-dp-pp`` and DeepSpeed's ``PipeModelDataParallelTopology``, which agree: ranks
that share tensors are neighbours, then come replicas, and stages are the farthest apart.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import distributed as dist

from wavemare.engine.config.resolve import WavemareConfig
from wavemare.engine.config.sections import LocalStepsConfig
from wavemare.engine.launch.environment import REPLICA
from wavemare.errors import ConfigError, LaunchError


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
        """Their number."""
        return len(self.ranks)

    @property
    def first(self) -> int:
        """The global rank of the first of them."""
        return self.ranks[0]


@dataclass(frozen=True)
class JobAxis(Axis):
    """Replicas that are jobs of their own: no process group holds them.

    Attributes:
        place: Of this job among them.
        count: Their number when all are present.
    """

    place: int
    count: int

    @property
    def rank(self) -> int:
        """This job's place among them."""
        return self.place

    @property
    def size(self) -> int:
        """Their number when all are present."""
        return self.count


def _read(find: Callable[[ProcessGrid], Any]) -> Callable[..., Any]:
    """Return a method that finds something in a grid, whatever flags it is given."""

    def read(self: ProcessGrid, *_: Any, **__: Any) -> Any:
        return find(self)

    return read


def rank_lists(
    world_size: int, *, tensor: int = 1, pipeline: int = 1, replicas: int = 1
) -> dict[str, list[list[int]]]:
    """Return the ranks of every group, by axis: tensor, pipeline, data, model and replicas.

    Args:
        world_size: All processes.
        tensor: Ranks that share each layer.
        pipeline: Stages.
        replicas: That step alone, each of consecutive ranks, in which all other axes end.

    Raises:
        ConfigError: The processes cannot be divided so.
    """
    size = world_size // replicas
    if replicas > 1:
        inner = rank_lists(size, tensor=tensor, pipeline=pipeline)
        found = {
            axis: [
                [first + r for r in ranks]
                for first in range(0, world_size, size)
                for ranks in lists
            ]
            for axis, lists in inner.items()
        }
        return {**found, "replicas": [list(range(r, world_size, size)) for r in range(size)]}
    if tensor < 1 or pipeline < 1 or world_size % (tensor * pipeline):
        divisors = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        reason = f"{world_size} ranks cannot be cut into models of {tensor} x {pipeline}"
        remedy = f"Give one of {divisors}, or start more ranks"
        raise ConfigError("mpu", tensor * pipeline, reason, remedy)
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
        "replicas": [[rank] for rank in range(world_size)],
    }


class ProcessGrid:
    """An ``mpu`` in both dialects.

    Args:
        tensor: Those that share this one's layers.
        pipeline: The stages of its model at its place.
        data: Those that hold the same weights.
        model: All that hold its model.
        replicas: With ``local_steps``, the ranks at its place in all replicas; else None.
    """

    def __init__(
        self,
        *,
        tensor: Axis,
        pipeline: Axis,
        data: Axis,
        model: Axis,
        replicas: Axis | None = None,
    ) -> None:
        self.tensor = tensor
        self.pipeline = pipeline
        self.data = data
        self.model = model
        self.replicas = replicas

    @classmethod
    def of(cls, *, tensor: int = 1, pipeline: int = 1, replicas: int = 1) -> ProcessGrid:
        """Make the groups; all ranks do so together, after ``torch.distributed`` is initialized.

        Args:
            tensor: Number of consecutive ranks that share each layer.
            pipeline: Number of stages.
            replicas: Of local steps, in which the other axes end; `replicas_axis` makes their own.

        Raises:
            ConfigError: The processes cannot be divided so.
        """
        sizes = {"tensor": tensor, "pipeline": pipeline, "replicas": replicas}
        lists = rank_lists(dist.get_world_size(), **sizes)
        axes = {name: own_axis(lists[name]) for name in ("tensor", "pipeline", "data")}
        model = own_axis(lists["model"]) if pipeline > 1 else axes["tensor"]
        return cls(**axes, model=model)

    # Megatron's names. Its flags count context-parallel ranks, of which there are none.
    get_tensor_model_parallel_group = _read(attrgetter("tensor.group"))
    get_tensor_model_parallel_rank = _read(attrgetter("tensor.rank"))
    get_tensor_model_parallel_world_size = _read(attrgetter("tensor.size"))
    get_tensor_model_parallel_src_rank = _read(attrgetter("tensor.first"))
    get_pipeline_model_parallel_group = _read(attrgetter("pipeline.group"))
    get_pipeline_model_parallel_rank = _read(attrgetter("pipeline.rank"))
    get_pipeline_model_parallel_world_size = _read(attrgetter("pipeline.size"))
    get_pipeline_model_parallel_first_rank = _read(attrgetter("pipeline.first"))
    get_data_parallel_group = _read(attrgetter("data.group"))
    get_data_parallel_rank = _read(attrgetter("data.rank"))
    get_data_parallel_world_size = _read(attrgetter("data.size"))
    get_data_parallel_src_rank = _read(attrgetter("data.first"))
    get_data_parallel_group_ranks = _read(lambda grid: list(grid.data.ranks))
    get_model_parallel_group = _read(attrgetter("model.group"))
    get_model_parallel_src_rank = _read(attrgetter("model.first"))
    model_parallel_is_initialized = _read(lambda grid: True)
    is_pipeline_first_stage = _read(lambda grid: grid.pipeline.rank == 0)
    is_pipeline_last_stage = _read(lambda grid: grid.pipeline.rank == grid.pipeline.size - 1)
    get_context_parallel_world_size = _read(lambda grid: 1)  # sequences are not cut
    get_context_parallel_rank = _read(lambda grid: 0)

    # DeepSpeed's names.
    get_model_parallel_rank = _read(attrgetter("model.rank"))
    get_model_parallel_world_size = _read(attrgetter("model.size"))
    get_data_parallel_id = get_data_parallel_rank
    get_stage_id = get_pipeline_model_parallel_rank
    get_pipe_parallel_rank = get_pipeline_model_parallel_rank
    get_pipe_parallel_world_size = get_pipeline_model_parallel_world_size
    get_pipe_parallel_group = get_pipeline_model_parallel_group
    get_slice_parallel_rank = get_tensor_model_parallel_rank
    get_slice_parallel_world_size = get_tensor_model_parallel_world_size
    get_slice_parallel_group = get_tensor_model_parallel_group
    get_global_rank = _read(lambda grid: dist.get_rank())


def replicas_axis(config: LocalStepsConfig, count: int) -> Axis:
    """Return the ranks at this one's place in all replicas; all ranks make the groups together.

    Args:
        config: The section.
        count: Replicas of this job; 1 if each is a job of its own.
    """
    if config.elastic.replicas:
        jobs = config.elastic.replicas
        return JobAxis(None, (dist.get_rank(),), replica_number(jobs), jobs)
    return own_axis(rank_lists(dist.get_world_size(), replicas=count)["replicas"])


def count_replicas(ours: WavemareConfig, hosts: Sequence[str]) -> int:
    """Return how many replicas the ranks of this job form: 1 if each is a job of its own.

    Args:
        ours: The section ``wavemare``.
        hosts: The host of each rank.

    Raises:
        ConfigError: Hosts are unequal, there is but one replica, or a model does not fit into one.
    """
    local, models, experts = ours.local_steps, ours.model_ranks, ours.expert_parallel.size
    if local.mode == "off" or local.elastic.replicas:
        return 1
    key, size = "wavemare.local_steps.replica", _replica_size(local, hosts)
    share = math.lcm(models, ours.pipeline.stages * experts)
    if size % share:
        reason = (
            f"a replica of {size} ranks does not hold whole models, of which each needs {share}"
        )
        remedy = f"Give a multiple of {share}, and start as many ranks for each replica"
        raise ConfigError(key, local.replica, reason, remedy)
    return len(hosts) // size


def _replica_size(config: LocalStepsConfig, hosts: Sequence[str]) -> int:
    """Return how many consecutive ranks form a replica."""
    key, ranks, size = "wavemare.local_steps.replica", len(hosts), config.replica
    if size == "rank":
        size = 1
    elif size == "host":
        size = hosts.count(hosts[0])
        blocks = [set(hosts[first : first + size]) for first in range(0, ranks, size)]
        if ranks % size or any(len(block) > 1 for block in blocks) or len(set(hosts)) < len(blocks):
            each = ", ".join(f"{hosts.count(host)} on {host}" for host in dict.fromkeys(hosts))
            reason = f"the hosts have unequal or mixed ranks: {each}"
            remedy = "Start as many consecutive ranks on each host, or give a number"
            raise ConfigError(key, config.replica, reason, remedy)
    if ranks % size:
        reason = f"the number of processes ({ranks}) is not a multiple of it"
        raise ConfigError(key, config.replica, reason, f"Start a multiple of {size} processes")
    if ranks == size:
        reason = f"all {ranks} ranks would be one replica, with none to exchange with"
        remedy = 'Give "rank" or a number, start more, or set wavemare.local_steps.mode to "off"'
        raise ConfigError(key, config.replica, reason, remedy)
    return size


def replica_number(count: int) -> int:
    """Return which replica this job is, by the variable ``WAVEMARE_REPLICA``.

    Args:
        count: Number of replicas.

    Raises:
        LaunchError: It is not set, or no number from 0 to ``count`` - 1.
    """
    given = os.environ.get(REPLICA, "")
    if not (given.isascii() and given.isdecimal() and int(given[:9]) < count):
        reason = f"each of the {count} replicas is a job with a number of its own, from 0"
        remedy = f"Start with wavemare launch --replicas, or export {REPLICA}=N"
        raise LaunchError(REPLICA, given or None, reason, remedy)
    return int(given)


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
    if isinstance(mpu, ProcessGrid) or is_sequence_parallel(mpu):
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


def is_sequence_parallel(mpu: Any) -> bool:
    """Whether an ``mpu`` is that of DeepSpeed's sequence parallelism (Ulysses)."""
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
