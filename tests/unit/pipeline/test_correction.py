# SPDX-License-Identifier: Apache-2.0
"""Corrections against plain histories of copies, and PipeMare's formula written out."""

import io
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from wavemare.errors import CheckpointError, ModelError, PlanError
from wavemare.pipeline.correction import (
    EmaCorrection,
    ExactCorrection,
    NoCorrection,
)
from wavemare.pipeline.corrections import make_correction
from wavemare.pipeline.prediction import WeightPrediction
from wavemare.pipeline.staleness import ema_decay

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = [(7, 5), (3,), (2, 3, 2)]


def parameters(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def copies(params):
    return [p.detach().clone() for p in params]


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def change(params, scale=1e-2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.data.add_(torch.randn(p.shape, generator=generator).to(p.dtype), alpha=scale)


def step(correction, params, seed=0):
    correction.before_step()
    change(params, seed=seed)
    correction.after_step()


def places(params):
    """Return which memory the parameters have, and in which form."""
    return [(p.untyped_storage().data_ptr(), p.data_ptr(), p.stride(), p.dtype) for p in params]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_exact_gives_each_held_version_and_the_newest_back_bitwise(dtype, depth):
    params = parameters(dtype)
    correction = ExactCorrection(params, depth)
    history, home = [copies(params)], places(params)
    for number in range(2 * depth + 1):
        step(correction, params, seed=number)
        history.append(copies(params))
        # Each order of ages, as several micro-batches of a step ask for several of them.
        for age in [*range(min(depth, number + 1), 0, -1), 1]:
            correction.correct(age)
            assert equal(params, history[-1 - age])
            assert not {p[1] for p in places(params)} & {p[1] for p in home}
            correction.restore()
            assert equal(params, history[-1])
            assert places(params) == home


@pytest.mark.parametrize("mode", ["exact", "ema"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_correcting_writes_to_no_weight(mode, dtype):
    params = parameters(dtype)
    correction = make_correction(mode, params, 2)
    for number in range(2):
        step(correction, params, seed=number)
    newest, wanted = [p.data for p in params], copies(params)
    counters = [p._version for p in params]
    gradients = [torch.ones_like(p) for p in params]
    for p, gradient in zip(params, gradients, strict=True):
        p.grad = gradient
    correction.correct(2)
    assert not any(torch.equal(p, w) for p, w in zip(params, wanted, strict=True))
    assert equal(newest, wanted)
    correction.restore()
    assert places(params) == places(newest)
    assert [p._version for p in params] == counters
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
    correction = ExactCorrection([param], depth)
    version, oldest = 0, 0
    for move in moves:
        if move == "step":
            correction.before_step()
            version += 1
            param.data.fill_(version)
            correction.after_step()
            oldest = max(oldest, version - depth)
        elif move == "forget":
            correction.forget()
            oldest = version
        elif version - move >= oldest:
            correction.correct(move)
            assert param.tolist() == [version - move] * 3
            correction.restore()
        else:
            with pytest.raises(PlanError, match="held"):
                correction.correct(move)
        assert param.tolist() == [version] * 3


@pytest.mark.parametrize("decay", [0.0, 1 / 3, 0.8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_estimate_follows_the_formula(dtype, decay):
    params = parameters(dtype)
    correction = EmaCorrection(params, decay)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_estimate_is_computed_in_fp32_and_rounded_once(dtype):
    param = Parameter(torch.linspace(-3, 3, 101).to(dtype))
    correction = EmaCorrection([param], 0.0)
    correction.before_step()
    change([param], scale=0.3)
    correction.after_step()
    delta = correction.state_dict()["deltas"][0]
    assert delta.dtype is torch.float32
    wanted = torch.add(param.detach().float(), delta, alpha=-3).to(dtype)
    correction.correct(3)
    assert torch.equal(param, wanted)


def test_estimate_without_memory_is_the_old_version_for_one_step():
    params = parameters()
    exact, estimate = ExactCorrection(params, 1), EmaCorrection(params, ema_decay(1))
    for number in range(20):
        exact.before_step()
        estimate.before_step()
        change(params, seed=number)
        exact.after_step()
        estimate.after_step()
        exact.correct(1)
        wanted = copies(params)
        exact.restore()
        estimate.correct(1)
        for p, old in zip(params, wanted, strict=True):
            torch.testing.assert_close(p.detach(), old, rtol=1e-7, atol=1e-7)
        estimate.restore()


def test_a_straight_path_is_estimated_exactly_once_the_mean_has_settled():
    param = Parameter(torch.zeros(4, dtype=torch.float64))
    correction = EmaCorrection([param], ema_decay(5))
    for _ in range(100):
        correction.before_step()
        param.data.add_(torch.arange(4.0))
        correction.after_step()
    correction.correct(5)
    torch.testing.assert_close(param.detach(), 95 * torch.arange(4.0).double(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("mode", ["exact", "ema"])
def test_tied_and_frozen_parameters(mode):
    tied, frozen = Parameter(torch.ones(2)), Parameter(torch.ones(2), requires_grad=False)
    alias = Parameter(torch.empty(0))
    alias.data = tied.data
    correction = make_correction(mode, [tied, frozen, alias, tied], 1)
    correction.before_step()
    tied.data.fill_(3.0)
    frozen.data.fill_(5.0)
    correction.after_step()
    correction.correct(1)
    assert tied.tolist() == alias.tolist() == [1.0, 1.0]
    assert places([tied]) == places([alias])
    assert frozen.tolist() == [5.0, 5.0]
    correction.restore()
    assert tied.tolist() == alias.tolist() == [3.0, 3.0]
    assert places([tied]) == places([alias])


@pytest.mark.parametrize("mode", ["exact", "ema"])
def test_parameters_in_the_memory_of_another_one_follow_it(mode):
    flat = Parameter(torch.arange(6.0))
    views = [Parameter(torch.empty(0)) for _ in range(3)]
    views[0].data, views[1].data = flat.data[0:2], flat.data[2:6].view(2, 2).t()
    # At first in the memory of the other one, and then no more.
    views[2].data = flat.data[3:]
    correction = make_correction(mode, [*views, flat], 1)
    correction.before_step()
    flat.data.add_(1.0)
    views[2].data = torch.full((2,), 7.0)
    correction.after_step()
    home = places([flat, *views])
    correction.correct(1)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5]
    assert [view.tolist() for view in views] == [[0, 1], [[2, 4], [3, 5]], [7, 7]]
    correction.restore()
    assert flat.tolist() == [1, 2, 3, 4, 5, 6]
    assert [view.tolist() for view in views] == [[1, 2], [[3, 5], [4, 6]], [7, 7]]
    assert places([flat, *views]) == home


@pytest.mark.parametrize("mode", ["exact", "ema"])
def test_a_flat_buffer_is_left_alone(mode):
    flat = torch.arange(10.0)
    params = [Parameter(torch.empty(0)) for _ in range(2)]
    params[0].data, params[1].data = flat[1:5].view(2, 2), flat[6:9]
    correction = make_correction(mode, params, 1)
    correction.before_step()
    flat.add_(1.0)
    correction.after_step()
    correction.correct(1)
    assert [p.tolist() for p in params] == [[[1, 2], [3, 4]], [6, 7, 8]]
    assert flat.tolist() == list(range(1, 11))
    correction.restore()
    assert [p.tolist() for p in params] == [[[2, 3], [4, 5]], [7, 8, 9]]
    assert [p.data_ptr() for p in params] == [flat[1:].data_ptr(), flat[6:].data_ptr()]


@pytest.mark.parametrize("mode", ["exact", "ema"])
def test_a_parameter_that_moves_to_a_flat_buffer_is_followed(mode):
    param = Parameter(torch.ones(3))
    correction = make_correction(mode, [param], 1)
    flat = torch.full((5,), 2.0)
    correction.before_step()
    param.data = flat[1:4]
    correction.after_step()
    correction.correct(1)
    assert param.tolist() == [1, 1, 1]
    correction.restore()
    flat.fill_(4.0)
    assert param.tolist() == [4, 4, 4]


@pytest.mark.parametrize("mode", ["exact", "ema"])
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
    assert (correction.copies, correction.memory_bytes) == (0.0, 0)
    assert math.isnan(correction.update_gap())


@pytest.mark.parametrize(
    ("mode", "dtype", "expected"),
    [
        ("off", torch.float32, 0.0),
        ("exact", torch.float32, 3.0),
        ("exact", torch.bfloat16, 3.0),
        ("ema", torch.float32, 2.0),
        ("ema", torch.bfloat16, 3.0),
    ],
)
def test_memory(mode, dtype, expected):
    params = parameters(dtype)
    correction = make_correction(mode, params, 3)
    assert correction.copies == expected
    assert correction.memory_bytes == expected * sum(p.nbytes for p in params)


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
    correction.forget()
    assert equal(params, newest)
    # Autograd goes on checking for changes in place.
    with torch.no_grad():
        params[0].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


@pytest.mark.parametrize(
    ("mode", "oldest", "kind"),
    [
        ("auto", 0, NoCorrection),
        ("auto", 1, ExactCorrection),
        ("auto", 2, ExactCorrection),
        ("auto", 3, EmaCorrection),
        ("exact", 0, NoCorrection),
        ("ema", 0, NoCorrection),
        ("exact", 5, ExactCorrection),
        ("ema", 1, EmaCorrection),
        ("off", 5, NoCorrection),
        ("predict", 3, WeightPrediction),
        ("predict", 0, NoCorrection),
    ],
)
def test_modes(mode, oldest, kind):
    assert type(make_correction(mode, parameters(), oldest)) is kind


@pytest.mark.parametrize(("base", "decay"), [(None, 0.5), (0.125, 0.5), (0.001, 0.1)])
def test_decay_comes_from_the_staleness_or_from_the_base(base, decay):
    param = Parameter(torch.zeros(1, dtype=torch.float64))
    correction = make_correction("ema", [param], 3, decay_base=base)
    correction.before_step()
    param.data.fill_(1.0)
    correction.after_step()
    assert correction.state_dict()["deltas"][0].item() == pytest.approx(1 - decay)


@pytest.mark.parametrize("mode", ["off", "exact", "ema"])
@pytest.mark.parametrize("drained", [False, True])
def test_a_saved_state_goes_on_alike(mode, drained):
    params, others = parameters(), parameters(seed=1)
    correction, loaded = (make_correction(mode, p, 3) for p in (params, others))
    for number in range(5):
        step(correction, params, seed=number)
    for number in range(2):
        step(loaded, others, seed=50 + number)
    if drained:
        correction.forget()
    file = io.BytesIO()
    torch.save(correction.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for p, other in zip(params, others, strict=True):
        other.data.copy_(p.data)
    for number in range(3):
        step(correction, params, seed=9 + number)
        step(loaded, others, seed=9 + number)
        for age in range(1, (number + 1 if drained else 3) + 1):
            correction.correct(age)
            loaded.correct(age)
            assert equal(params, others)
            correction.restore()
            loaded.restore()


def test_an_exact_state_after_a_drain_is_empty():
    params = parameters()
    correction = ExactCorrection(params, 2)
    step(correction, params)
    assert len(correction.state_dict()["versions"]) == 1
    correction.forget()
    assert correction.state_dict()["versions"] == []


def test_a_deeper_state_gives_its_newest_versions():
    params = parameters()
    deep, shallow = ExactCorrection(params, 3), ExactCorrection(params, 1)
    history = []
    for number in range(3):
        history.append(copies(params))
        step(deep, params, seed=number)
    shallow.load_state_dict(deep.state_dict())
    shallow.correct(1)
    assert equal(params, history[-1])


def test_states_of_another_mode_or_stage_are_refused():
    params = parameters()
    exact, estimate = ExactCorrection(params, 1), EmaCorrection(params, 0.5)
    off = NoCorrection(params)
    step(exact, params)
    for target, state in ((exact, estimate), (estimate, exact), (off, exact), (exact, off)):
        with pytest.raises(CheckpointError, match="Set the correction to"):
            target.load_state_dict(state.state_dict())
    for other in (ExactCorrection(params[:2], 1), EmaCorrection(params[:2], 0.5)):
        with pytest.raises(CheckpointError, match="other parameters"):
            other.load_state_dict(
                exact.state_dict() if other.mode == "exact" else estimate.state_dict()
            )


@pytest.mark.parametrize("mode", ["exact", "ema"])
def test_corrected_weights_are_never_taken_for_the_newest(mode):
    params = parameters()
    correction = make_correction(mode, params, 1)
    step(correction, params)
    newest = copies(params)
    correction.correct(1)
    for call in (lambda: correction.correct(1), correction.before_step):
        with pytest.raises(PlanError, match="Restore"):
            call()
    correction.restore()
    correction.restore()
    assert equal(params, newest)


def test_numbers_out_of_range_are_refused():
    for depth in (0, -1):
        with pytest.raises(PlanError, match="depth"):
            ExactCorrection(parameters(), depth)
    for decay in (-0.1, 1.0, float("nan")):
        with pytest.raises(PlanError, match="decay"):
            EmaCorrection(parameters(), decay)
    with pytest.raises(PlanError, match="Did you mean 'exact'"):
        make_correction("exakt", parameters(), 1)
    flat = torch.zeros(4)
    params = [Parameter(torch.empty(0)) for _ in range(2)]
    params[0].data, params[1].data = flat[:3], flat[1:]
    with pytest.raises(ModelError):
        make_correction("exact", params, 1)


def test_the_update_gap_is_the_relative_distance_to_the_oldest_version_in_use():
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    exact, estimate = ExactCorrection([weight], 2), EmaCorrection([weight], 0.5, depth=2)
    assert math.isnan(exact.update_gap())
    assert estimate.update_gap() == 0.0
    for change in (1.0, 2.0, 3.0):
        for correction in (exact, estimate):
            correction.before_step()
        weight.data.add_(change)
        for correction in (exact, estimate):
            correction.after_step()
    newest = math.hypot(9.0, 10.0)
    assert exact.update_gap() == pytest.approx(math.hypot(5.0, 5.0) / newest)
    mean = 0.5 * (0.5 * (0.5 * 1.0) + 0.5 * 2.0) + 0.5 * 3.0
    assert estimate.update_gap() == pytest.approx(2 * math.hypot(mean, mean) / newest)
    assert math.isnan(NoCorrection([weight]).update_gap())
