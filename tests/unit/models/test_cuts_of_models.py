# SPDX-License-Identifier: Apache-2.0
"""Which weights the partitions give to the layers of a model."""

import pytest

from wavemare.models.convert import cut_chain, take_apart
from wavemare.models.timing import layer_times
from wavemare.pipeline.plan.partition import balanced_cuts


def cut(model, partition, stages):
    taken = take_apart(model, None)
    return cut_chain(model, taken.chain, taken.inputs, partition, range(stages))


def test_by_parameters_counts_passes_over_weights_and_the_tied_head(make_model):
    model = make_model("gpt2")
    block = sum(p.numel() for p in model.transformer.h[0].parameters())
    words = model.transformer.wte.weight.numel()
    counts = [words, 64 * 32, block, block, block, 64, words]
    assert cut(model, "parameters", 3) == balanced_cuts(counts, 3)
    for parameter in model.transformer.h.parameters():
        parameter.requires_grad = False
    counts = [3 * count for count in counts]
    counts[2:5] = [2 * block] * 3
    assert cut(model, "parameters", 3) == balanced_cuts(counts, 3)


def test_uniform_counts_layers(make_model):
    assert cut(make_model("gpt2"), "uniform", 2) == balanced_cuts([1] * 7, 2)


def test_explicit_starts(make_model):
    assert cut(make_model("gpt2"), [0, 3], 2) == (0, 3, 7)


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return now


def slow_down(monkeypatch, clock, module, seconds):
    """Let the passes of a module take their time on the clock."""
    forward = module.forward

    def slow(*args, **kwargs):
        clock[0] += seconds
        return forward(*args, **kwargs)

    monkeypatch.setattr(module, "forward", slow)


def test_by_time_uses_the_measured_times(make_model, monkeypatch, clock):
    model = make_model("gpt2")
    for block, seconds in zip(model.transformer.h, (1.0, 2.0, 3.0), strict=True):
        slow_down(monkeypatch, clock, block, seconds)  # layers of a kind share their mean
    slow_down(monkeypatch, clock, model.transformer.ln_f, 5.0)
    times = [0.0, 0.0, 2.0, 2.0, 2.0, 5.0, 0.0]
    taken = take_apart(model, None)
    assert layer_times(model, taken.chain, taken.inputs) == times
    assert cut(model, "time", 2) == balanced_cuts(times, 2)


def test_each_layer_of_every_family_is_measured(model_name, make_model, monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    model = make_model(model_name)
    taken = take_apart(model, None)
    assert layer_times(model, taken.chain, taken.inputs) == [1.0] * len(taken.chain)
