# SPDX-License-Identifier: Apache-2.0
"""Which processes hold one model, before there is an engine."""

import pytest
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from wavemare.engine.config.resolve import WavemareConfig
from wavemare.engine.pipe.replicas import ReplicaTopology
from wavemare.engine.ranks import Ranks


@pytest.mark.parametrize(("stages", "tensor", "data"), [(1, 1, 3), (2, 1, 2), (1, 2, 2), (3, 2, 4)])
def test_the_plan_is_deepspeeds_grid(stages, tensor, data):
    section = {"pipeline": {"stages": stages}, "tensor_parallel": {"size": tensor}}
    ours = WavemareConfig.of({"wavemare": section})
    grid = PipeModelDataParallelTopology(num_pp=stages, num_mp=tensor, num_dp=data)
    for rank in range(stages * tensor * data):
        found = Ranks.planned(ours, rank=rank, world_size=stages * tensor * data)
        place = grid.get_coord(rank)
        assert list(found.model) == sorted(grid.filter_match(data=place.data))
        assert list(found.replicas) == grid.filter_match(pipe=place.pipe, model=place.model)
        assert [found.data_rank, found.data_world_size] == [place.data, data]
        assert found.model_world_size == stages * tensor
        assert found.is_first == (place.pipe == place.model == 0)


@pytest.mark.parametrize(("stages", "tensor", "data"), [(2, 1, 2), (2, 2, 1)])
def test_the_plan_of_replicas_is_their_grid(stages, tensor, data):
    section = {"pipeline": {"stages": stages}, "tensor_parallel": {"size": tensor}}
    ours = WavemareConfig.of({"wavemare": section})
    grid = ReplicaTopology(3, stages, data, tensor)
    for rank in range(3 * stages * tensor * data):
        found = Ranks.planned(ours, rank=rank, world_size=3 * stages * tensor * data, count=3)
        place = grid.get_coord(rank)._asdict()
        inner = {name: place[name] for name in ("replica", "data")}
        assert list(found.model) == sorted(grid.filter_match(**inner))
        part = {name: n for name, n in place.items() if name not in inner}
        assert list(found.replicas) == sorted(grid.filter_match(**part))
        assert [found.data_rank, found.data_world_size] == [
            place["replica"] * data + place["data"],
            3 * data,
        ]


def test_jobs_of_replicas_follow_each_other():
    found = [
        Ranks([rank], [0, 1], rank, job=job, jobs=3).data_rank
        for job in range(3)
        for rank in (0, 1)
    ]
    assert found == list(range(6))
    assert Ranks([0], [0, 1], 0, job=1, jobs=3).data_world_size == 6
