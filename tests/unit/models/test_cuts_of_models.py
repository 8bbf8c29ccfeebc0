# SPDX-License-Identifier: Apache-2.0
"""Which weights the partitions give to the layers of a model."""

import json
from importlib.resources import files
from pathlib import Path

import pytest
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from wavemare.errors import ConfigError
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


def test_by_compute_a_looked_up_embedding_costs_nothing(make_model):
    model = make_model("gpt2")
    block = sum(p.numel() for p in model.transformer.h[0].parameters())
    words = model.transformer.wte.weight.numel()
    counts = [0, 64 * 32, block, block, block, 64, words]
    for stages in (2, 3):
        assert cut(model, "compute", stages) == balanced_cuts(counts, stages)
    assert cut(model, "compute", 2) != cut(model, "parameters", 2)


RECIPES = Path(str(files("wavemare.recipes")))
PIPELINES = [
    file
    for file in sorted(RECIPES.glob("*/*.json"))
    if "pipeline" in json.loads(file.read_text()).get("wavemare", {})
]


@pytest.mark.parametrize("depth", [4, 12])
@pytest.mark.parametrize("file", PIPELINES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_recipe_is_cut_for_the_model_that_it_trains(file, depth):
    """The stages multiply by as equal numbers of weights as any cut gives them."""
    values = json.loads(file.read_text())["wavemare"]["pipeline"]
    shape = json.loads(file.with_name("model.json").read_text())
    config = AutoConfig.for_model(**{"vocab_size": 4096, **shape}, num_labels=8)
    config.num_hidden_layers = depth
    classifies = file.stem.startswith("finetune") and file.parent.name == "bert"
    kinds = {"bert": AutoModelForSequenceClassification if classifies else AutoModelForMaskedLM}
    model = kinds.get(file.parent.name, AutoModelForCausalLM).from_config(config)
    bounds = cut(model, values["partition"], values["stages"])
    layers = len(take_apart(model, None).chain)

    def multiplied(first, last):
        blocks = range(max(first, layers - 2 - depth), min(last, layers - 2))
        block = max((b for b in model.modules() if isinstance(b, nn.ModuleList)), key=len)[0]
        head = 0 if classifies or last < layers else 4096 * config.hidden_size
        return head + len(blocks) * sum(weight.numel() for weight in block.parameters())

    heaviest = [max(multiplied(0, at), multiplied(at, layers)) for at in range(1, layers)]
    found = max(multiplied(0, bounds[1]), multiplied(bounds[1], layers))
    assert found == min(heaviest)
    if depth == 4:  # of which the documentation has figures
        assert bounds[1] == 4 if classifies or file.parent.name == "llama" else 5


def test_uniform_counts_layers(make_model):
    assert cut(make_model("gpt2"), "uniform", 2) == balanced_cuts([1] * 7, 2)


def test_explicit_starts(make_model):
    assert cut(make_model("gpt2"), [0, 3], 2) == (0, 3, 7)
    for written, stages in (([0, 7], 2), ([0, 9], 2), ([0, 3], 3)):  # of a deeper model
        with pytest.raises(ConfigError) as caught:
            cut(make_model("gpt2"), written, stages)
        assert caught.value.key == "wavemare.pipeline.partition"


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
