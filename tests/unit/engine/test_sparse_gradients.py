# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

from wavemare.comm.statistics import Statistics, Totals
from wavemare.engine.gradient_buckets import Bucket
from wavemare.engine.sparse_gradients import ReplicatedGradients, _bf16_gradients
from wavemare.errors import CheckpointError


class Comm:
    """Keeps a state, and counts."""

    def __init__(self, compressor="block_topk"):
        self.compressor = compressor
        self.totals = Totals()
        self.loaded = None

    def state_dict(self):
        return {"compressor": {"residuals": {"a": 1}}} if self.compressor else {}

    def load_state_dict(self, state):
        self.loaded = state


def gradients_of(comm, numel=3, boundary=True):
    gradients = object.__new__(ReplicatedGradients)
    bucket = Bucket("a to b", torch.float32, numel, ())
    gradients.comm = comm
    gradients.figures = {}
    gradients._rounds = SimpleNamespace(buckets=[bucket])
    gradients._engine = SimpleNamespace(is_gradient_accumulation_boundary=lambda: boundary)
    return gradients


def test_the_state_is_that_of_the_collectives_with_the_buckets_that_it_belongs_to():
    state = gradients_of(Comm()).rank_state()
    assert state == {"compressor": {"residuals": {"a": 1}}, "buckets": {"a to b": 3}}
    other = Comm()
    gradients_of(other).load_rank_state(state)
    assert other.loaded["compressor"] == state["compressor"]


def test_without_a_compressor_there_is_no_state_and_any_is_taken():
    state = gradients_of(Comm()).rank_state()
    plain = gradients_of(Comm(compressor=None), numel=4)
    assert plain.rank_state() == {}
    plain.load_rank_state(state)


def test_residuals_of_other_buckets_are_refused():
    state = gradients_of(Comm()).rank_state()
    comm = Comm()
    with pytest.raises(CheckpointError, match="other buckets"):
        gradients_of(comm, numel=4).load_rank_state(state)
    assert comm.loaded is None


@pytest.mark.parametrize(("boundary", "calls"), [(True, 2), (False, None)])
def test_figures_are_of_all_calls_of_a_step(boundary, calls):
    gradients = gradients_of(Comm(), boundary=boundary)
    for _ in range(2):
        gradients.comm.totals.add(Statistics(executor="pushpull", payload_bytes=10))
    gradients._note_round()
    assert gradients.figures.get("sparse_calls_pushpull") == calls


def test_the_bf16_optimizers_gradients_are_found_by_the_parameters_name():
    weights = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))]
    optimizer = object.__new__(BF16_Optimizer)
    optimizer.bf16_groups = [[weights[1]], [weights[0]]]
    optimizer.fp32_groups_gradients = [["of b"], ["of a"]]
    named = dict(zip("ab", weights, strict=True))
    assert _bf16_gradients(optimizer, named) == {"a": "of a", "b": "of b"}
    assert _bf16_gradients(SimpleNamespace(), named) is None
