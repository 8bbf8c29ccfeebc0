# SPDX-License-Identifier: Apache-2.0
"""The order of ranks, their mesh, and an ``mpu`` for Megatron's dialect and DeepSpeed's."""

from types import SimpleNamespace

import pytest
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import distributed as dist

from support.refusals import refuses
from wavemare.errors import ConfigError
from wavemare.parallel import ProcessGrid, process_grid, rank_lists

SHAPES = [(1, 1, 1), (2, 1, 3), (2, 3, 2), (1, 4, 2), (4, 2, 1), (3, 2, 4)]


@pytest.mark.parametrize(("tensor", "pipeline", "data"), SHAPES)
def test_the_order_is_deepspeeds(tensor, pipeline, data):
    topology = PipeModelDataParallelTopology(num_pp=pipeline, num_mp=tensor, num_dp=data)
    found = rank_lists(tensor * pipeline * data, tensor=tensor, pipeline=pipeline)
    for ours, theirs in (("tensor", "model"), ("pipeline", "pipe"), ("data", "data")):
        expected = topology.get_axis_comm_lists(theirs)
        # An axis of one has no groups there.
        assert sorted(found[ours]) == sorted(expected or [[r] for r in range(len(found[ours]))])


def test_replicas_that_step_alone_have_such_a_grid_each():
    alone, both = (rank_lists(n, tensor=2, pipeline=2, replicas=n // 8) for n in (8, 16))
    for axis in ("tensor", "pipeline", "data", "model"):
        assert both[axis] == [[8 * r + n for n in ranks] for r in (0, 1) for ranks in alone[axis]]
    assert both["replicas"] == [[rank, 8 + rank] for rank in range(8)]


@pytest.mark.parametrize("rank", range(12))
def test_both_dialects(rank, as_rank):
    with as_rank(rank, 12):
        grid = ProcessGrid.of(tensor=2, pipeline=3)
        tensor, data, stage = rank % 2, rank // 2 % 2, rank // 4
        assert grid.get_tensor_model_parallel_rank() == grid.get_slice_parallel_rank() == tensor
        assert grid.get_tensor_model_parallel_world_size() == 2
        assert grid.get_slice_parallel_world_size() == 2
        assert grid.get_tensor_model_parallel_src_rank() == rank - tensor
        assert grid.get_data_parallel_rank() == grid.get_data_parallel_id() == data
        assert grid.get_data_parallel_rank(with_context_parallel=True) == data
        assert grid.get_data_parallel_world_size() == 2
        assert grid.get_data_parallel_group_ranks() == [rank - 2 * data, rank - 2 * data + 2]
        assert grid.get_data_parallel_src_rank() == rank - 2 * data
        assert grid.get_pipeline_model_parallel_rank() == grid.get_pipe_parallel_rank() == stage
        assert grid.get_stage_id() == stage
        assert grid.get_pipeline_model_parallel_world_size() == 3
        assert grid.get_pipe_parallel_world_size() == 3
        assert grid.get_pipeline_model_parallel_first_rank() == rank % 4
        assert grid.is_pipeline_first_stage() == (stage == 0)
        assert grid.is_pipeline_last_stage() == (stage == 2)
        assert grid.get_model_parallel_rank() == 2 * stage + tensor
        assert grid.get_model_parallel_world_size() == 6
        assert grid.get_model_parallel_src_rank() == 2 * data
        assert grid.get_global_rank() == rank
        assert grid.get_pipe_parallel_group() is grid.get_pipeline_model_parallel_group()
        assert grid.get_slice_parallel_group() is grid.get_tensor_model_parallel_group()
        model = dist.get_process_group_ranks(grid.get_model_parallel_group())
        assert model == [4 * s + 2 * data + t for s in range(3) for t in range(2)]
        assert process_grid(grid) is grid


def megatron(grid, **changes):
    """What Megatron's parallel_state of today has: no get_model_parallel_rank, for one."""
    names = (
        "get_tensor_model_parallel_group",
        "get_pipeline_model_parallel_group",
        "get_data_parallel_group",
        "get_model_parallel_group",
        "get_tensor_model_parallel_rank",
        "get_data_parallel_world_size",
        "get_context_parallel_world_size",
    )
    return SimpleNamespace(**{name: getattr(grid, name) for name in names} | changes)


def answers(grid):
    axes = (grid.tensor, grid.pipeline, grid.data, grid.model)
    return [axis.ranks for axis in axes]


@pytest.mark.parametrize("rank", [0, 5])
def test_megatrons_module_is_taken(rank, as_rank):
    with as_rank(rank, 8):
        grid = ProcessGrid.of(tensor=2, pipeline=2)
        taken = process_grid(megatron(grid))
        assert answers(taken) == answers(grid)
        assert taken.get_data_parallel_group() is grid.get_data_parallel_group()


def test_an_object_of_megatrons_first_years(as_rank):
    with as_rank(5, 8):
        mesh = ProcessGrid.of(tensor=4)
        old = SimpleNamespace(
            get_model_parallel_group=mesh.get_model_parallel_group,
            get_data_parallel_group=mesh.get_data_parallel_group,
        )
        taken = process_grid(old)
        assert taken.tensor.ranks == taken.model.ranks == (4, 5, 6, 7)
        assert taken.data.ranks == (1, 5)
        assert taken.pipeline.ranks == (5,)
        assert dist.get_process_group_ranks(taken.get_pipeline_model_parallel_group()) == [5]


def test_refusals(as_rank):
    with as_rank(0, 8):
        grid = ProcessGrid.of(tensor=2, pipeline=2)
        with refuses(ConfigError, "mpu", "SimpleNamespace"):
            process_grid(megatron(grid, get_context_parallel_world_size=lambda: 4))
        with refuses(ConfigError, "mpu", "SimpleNamespace"):
            process_grid(megatron(grid, get_expert_model_parallel_world_size=lambda: 2))
        small = grid.get_tensor_model_parallel_group
        with refuses(ConfigError, "mpu", "SimpleNamespace"):
            process_grid(
                SimpleNamespace(get_model_parallel_group=small, get_data_parallel_group=small)
            )
        with refuses(ConfigError, "mpu", "SimpleNamespace"):
            process_grid(SimpleNamespace(get_model_parallel_group=small))
        with refuses(ConfigError, "mpu", 3):
            ProcessGrid.of(tensor=3)
        sequence = SimpleNamespace(get_sequence_parallel_world_size=lambda: 2)
        assert process_grid(sequence) is sequence


@pytest.mark.parametrize("size", [0, -1, 4, 5, 12])
def test_a_number_of_ranks_that_does_not_divide_is_refused_with_those_that_do(size, as_rank):
    with as_rank(0, 6), refuses(ConfigError, "mpu", size) as error:
        ProcessGrid.of(tensor=size)
    assert (error.value.key, error.value.value) == ("mpu", size)
