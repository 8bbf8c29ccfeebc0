# SPDX-License-Identifier: Apache-2.0
"""Ranks as a grid of models and of the places in them."""

import pytest
from torch import distributed as dist

from wavemare.errors import ConfigError
from wavemare.parallel import TensorMesh


@pytest.mark.parametrize("rank", range(6))
def test_consecutive_ranks_share_a_model(rank, as_rank):
    with as_rank(rank, 6):
        mesh = TensorMesh(2)
        first = rank // 2 * 2
        assert mesh.get_model_parallel_rank() == mesh.get_tensor_model_parallel_rank() == rank % 2
        assert mesh.get_model_parallel_world_size() == 2
        assert mesh.get_tensor_model_parallel_world_size() == 2
        assert mesh.get_tensor_model_parallel_src_rank() == first
        assert mesh.get_data_parallel_rank() == rank // 2
        assert mesh.get_data_parallel_world_size() == 3
        assert mesh.get_data_parallel_group_ranks() == [rank % 2, rank % 2 + 2, rank % 2 + 4]
        model = mesh.get_model_parallel_group()
        assert model is mesh.get_tensor_model_parallel_group()
        assert dist.get_process_group_ranks(model) == [first, first + 1]
        data = mesh.get_data_parallel_group()
        assert dist.get_process_group_ranks(data) == mesh.get_data_parallel_group_ranks()


@pytest.mark.parametrize("size", [0, -1, 4, 5, 12])
def test_a_number_of_ranks_that_does_not_divide_is_refused_with_those_that_do(size, as_rank):
    with as_rank(0, 6), pytest.raises(ConfigError, match=r"6 ranks.*one of 1, 2, 3, 6") as error:
        TensorMesh(size)
    assert (error.value.key, error.value.value) == ("tensor_parallel", size)
