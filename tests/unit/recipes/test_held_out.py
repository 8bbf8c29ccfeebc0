# SPDX-License-Identifier: Apache-2.0
"""Which held-out samples the recipes evaluate on."""

from types import SimpleNamespace

import pytest
import torch

from wavemare.data import resolve
from wavemare.data.indexed_writer import IndexedWriter
from wavemare.errors import DataError
from wavemare.recipes.job import Job
from wavemare.recipes.megatron_parts import MegatronParts


def held_out(rank, ranks, num_samples):
    job = SimpleNamespace(
        engine=SimpleNamespace(data_rank=rank, data_world_size=ranks),
        batch={"train_micro_batch_size_per_gpu": 4},
    )
    samples = torch.arange(100)
    batches = Job.held_out_batches(job, samples, num_samples)
    return [int(sample) for batch in batches for sample in batch]


@pytest.mark.parametrize("asked", [1, 2, 3])
def test_fewer_samples_than_ranks_are_one_for_each(asked):
    assert [len(held_out(rank, 3, asked)) for rank in range(3)] == [1, 1, 1]


def test_samples_are_spread_over_the_whole_set():
    assert held_out(0, 1, 4) == [0, 25, 50, 75]
    assert sorted(held_out(0, 2, 8) + held_out(1, 2, 8)) == [0, 12, 25, 37, 50, 62, 75, 87]


def test_data_of_which_nothing_is_held_out_is_refused(tmp_path):
    with IndexedWriter(tmp_path / "few", "u2") as writer:
        for _ in range(10):
            writer.add_sequence([1, 2, 3, 4])
            writer.end_document()
    parts = MegatronParts(resolve(str(tmp_path / "few")), None, 300)
    with pytest.raises(DataError, match="by these shares no document is held out") as caught:
        parts.samples(sequence_length=2, num_samples=4, seed=0)
    assert (caught.value.key, caught.value.value) == ("--split", "969,30,1")
