# SPDX-License-Identifier: Apache-2.0
"""Gradient norms over a chain of stages: the algebra, against sums over all stages."""

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wavemare.engine.pipe import stage_optimizer as clipping
from wavemare.engine.pipe.stage_optimizer import StageNorms

SIZES = [(2, 3), (4,), (5, 2)]  # 6, 4 and 10 parameters: 0.3, 0.2 and 0.5 of all

squares = st.floats(0, 1e12)


def chain(monkeypatch, sizes=SIZES):
    """The norms of all stages; the reduction adds up what every stage holds."""
    modules = [torch.nn.Module() for _ in sizes]
    for module, size in zip(modules, sizes, strict=True):
        module.weight = torch.nn.Parameter(torch.zeros(size))
        module.frozen = torch.nn.Parameter(torch.zeros(100), requires_grad=False)
    counts = torch.tensor([float(m.weight.numel()) for m in modules], dtype=torch.float64)
    reduced = []

    def all_reduce(tensor, group):
        stage = len(reduced)
        expected = torch.zeros_like(counts)
        expected[stage] = counts[stage]
        assert torch.equal(tensor, expected)  # each stage adds its own trained parameters alone
        reduced.append(group)
        tensor.copy_(counts)

    monkeypatch.setattr(clipping.dist, "all_reduce", all_reduce)
    grid = SimpleNamespace(get_pipe_parallel_group=lambda: "the pipeline's group")
    chain = [
        StageNorms(
            SimpleNamespace(
                stage_id=stage, num_stages=len(sizes), device="cpu", module=module, grid=grid
            )
        )
        for stage, module in enumerate(modules)
    ]
    assert reduced == ["the pipeline's group"] * len(sizes)
    return chain


@pytest.fixture
def norms(monkeypatch):
    return chain(monkeypatch)


@pytest.fixture(scope="module")
def shared():
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield chain(monkeypatch)


def backward(norms, own):
    """One step's norms, told from the last stage to the first."""
    suffix = 0.0
    for stage in reversed(range(len(norms))):
        norms[stage].begin_step()
        norms[stage].own, norms[stage].later_stages_sq_norm = own[stage], suffix
        suffix = norms[stage].from_here


def forward(norms):
    """What the activations after a step carry along."""
    for before, after in pairwise(norms):
        before.end_step()
        after.earlier_stages_sq_norm = before.up_to_here
    norms[-1].end_step()


@given(st.lists(squares, min_size=3, max_size=3))
def test_the_first_stage_knows_the_norm_of_all(shared, own):
    backward(shared, own)
    assert shared[0].total == pytest.approx(math.fsum(own), rel=1e-12)
    assert shared[0].exact is None


@given(st.lists(squares, min_size=3, max_size=3), st.lists(squares, min_size=3, max_size=3))
def test_later_stages_take_the_earlier_ones_as_of_their_last_step(shared, last, now):
    backward(shared, last)
    forward(shared)
    backward(shared, now)
    for stage, ours in enumerate(shared):
        expected = math.fsum(last[:stage]) + math.fsum(now[stage:])
        assert ours.total == pytest.approx(expected, rel=1e-12)


def test_before_the_first_step_all_gradients_are_taken_to_be_alike(norms):
    backward(norms, [3.0, 2.0, 5.0])  # as the numbers of parameters: an even gradient
    assert [stage.total for stage in norms] == pytest.approx([10.0] * 3)
    backward(norms, [100.0, 2.0, 4.0])
    assert norms[0].total == 106.0
    assert norms[1].total == pytest.approx(6 / 0.7)
    assert norms[2].total == pytest.approx(4 / 0.5)


def test_nothing_is_told_of_a_stage_that_has_not_stepped(norms):
    backward(norms, [1.0, 2.0, 4.0])
    assert all(math.isnan(stage.up_to_here) for stage in norms)
    norms[0].end_step()
    assert norms[0].up_to_here == 1.0
    norms[1].end_step()  # but it knows nothing of the first yet
    assert math.isnan(norms[1].up_to_here)
    norms[1].earlier_stages_sq_norm = norms[0].up_to_here
    assert norms[1].up_to_here == 3.0


@given(st.lists(squares, min_size=3, max_size=3))
def test_a_synchronous_step_is_exact_and_leaves_the_prefix_behind(shared, own):
    backward(shared, own)
    total = shared[0].from_here
    for stage, ours in enumerate(shared):
        ours.set_exact(total)
        assert ours.total == total
        # Differences of large and small numbers: to the rounding of the largest.
        assert ours.earlier_stages_sq_norm == pytest.approx(
            math.fsum(own[:stage]), rel=1e-9, abs=1e-9 * total
        )
        assert ours.earlier_stages_sq_norm >= 0
    shared[2].begin_step()
    assert shared[2].exact is None


def test_rounding_never_makes_a_prefix_negative(norms):
    norms[0].own, norms[0].later_stages_sq_norm = 0.1, 0.2
    norms[0].set_exact(0.3)  # 0.1 + 0.2 is a little more
    assert norms[0].earlier_stages_sq_norm == 0.0


def test_a_resumed_stage_goes_on_as_it_would_have(norms, monkeypatch):
    backward(norms, [1.0, 2.0, 4.0])
    forward(norms)
    resumed = chain(monkeypatch)
    for ours, other in zip(norms, resumed, strict=True):
        other.load_state_dict(ours.state_dict())
        assert other.up_to_here == ours.up_to_here
    for stages in (norms, resumed):
        backward(stages, [8.0, 16.0, 32.0])
    assert [ours.total for ours in resumed] == [ours.total for ours in norms] == [56.0, 49.0, 35.0]


def test_one_stage_knows_all(monkeypatch):
    (only,) = chain(monkeypatch, [(3,)])
    only.own = 2.0
    assert only.total == 2.0
