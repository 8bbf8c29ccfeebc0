# SPDX-License-Identifier: Apache-2.0
"""What a `SparseComm` refuses before anything is sent, measures at start and tells of calls."""

import threading
from collections import deque
from dataclasses import astuple

import numpy as np
import pytest
import torch

from wavemare.comm import SparseComm
from wavemare.comm.blocks.layout import OwnedRange, ranges_of
from wavemare.comm.config import CompressorConfig
from wavemare.comm.selection.calibration import calibrate
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


def test_a_plan_is_made_of_tensors_and_arrays_and_prints_as_a_table(alone):
    with SparseComm(alone) as comm:
        table = torch.rand(4, 1000) < 0.1
        plan = comm.plan(table)
        assert str(plan) == str(comm.plan(np.asarray(table)))
    lines = str(plan).splitlines()
    assert "1000 blocks of 1024 bytes on 4 ranks" in lines[0]
    assert len(lines) == 4
    assert lines[1].startswith(f"> {plan.executor}")


def test_empty_pieces_may_lie_anywhere_on_a_border():
    ranges = [OwnedRange(5, 5, 0), OwnedRange(5, 10, 1), OwnedRange(0, 5, 0)]
    assert ranges_of(ranges, 10, 2) == ranges
    with pytest.raises(ConfigError):
        ranges_of([OwnedRange(0, 6, 0), OwnedRange(5, 10, 1)], 10, 2)


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
    totals.add(Statistics("pushpull", 100, 0.5, 1.0, **told))
    totals.add(Statistics("ordered", 900, None, None, bytes_up=13, bytes_down=17, actual_s=5))
    told = {"bytes_up": 19, "bytes_down": 23, "predicted_s": 4.0, "actual_s": 6}
    totals.add(Statistics("pushpull", 300, 0.1, 0.2, **told))
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


def test_a_call_that_ends_while_totals_are_taken_counts_in_the_next_ones():
    begun, goes_on = threading.Event(), threading.Event()

    class Slow(deque):
        def append(self, call):
            begun.set()
            goes_on.wait(60)
            super().append(call)

    totals = Totals(Slow())
    worker = threading.Thread(target=totals.add, args=(Statistics("ordered"),))
    worker.start()
    begun.wait(60)
    assert totals.take() == {}
    goes_on.set()
    worker.join()
    assert totals.take()["sparse_calls_ordered"] == 1


@pytest.mark.parametrize("mode", ["pushpull", "allgather"])
def test_rows_travel_as_the_mode_says(alone, mode):
    with SparseComm(alone, mode=mode) as comm:
        handle = comm.allreduce_rows_(torch.arange(4), torch.ones(4, 3), 9)
    assert handle.stats.executor == f"rows-{mode}"


@pytest.mark.parametrize("mode", ["allgather", "streaming"])
def test_a_reduce_scatter_is_never_made_by_another_mode(alone, mode):
    with SparseComm(alone, mode=mode) as comm:
        with pytest.raises(ConfigError, match=rf"{mode}.*reduce_scatter_.*auto, ordered or push"):
            comm.reduce_scatter_(torch.ones(8), [0, 8])
        comm.allreduce_(torch.ones(8))
