# SPDX-License-Identifier: Apache-2.0
"""A round of one system on one rank."""

import threading
import time

import pytest
import torch.distributed as dist

from benchmarks.pipeline.measure import idle_share, run_round
from benchmarks.pipeline.systems import Runner

PART_S = 0.1


@pytest.fixture
def alone():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def compute():
    until = time.process_time() + PART_S
    while time.process_time() < until:
        pass


def compute_elsewhere():
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()


class Steps(Runner):
    def __init__(self, work):
        self.work = work

    def step(self):
        self.work()


@pytest.mark.parametrize("work", [compute, compute_elsewhere])
def test_the_processor_time_of_a_step_is_that_of_all_threads(alone, work):
    sample, _ = run_round(Steps(work), 3, 0)
    assert PART_S <= sample.cpu_s < 2 * PART_S


def test_sleeping_takes_no_processor_time(alone):
    sample, _ = run_round(Steps(lambda: time.sleep(PART_S)), 3, 0)
    assert sample.seconds >= PART_S > 2 * sample.cpu_s


def test_a_rank_is_idle_but_for_its_other_threads(alone):
    quiet, ended = idle_share(), threading.Event()

    def compute_on():
        while not ended.is_set():
            pass

    thread = threading.Thread(target=compute_on)
    thread.start()
    busy = idle_share()
    ended.set()
    thread.join()
    assert quiet < 0.2 * busy
