# SPDX-License-Identifier: Apache-2.0
"""``wavemare plan memory``: what it counts, against sums by hand, and what it refuses."""

import functools
import json

import pytest
import transformers
from typer.testing import CliRunner

from support.refusals import refuses
from wavemare.cli import app
from wavemare.errors import ModelError, PlanError
from wavemare.parallel.planner.memory import MemorySettings, rank_memory

WIDTH, INNER, LAYERS, WORDS, TOKENS = 64, 128, 4, 96, 32
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
MATRICES = LAYERS * (4 * WIDTH**2 + 3 * WIDTH * INNER)
NORMS, EMBEDDING = (2 * LAYERS + 1) * WIDTH, WORDS * WIDTH


@functools.cache
def ranks(**settings):
    config = transformers.LlamaConfig(**SIZES)
    return rank_memory(config, MemorySettings(**{"sequence": TOKENS, **settings}))


def total(found, name):
    return sum(getattr(rank, name) for rank in found)


def test_weights_that_are_trained_have_gradients_and_the_optimizers_state():
    found = ranks()
    numbers = MATRICES + NORMS + 2 * EMBEDDING
    assert total(found, "num_trained") == numbers
    assert total(found, "trained") == 16 * numbers
    assert total(ranks(optimizer="sgd"), "trained") == 8 * numbers
    assert total(ranks(dtype="bf16"), "trained") == 20 * numbers
    assert total(ranks(zero_stage=1, replicas=2), "trained") == 12 * numbers
    assert found[0].layers[0][0] == 0
    assert found[0].layers[0][1] == found[1].layers[0][0]


@pytest.mark.parametrize(("double", "scale"), [(False, 4), (True, 1)])
def test_a_base_in_4_bits_takes_half_a_byte_and_its_scales(double, scale):
    found = ranks(lora_r=2, four_bit=True, double_quant=double, dtype="bf16")
    blocks = MATRICES // 64
    expected = MATRICES / 2 + scale * blocks + 2 * (NORMS + 2 * EMBEDDING)
    if double:
        expected += 4 * MATRICES / 64 / 256
    # Scales of scales are whole numbers for each matrix; rotary tables are small.
    assert total(found, "frozen") == pytest.approx(expected, rel=0.01)
    factors = LAYERS * 2 * (4 * 2 * WIDTH + 3 * (WIDTH + INNER))
    assert total(found, "num_trained") == factors


def test_a_base_in_int8_takes_a_byte_and_a_scale_for_each_row():
    found = ranks(lora_r=2, int8=True, dtype="bf16")
    rows = LAYERS * (4 * WIDTH + 2 * INNER + WIDTH)
    expected = MATRICES + 4 * rows + 2 * (NORMS + 2 * EMBEDDING)
    assert total(found, "frozen") == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("form", ["four_bit", "int8"])
@pytest.mark.parametrize("words", [500, 1500])
def test_a_quantized_base_is_cut_as_the_same_base_in_32_bits(words, form):
    """As in the engine, where a packed weight counts as the numbers that it stands for."""
    config = transformers.LlamaConfig(**{**SIZES, "vocab_size": words})
    settings = {"lora_r": 2, "sequence": TOKENS}
    whole = rank_memory(config, MemorySettings(**settings))
    packed = rank_memory(config, MemorySettings(**settings, **{form: True}))
    assert [rank.layers for rank in packed] == [rank.layers for rank in whole]


def test_activations_grow_with_the_micro_batches_in_flight():
    first, last = ranks(micro_batches=1), ranks(micro_batches=4)
    assert last[0].activations > 1.5 * first[0].activations  # the first stage keeps two
    assert last[1].activations == first[1].activations
    for one, two in zip(first, ranks(micro_batches=1, samples=2), strict=True):
        # New gradients of weights, which are added up, do not depend on the samples.
        assert 1.7 * one.activations < two.activations <= 2 * one.activations


def test_checkpoints_keep_the_inputs_of_blocks_alone():
    kept, again = ranks(), ranks(checkpoints=True)
    assert again[0].activations < 0.6 * kept[0].activations


@pytest.mark.parametrize("schedule", ["pipemare", "zbv"])
def test_every_schedule_has_its_order(schedule):
    found = ranks(schedule=schedule)
    assert len(found) == 2
    weights = MATRICES + NORMS + 2 * EMBEDDING
    assert total(found, "trained") == (24 if schedule == "pipemare" else 16) * weights


def test_an_activation_is_counted_while_it_lives():
    """A stage of norms alone: its input, and a clone, what the norm keeps, and gradients."""
    found = ranks(stages=LAYERS + 3, micro_batches=1)
    assert [rank.layers for rank in found] == [((n, n + 1),) for n in range(LAYERS + 3)]
    row = TOKENS * WIDTH * 4
    assert 4 * row <= found[-2].activations <= 12 * row
    assert found[-1].activations >= 3 * TOKENS * WORDS * 4  # logits, log-softmax, gradient


def test_the_command_prints_a_table_and_writes_the_bytes(tmp_path):
    config = tmp_path / "config.json"
    transformers.LlamaConfig(**SIZES).save_pretrained(tmp_path)
    options = ["--sequence", str(TOKENS), "--json", str(tmp_path / "found.json")]
    result = CliRunner().invoke(app, ["plan", "memory", str(config), *options])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert [one["total"] for one in found] == [rank.total for rank in ranks()]
    assert len(result.stdout.splitlines()) == 3


@pytest.mark.parametrize(
    ("key", "value", "settings"),
    [
        ("stages", 0, {"stages": 0}),
        ("schedule", "gpipe", {"schedule": "gpipe"}),
        ("dtype", "int8", {"dtype": "int8"}),
        ("optimizer", "lion", {"optimizer": "lion"}),
        ("zero_stage", 2, {"zero_stage": 2}),
        ("four_bit", True, {"four_bit": True}),
        ("double_quant", True, {"double_quant": True, "lora_r": 2}),
        ("int8", True, {"int8": True}),
        ("int8", True, {"int8": True, "four_bit": True, "lora_r": 2}),
        ("sequence", 65, {"sequence": 65}),
    ],
)
def test_settings_that_cannot_be_are_refused(key, value, settings):
    with refuses(PlanError, key, value):
        ranks(**settings)


def test_layers_for_adapters_that_do_not_exist_are_refused():
    with refuses(ModelError, "lora_targets", "c_attn"):
        ranks(lora_r=2, lora_targets="c_attn")
