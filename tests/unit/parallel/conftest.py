# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks in one process: of one rank, or of several of which one is here."""

import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.append(str(Path(__file__).parents[2] / "multiproc" / "programs"))


@pytest.fixture
def as_rank():
    """Be one of several ranks whose collectives do nothing: for what needs no sums."""

    @contextmanager
    def enter(rank, ranks):
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        try:
            yield dist.group.WORLD
        finally:
            dist.destroy_process_group()

    return enter


@pytest.fixture
def alone():
    """A group of one rank, whose sums are real."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    torch.manual_seed(0)
    yield dist.group.WORLD
    dist.destroy_process_group()
