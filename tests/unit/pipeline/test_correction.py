# SPDX-License-Identifier: Apache-2.0
"""Corrections against plain histories of copies, and PipeMare's formula written out."""

import gc
import io
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import Parameter

from support.refusals import refuses
from wavemare.errors import CheckpointError, ModelError, PlanError
from wavemare.pipeline.staleness.correction import (
    VelocityCorrection,
    WeightStashing,
    make_correction,
)
from wavemare.pipeline.staleness.replay import Replay

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = [(7, 5), (3,), (2, 3, 2)]
modes = pytest.mark.parametrize("mode", ["exact", "ema"])


def parameters(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def copies(params):
    return [p.detach().clone() for p in params]


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@contextmanager
def optimizer_step(*corrections):
    for correction in corrections:
        correction.before_step()
    yield
    for correction in corrections:
        correction.after_step()


def step(correction, params, seed=0):
    with optimizer_step(correction):
        generator = torch.Generator().manual_seed(seed)
        for p in params:
            p.data.add_(torch.randn(p.shape, generator=generator).to(p.dtype), alpha=1e-2)


def places(params):
    """Return which memory the parameters have, and in which form."""
    return [(p.untyped_storage().data_ptr(), p.data_ptr(), p.stride(), p.dtype) for p in params]


@modes
@pytest.mark.parametrize("dtype", DTYPES)
def test_correcting_writes_to_no_weight(mode, dtype):
    params = parameters(dtype)
    correction = make_correction(mode, params, 2)
    for number in range(2):
        step(correction, params, seed=number)
    newest, wanted = [p.data for p in params], copies(params)
    gradients = [torch.ones_like(p) for p in params]
    for p, gradient in zip(params, gradients, strict=True):
        p.grad = gradient
    correction.correct(2)
    assert not any(torch.equal(p, w) for p, w in zip(params, wanted, strict=True))
    assert equal(newest, wanted)
    correction.restore()
    assert places(params) == places(newest)
    assert all(p.grad is gradient for p, gradient in zip(params, gradients, strict=True))
    # What is written to the one is seen in the other, as by an optimizer over a flat buffer.
    newest[0].fill_(2.0)
    assert (params[0] == 2.0).all()


@given(
    depth=st.integers(1, 4),
    moves=st.lists(st.one_of(st.just("step"), st.just("forget"), st.integers(0, 5)), max_size=25),
)
def test_exact_is_a_history_of_versions_for_any_sequence_of_calls(depth, moves):
    param = Parameter(torch.zeros(3))
    correction = WeightStashing([param], depth)
    version, oldest = 0, 0
    for move in moves:
        if move == "step":
            with optimizer_step(correction):
                version += 1
                param.data.fill_(version)
            oldest = max(oldest, version - depth)
        elif move == "forget":
            correction.discard_versions()
            oldest = version
        elif version - move >= oldest:
            correction.correct(move)
            assert param.tolist() == [version - move] * 3
            correction.restore()
        else:
            with refuses(PlanError, "staleness", move):
                correction.correct(move)
        assert param.tolist() == [version] * 3


@pytest.mark.parametrize("decay", [0.0, 1 / 3, 0.8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_estimate_follows_the_formula(dtype, decay):
    params = parameters(dtype)
    correction = VelocityCorrection(params, decay)
    deltas = [torch.zeros(p.shape, dtype=torch.float64) for p in params]
    for number in range(12):
        old = copies(params)
        step(correction, params, seed=number)
        deltas = [
            decay * delta + (1 - decay) * (p.detach().double() - o.double())
            for delta, p, o in zip(deltas, params, old, strict=True)
        ]
        newest = copies(params)
        for age in (1, 4):
            correction.correct(age)
            # Rounded to the type once: half a unit in the last place, and fp32's own error.
            error = 0.501 * torch.finfo(dtype).eps + 2e-6
            for p, new, delta in zip(params, newest, deltas, strict=True):
                wanted = new.double() - age * delta
                torch.testing.assert_close(p.detach().double(), wanted, rtol=error, atol=2e-6)
            correction.restore()
            assert equal(params, newest)


@modes
def test_tied_and_frozen_parameters(mode):
    tied, frozen = Parameter(torch.ones(2)), Parameter(torch.ones(2), requires_grad=False)
    alias = Parameter(torch.empty(0))
    alias.data = tied.data
    correction = make_correction(mode, [tied, frozen, alias, tied], 1)
    with optimizer_step(correction):
        tied.data.fill_(3.0)
        frozen.data.fill_(5.0)
    correction.correct(1)
    assert tied.tolist() == alias.tolist() == [1.0, 1.0]
    assert places([tied]) == places([alias])
    assert frozen.tolist() == [5.0, 5.0]
    correction.restore()
    assert tied.tolist() == alias.tolist() == [3.0, 3.0]
    assert places([tied]) == places([alias])


@modes
def test_parameters_in_the_memory_of_another_one_follow_it(mode):
    flat = Parameter(torch.arange(6.0))
    views = [Parameter(torch.empty(0)) for _ in range(3)]
    views[0].data, views[1].data = flat.data[0:2], flat.data[2:6].view(2, 2).t()
    # At first in the memory of the other one, and then no more.
    views[2].data = flat.data[3:]
    correction = make_correction(mode, [*views, flat], 1)
    with optimizer_step(correction):
        flat.data.add_(1.0)
        views[2].data = torch.full((2,), 7.0)
    home = places([flat, *views])
    correction.correct(1)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5]
    assert [view.tolist() for view in views] == [[0, 1], [[2, 4], [3, 5]], [7, 7]]
    correction.restore()
    assert flat.tolist() == [1, 2, 3, 4, 5, 6]
    assert [view.tolist() for view in views] == [[1, 2], [[3, 5], [4, 6]], [7, 7]]
    assert places([flat, *views]) == home


@modes
def test_a_stage_without_parameters(mode):
    correction = make_correction(mode, [], 1)
    correction.before_step()
    correction.after_step()
    x = torch.ones(2, requires_grad=True)
    with correction.forward(1):
        out = x.square().sum()
    correction.correct(1)
    out.backward()
    correction.restore()
    assert x.grad.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("mode", "copies_held"), [("off", 0), ("exact", 3), ("ema", 2), ("predict", 2)]
)
def test_a_correction_holds_as_many_copies_as_the_simulation_says(mode, copies_held):
    """Counted among all tensors of the process; `Replay` states the same number."""
    shape = (23, 29)
    weight = Parameter(torch.ones(shape))

    def held():
        gc.collect()
        alive = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
        same = (each for each in alive if each.shape == shape)
        return len({each.untyped_storage().data_ptr() for each in same})

    before = held()
    correction = make_correction(mode, [weight], 3)
    for _ in range(4):
        with correction.forward(1):
            pass
        correction.before_step()
        weight.data.add_(1)
        correction.after_step()
    assert held() - before == copies_held
    stage = nn.Linear(shape[1], shape[0], bias=False)
    replay = Replay([stage], None, torch.optim.AdamW, 1, correction=mode, delays=[3])
    assert replay.correction_bytes() == [copies_held * stage.weight.nbytes]


def test_off_changes_nothing():
    params = parameters()
    correction = make_correction("off", params, 3)
    step(correction, params)
    newest, home = copies(params), places(params)
    with correction.forward(1):
        square = params[0].square().sum()
    correction.correct(2)
    assert equal(params, newest)
    assert places(params) == home
    correction.restore()
    correction.discard_versions()
    assert equal(params, newest)
    # Autograd goes on checking for changes in place.
    with torch.no_grad():
        params[0].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


@pytest.mark.parametrize(("base", "decay"), [(None, 0.5), (0.125, 0.5), (0.001, 0.1)])
def test_decay_comes_from_the_staleness_or_from_the_base(base, decay):
    param = Parameter(torch.zeros(1, dtype=torch.float64))
    correction = make_correction("ema", [param], 3, decay_base=base)
    with optimizer_step(correction):
        param.data.fill_(1.0)
    assert correction.state_dict()["deltas"][0].item() == pytest.approx(1 - decay)


@modes
def test_a_saved_state_goes_on_alike(mode):
    """An engine saves drained stages."""
    params, others = parameters(), parameters(seed=1)
    correction, loaded = (make_correction(mode, p, 3) for p in (params, others))
    for number in range(5):
        step(correction, params, seed=number)
    for number in range(2):
        step(loaded, others, seed=50 + number)
    for each in (correction, loaded):
        each.discard_versions()
    file = io.BytesIO()
    torch.save(correction.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for p, other in zip(params, others, strict=True):
        other.data.copy_(p.data)
    for number in range(3):
        step(correction, params, seed=9 + number)
        step(loaded, others, seed=9 + number)
        for age in range(1, number + 2):
            correction.correct(age)
            loaded.correct(age)
            assert equal(params, others)
            correction.restore()
            loaded.restore()


@pytest.mark.parametrize("mode", ["ema", "predict"])
def test_a_correction_of_other_parameters_goes_on_with_what_both_have(mode):
    params = [Parameter(torch.randn(3)) for _ in range(3)]
    former = make_correction(mode, params[:2], 2)
    step(former, params[:2])
    following = make_correction(mode, params[1:], 2)
    following.go_on_from(former)
    (_, kept), (same, new) = (list(c.state_dict().values())[1] for c in (former, following))
    assert torch.equal(same, kept)
    assert kept.any()
    assert not new.any()


def test_a_state_of_another_stage_is_refused():
    params = parameters()
    estimate, other = VelocityCorrection(params, 0.5), VelocityCorrection(params[:2], 0.5)
    with refuses(CheckpointError, "correction", "3 tensors"):
        other.load_state_dict(estimate.state_dict())


@modes
def test_corrected_weights_are_never_taken_for_the_newest(mode):
    params = parameters()
    correction = make_correction(mode, params, 1)
    step(correction, params)
    newest = copies(params)
    correction.correct(1)
    for call in (lambda: correction.correct(1), correction.before_step):
        with refuses(PlanError, "correction"):
            call()
    correction.restore()
    correction.restore()
    assert equal(params, newest)


def test_unknown_modes_and_shared_memory_are_refused():
    with refuses(PlanError, "correction", "exakt"):
        make_correction("exakt", parameters(), 1)
    flat = torch.zeros(4)
    params = [Parameter(torch.empty(0)) for _ in range(2)]
    params[0].data, params[1].data = flat[:3], flat[1:]
    with pytest.raises(ModelError):
        make_correction("exact", params, 1)
