# SPDX-License-Identifier: Apache-2.0
"""Patterns of modules, lists of module names."""

import pytest
from annotation_models import bert, gpt2, plan

import wavemare
from support.refusals import refuses
from wavemare.errors import PlanError
from wavemare.parallel.layout.names import matches, named_chain

BLOCKS = [f"transformer.h.{n}" for n in range(4)]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("transformer.h.2", BLOCKS[2:3]),
        ("h.2", BLOCKS[2:3]),
        ("h.1-3", BLOCKS[1:4]),
        ("layers.0-1", BLOCKS[:2]),
        ("layers.*", BLOCKS),
        ("blocks", BLOCKS),
        ("h.*", BLOCKS),
        ("h.?", BLOCKS),
        (r"re:.*\.h\.[02]", [BLOCKS[0], BLOCKS[2]]),
        ("embed", ["transformer.wte", "transformer.wpe", "transformer.drop"]),
        ("norm", ["transformer.ln_f"]),
        ("head", ["lm_head"]),
        ("output", ["lm_head"]),
        ("mlp.c_fc", [f"{block}.mlp.c_fc" for block in BLOCKS]),
        ("w*", ["transformer.wte", "transformer.wpe"]),
    ],
)
def test_patterns(pattern, expected):
    model = gpt2()
    assert matches(model, named_chain(model), pattern, "key") == expected


@pytest.mark.parametrize(
    ("pattern", "value"),
    [("layers.2-4", "layers.4"), ("hed", "hed"), ("re:(", "re:("), ("re:h", "re:h")],
)
def test_patterns_without_a_module(pattern, value):
    model = gpt2()
    with refuses(PlanError, "key", value):
        matches(model, named_chain(model), pattern, "key")


def test_the_outermost_module_of_a_name_is_meant():
    model = bert()
    assert matches(model, named_chain(model), "embeddings", "key") == ["bert.embeddings"]
    assert matches(model, named_chain(model), "dropout", "key") == ["dropout"]


def test_every_model_has_the_common_names():
    for model in (gpt2(), bert(), gpt2(tie_word_embeddings=False)):
        chain = named_chain(model)
        wavemare.annotate(model, {"stages": {"a": ["embed"], "b": ["layers"], "c": ["head"]}})
        blocks = chain.blocks
        cuts = plan(
            wavemare.annotate(
                type(model)(model.config),
                {"stages": {"a": ["embed"], "b": ["layers", "norm"], "c": ["head"]}},
            ),
            3,
        ).cuts
        assert cuts == (0, blocks[0], len(chain.layers) - 1, len(chain.layers))


def test_the_innermost_of_two_patterns_counts():
    stages = {"s0": ["transformer"], "s1": ["h.2-3", "ln_f", "lm_head"]}
    with pytest.raises(PlanError) as error:  # a stage within a stage
        plan(wavemare.annotate(gpt2(), {"stages": stages}), 2)
    assert "'transformer'" in str(error.value)


def test_a_range_may_not_be_of_any_length():
    with refuses(PlanError, "mapping.split.modules", "layers.0-99999999999"):
        wavemare.annotate(gpt2(), {"split": {"size": 2, "modules": ["layers.0-99999999999"]}})


def test_lists_of_module_names_cut():
    stages = [
        ["tok_embeddings", "layers.0"],
        ["layers.1", "layers.2"],
        ["layers.3", "norm", "output"],
    ]
    assert plan(wavemare.annotate(gpt2(), {"stages": stages}), 3).cuts == (0, 3, 5, 8)
    stages = [["bert.embeddings", "layer.0"], ["layer.1-2", "pooler", "classifier"]]
    assert plan(wavemare.annotate(bert(), {"stages": stages}), 2).cuts == (0, 3, 7)


def test_a_number_of_stages_is_balanced_by_parameters():
    from wavemare.models.convert import parameter_cost
    from wavemare.pipeline.plan.partition import balanced_cuts

    model = wavemare.annotate(gpt2(), {"stages": 2, "pipeline": {"schedule": "pipemare"}})
    weights = [parameter_cost(layer) for layer in named_chain(model).layers]
    made = plan(model, 2)
    assert made.cuts == balanced_cuts(weights, 2)
    assert made.schedule == "pipemare"
