# SPDX-License-Identifier: Apache-2.0
"""Which weights the partitions give to the layers of a model."""

import pytest

from wavemare.models import convert, timing
from wavemare.models.convert import _take_apart, cut_chain
from wavemare.pipeline.cuts import balanced_cuts


def cut(model, partition, stages):
    taken = _take_apart(model, None)
    return cut_chain(model, taken.chain, taken.inputs, partition, stages)


def test_by_parameters_counts_trained_weights_and_the_tied_head(make_model):
    model = make_model("gpt2")
    block = sum(p.numel() for p in model.transformer.h[0].parameters())
    words = model.transformer.wte.weight.numel()
    counts = [words, 64 * 32, block, block, block, 64, words]
    assert cut(model, "parameters", 3) == balanced_cuts(counts, 3)
    for parameter in model.transformer.h.parameters():
        parameter.requires_grad = False
    counts[2:5] = 0, 0, 0
    assert cut(model, "parameters", 3) == balanced_cuts(counts, 3)


def test_uniform_counts_layers(make_model):
    assert cut(make_model("gpt2"), "uniform", 2) == balanced_cuts([1] * 7, 2)


@pytest.mark.parametrize("pattern", ["GPT2Block$", "gpt2blocklayer"])
def test_by_type_counts_layers_of_a_class(pattern, make_model):
    expected = balanced_cuts([0, 0, 1, 1, 1, 0, 0], 3)
    assert cut(make_model("gpt2"), f"type:{pattern}", 3) == expected


def test_explicit_starts(make_model):
    assert cut(make_model("gpt2"), [0, 3], 2) == (0, 3, 7)


def test_by_time_uses_the_measured_times(make_model, monkeypatch):
    times = [0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 5.0]
    monkeypatch.setattr(convert, "layer_times", lambda model, chain, inputs: times)
    assert cut(make_model("gpt2"), "time", 2) == balanced_cuts(times, 2)


def test_measured_times_are_those_of_each_kind_of_layer(model_name, make_model, monkeypatch):
    model = make_model(model_name)
    clock = iter(range(10**6))
    monkeypatch.setattr(timing, "_now", lambda: float(next(clock)))
    conversion = _take_apart(model, None)
    seconds = timing.layer_times(model, conversion.chain, conversion.inputs)
    assert seconds == [1.0] * len(conversion.chain)


def test_a_slow_layer_is_measured_as_slow(make_model, monkeypatch):
    import time

    model = make_model("gpt2")
    forward = model.transformer.ln_f.forward

    def slow(hidden):
        time.sleep(0.2)  # far longer than other work on the machine holds up a layer
        return forward(hidden)

    monkeypatch.setattr(model.transformer.ln_f, "forward", slow)
    conversion = _take_apart(model, None)
    seconds = timing.layer_times(model, conversion.chain, conversion.inputs)
    assert seconds.index(max(seconds)) == 5
    assert seconds[2] == seconds[3] == seconds[4]
