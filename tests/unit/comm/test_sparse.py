# SPDX-License-Identifier: Apache-2.0
"""What a `SparseComm` refuses before anything is sent, measures at start and tells of calls."""

import gc
import time
import weakref
from dataclasses import astuple

import pytest
import torch
from networks import Alone

from wavemare.comm import SparseComm
from wavemare.comm.calibration import calibrate
from wavemare.comm.collective_queue import Statistics, Totals
from wavemare.comm.config import CompressorConfig
from wavemare.comm.cost import Constants
from wavemare.errors import ConfigError


@pytest.mark.parametrize("block", [8, 300, 1 << 22])
def test_calibration_takes_any_block(alone, block):
    constants = calibrate(alone, block, torch.device("cpu"))
    assert all(value > 0 for value in astuple(constants))


class Slow(Alone):
    """Two ranks whose small messages are slow at first, and bytes cost time."""

    size, world_ranks = 2, (0, 1)

    def all_gather(self, mine, out):
        out.copy_(mine)

    def begin_messages(self, arriving, leaving):
        self._all_reduce(next(iter(leaving(1))))
        return self

    def _all_reduce(self, flat):
        time.sleep(0.1 if flat.nbytes <= 1 << 16 else flat.nbytes * 2e-9)


def test_bytes_are_not_free_if_the_first_messages_are_slow():
    constants = calibrate(Slow(), 256, torch.device("cpu"))
    assert min(constants.dense_s, constants.exchange_s) > 1e-9


class WithoutHalves(Alone):
    """A network whose library cannot sum floats of 16 bits."""

    def reduces(self, dtype):
        return dtype.itemsize > 2


@pytest.mark.parametrize("mode", ["dense", "auto"])
def test_what_sums_16_bits_is_priced_and_reported_as_what_it_is(mode):
    free = Constants(dense_latency_s=0.0, dense_s=0.0)  # which it would be if the library did it
    settings = {"mode": mode, "deterministic": False, "constants": free, "block": 4}
    with SparseComm(WithoutHalves(), **settings) as comm:
        for dtype, executor in ((torch.float32, "dense"), (torch.bfloat16, "ordered")):
            handle = comm.allreduce_(torch.ones(8, dtype=dtype))
            assert handle.stats.executor == executor
            if mode == "auto":
                assert (handle.stats.predicted_s == 0.0) == (executor == "dense")


def test_tensors_on_unlike_devices_are_refused(alone):
    with SparseComm(alone, block=4) as comm:
        for ids, rows in (("meta", "cpu"), ("cpu", "meta")):
            with pytest.raises(ConfigError) as caught:
                comm.allreduce_rows_(
                    torch.zeros(2, dtype=torch.int64, device=ids), torch.ones(2, 3, device=rows), 5
                )
            assert caught.value.key == "ids"
        alone.on_stream = True  # as NCCL
        for call in (
            lambda: comm.allreduce_(torch.ones(8)),
            lambda: comm.reduce_scatter_(torch.ones(8), [0, 8]),
            lambda: comm.allgather_(torch.ones(8), [0, 8]),
            lambda: comm.allreduce_rows_(torch.arange(2), torch.ones(2, 3), 5),
        ):
            with pytest.raises(ConfigError) as caught:
                call()
            assert caught.value.key == "device"


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
        lambda comm: comm.allreduce_(torch.ones(2, 4), key="x"),
        lambda comm: comm.allreduce_rows_(torch.arange(2), torch.ones(2, 3).int(), 5),
        lambda comm: comm.allreduce_(torch.ones(8, dtype=torch.int32), key="x"),
    ],
)
def test_what_the_caller_gave_is_refused_before_anything_is_sent(alone, call):
    with SparseComm(alone, block=4, average=False, compressor=CompressorConfig()) as comm:
        with pytest.raises(ConfigError):
            call(comm)
        # So that the next collective is none the worse for it.
        flat = torch.ones(8)
        comm.allreduce_(flat, key="y")
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


def test_calls_that_have_ended_are_not_kept(alone):
    with SparseComm(alone, block=4) as comm:
        handle = comm.allreduce_(torch.ones(8))
        left = weakref.ref(handle.stats)
        del handle
        comm.allreduce_(torch.ones(8))  # the thread frees what it did before
        gc.collect()
        assert left() is None
        assert comm.totals.take()["sparse_payload_bytes"] == 64


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
