# SPDX-License-Identifier: Apache-2.0
"""What a `SparseComm` refuses before anything is sent, measures at start and tells of calls."""

from dataclasses import astuple

import pytest
import torch

from wavemare.comm import SparseComm
from wavemare.comm.config import CompressorConfig
from wavemare.comm.selection.selector import calibrate
from wavemare.comm.statistics import Statistics, Totals
from wavemare.errors import ConfigError


@pytest.mark.parametrize("block", [8, 300, 1 << 22])
def test_calibration_takes_any_block(alone, block):
    constants = calibrate(alone, block, torch.device("cpu"))
    assert all(value > 0 for value in astuple(constants))


def test_a_compressor_needs_a_name_for_each_bucket(alone):
    with SparseComm(alone, block=4, compressor=CompressorConfig()) as comm:
        flat = torch.tensor([9.0] * 4 + [1.0] * 4)
        with pytest.raises(ConfigError) as caught:
            comm.allreduce_(flat.clone())
        assert caught.value.key == "key"
        with pytest.raises(ConfigError):
            comm.reduce_scatter_(flat.clone(), [0, 8])
        first = comm.allreduce_(flat.clone(), key="first").wait()
        second = comm.allreduce_(torch.zeros(8), key="second").wait()
        assert first.tolist() == [9.0] * 4 + [0.0] * 4
        assert not second.any()


@pytest.mark.parametrize(
    "call",
    [
        lambda comm: comm.allreduce_(torch.ones(8), key="x"),  # no weights to compare with
        lambda comm: comm.allreduce_rows_(torch.arange(2), torch.ones(2, 3).int(), 5),
        lambda comm: comm.allreduce_(torch.ones(8, dtype=torch.int32), key="x"),
    ],
)
def test_what_the_caller_gave_is_refused_before_anything_is_sent(alone, call):
    with SparseComm(
        alone, block=4, average=False, compressor=CompressorConfig(type="block_topk_ratio")
    ) as comm:
        with pytest.raises(ConfigError):
            call(comm)
        # So that the next collective is none the worse for it.
        flat = torch.ones(8)
        comm.allreduce_(flat, key="y", weights=torch.ones(8))
        assert flat.sum() == 4


@pytest.mark.parametrize(
    ("num_rows", "density"), [(0, 0.0), (1, 1.0), (1 << 24, 2**-24), ((1 << 24) + 1, None)]
)
def test_no_masks_of_large_tables_are_exchanged(alone, num_rows, density):
    ids = torch.arange(max(num_rows - 1, 0), num_rows)
    with SparseComm(alone) as comm:
        handle = comm.allreduce_rows_(ids, torch.ones(ids.numel(), 3), num_rows)
        assert handle.wait()[0].tolist() == ids.tolist()
    assert handle.stats.density == density


def test_totals_of_some_calls():
    totals = Totals()
    told = {"bytes_up": 7, "bytes_down": 11, "predicted_s": 2.0, "actual_s": 3}
    totals.calls.append(Statistics("pushpull", 100, 0.5, 1.0, **told))
    totals.calls.append(
        Statistics("ordered", 900, None, None, bytes_up=13, bytes_down=17, actual_s=5)
    )
    told = {"bytes_up": 19, "bytes_down": 23, "predicted_s": 4.0, "actual_s": 6}
    totals.calls.append(Statistics("pushpull", 300, 0.1, 0.2, **told))
    assert totals.take() == {
        "sparse_payload_bytes": 1300,
        "sparse_bytes_up": 39,
        "sparse_bytes_down": 51,
        "sparse_seconds": 14,
        "sparse_predicted_seconds": 6.0,
        "sparse_density": (0.5 * 100 + 0.1 * 300) / 400,
        "sparse_union": (1.0 * 100 + 0.2 * 300) / 400,
        "sparse_calls_pushpull": 2,
        "sparse_calls_ordered": 1,
    }
    assert totals.take() == {}
