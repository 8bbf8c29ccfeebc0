# SPDX-License-Identifier: Apache-2.0
"""What may stand in what (the table of `docs/annotations.md`), in the three ways to say it."""

import copy
import re
from contextlib import contextmanager, nullcontext

import pytest
from annotation_models import gpt2, plan
from torch import nn

import wavemare
from support.refusals import refuses
from wavemare import parallel
from wavemare.errors import ConfigError, ModelError, PlanError
from wavemare.parallel.layout.annotations import own_region, pipeline, regions_of

HERE = r"test_regions\.py:\d+"


def degrees(model, world_size, **config):
    made = plan(model, world_size, **config)
    return made.stages, made.tensor_parallel, made.data_parallel, made.cuts


@contextmanager
def refused_at(places, *refusal):
    """Expect a refusal that names so many places of this file."""
    with refuses(PlanError, *refusal) as error:
        yield
    assert len(set(re.findall(HERE, str(error.value)))) == places


def assign(parent, *names):
    """Put modules in their own places again, which annotates them."""
    for name in names:
        holder = parent.get_submodule(name.rpartition(".")[0])
        setattr(holder, name.rpartition(".")[2], parent.get_submodule(name))


def test_a_replica_is_data_parallel():
    with wavemare.replica():
        model = gpt2()
    assert degrees(model, 4) == (1, 1, 4, None)
    assert degrees(model, 4, zero_optimization={"stage": 3}) == (1, 1, 4, None)
    with wavemare.replica(2):
        model = gpt2()
    assert degrees(model, 2) == (1, 1, 2, None)
    with refuses(PlanError, "world_size", 4):
        plan(model, 4)


def test_stages_in_a_pipeline():
    model = gpt2()
    with pipeline(micro_batches=8):
        with wavemare.stage("s0"):
            assign(model, "transformer.wte", "transformer.wpe", "transformer.h.0")
        with wavemare.stage("s1"):
            assign(model, "transformer.h.1", "transformer.h.2", "transformer.h.3", "lm_head")
    made = plan(model, 4)
    assert (made.stages, made.data_parallel, made.cuts) == (2, 2, (0, 3, 8))
    assert (made.micro_steps, made.global_batch, made.num_layers) == (8, 32, 8)


@pytest.mark.parametrize("count", [None, 2])
@pytest.mark.parametrize("around", [pipeline, nullcontext])
@pytest.mark.parametrize("split", [lambda: wavemare.split(2), nullcontext])
def test_stages_in_a_replica_are_a_replicated_pipeline(count, around, split):
    def annotated(outermost):
        with outermost:
            model = gpt2()
            with around():
                with wavemare.stage("s0"), split():
                    assign(model, "transformer.wte", "transformer.wpe", "transformer.h.0")
                with wavemare.stage("s1"), split():
                    assign(model, "transformer.h.1", "transformer.h.2", "transformer.h.3")
        return model

    parts = 1 if split is nullcontext else 2
    model = annotated(wavemare.replica(count))
    assert degrees(model, 4 * parts) == (2, parts, 2, (0, 3, 8))
    assert plan(model, 4 * parts) == plan(annotated(nullcontext()), 4 * parts)
    if count is not None:
        with refuses(PlanError, "world_size", 8 * parts):
            plan(model, 8 * parts)


REFUSED = [
    ("split", "stage"),
    ("split", "replica"),
    ("split", "pipeline"),
    ("split", "split"),
    ("stage", "pipeline"),
    ("stage", "stage"),
    ("replica", "replica"),
    ("pipeline", "pipeline"),
    ("stage", "replica"),
    ("pipeline", "replica"),
]


ARGUMENTS = {"stage": ("one",), "split": (2,), "replica": (), "pipeline": ()}


@pytest.mark.parametrize(("outer", "inner"), REFUSED)
def test_scopes_that_do_not_nest_name_both_places(outer, inner):
    first = getattr(parallel, outer)(*ARGUMENTS[outer])
    second = getattr(parallel, inner)(*ARGUMENTS[inner])
    with first, refused_at(2, inner), second:
        pass
    with wavemare.replica():  # no scope stayed open
        pass


def test_a_pipeline_needs_a_stage_between_it_and_a_split():
    with pipeline(), refuses(PlanError, "split", "split(2)"), wavemare.split(2):
        pass
    with pipeline(stages=2), wavemare.split(2):
        model = gpt2()
    assert degrees(model, 4)[:3] == (2, 2, 1)


def test_the_innermost_annotation_counts():
    with wavemare.replica():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        with wavemare.split(4):
            model[1] = nn.Sequential(nn.Linear(2, 2))
        model.add_module("again", model[1])
    kinds = {name: region.kind for name, region in regions_of(model).by_module.items()}
    assert kinds == {
        "0": "replica",
        "1": "split",
        "1.0": "split",
        "again": "split",
        "again.0": "split",
    }


def test_modules_made_before_a_scope_are_in_it_when_they_are_assigned():
    part = nn.Sequential(nn.Linear(2, 2))
    model = nn.Module()
    with wavemare.stage("s0"):
        model.part = part
    assert own_region(part[0]) is None
    assert regions_of(model).by_module["part.0"].name == "s0"


def test_a_module_is_in_one_stage():
    model = nn.Module()
    with wavemare.stage("s0"):
        model.first = nn.Linear(2, 2)
    with refused_at(2, "stage", "s1"), wavemare.stage("s1"):
        model.second = model.first


def test_both_ways_make_one_plan():
    scopes = gpt2()
    with pipeline(4):
        with wavemare.stage("a"), wavemare.split(2):
            assign(scopes, "transformer.wte", "transformer.wpe", "transformer.h.0")
        with wavemare.stage("b"), wavemare.split(2):
            assign(
                scopes, *(f"transformer.h.{n}" for n in (1, 2, 3)), "transformer.ln_f", "lm_head"
            )

    names = wavemare.annotate(
        gpt2(),
        {
            "stages": {"a": ["embed", "layers.0"], "b": ["layers.1-3", "norm", "head"]},
            "split": 2,
            "replica": "rest",
            "pipeline": {"micro_batches": 4},
        },
    )
    found = plan(scopes, 8)
    assert found == plan(names, 8)
    assert (found.cuts, found.tensor_parallel, found.data_parallel) == ((0, 3, 8), 2, 2)


def test_annotations_outlive_a_copy():
    with wavemare.replica(), wavemare.split(2):
        model = gpt2()
    assert plan(copy.deepcopy(model), 4) == plan(model, 4)


def test_stages_are_split_alike():
    model = gpt2()
    with wavemare.stage("s0"), wavemare.split(2):
        assign(model, "transformer.h.0", "transformer.h.1")
    with wavemare.stage("s1"), wavemare.split(4):
        assign(model, "transformer.h.2", "transformer.h.3")
    with refused_at(2, "split", "split(4)"):
        plan(model, 8)


def test_all_blocks_are_split_or_none():
    model = gpt2()
    with wavemare.replica():
        assign(model, "transformer")
        with wavemare.split(2):
            assign(model, "transformer.h.0", "transformer.h.1")
    with refuses(PlanError, "split", "split(2)"):
        plan(model, 2)


def test_stages_are_consecutive_layers():
    model = gpt2()
    with wavemare.stage("s0"):
        assign(model, "transformer.wte", "transformer.h.0", "transformer.h.2")
    with wavemare.stage("s1"):
        assign(model, "transformer.h.1", "transformer.h.3")
    with refused_at(2, "stage", "s0"):
        plan(model, 2)


def test_layers_between_two_stages_need_an_annotation():
    model = wavemare.annotate(gpt2(), {"stages": {"s0": ["layers.0"], "s1": ["layers.2-3"]}})
    with refuses(PlanError, "stage", "transformer.h.1"):
        plan(model, 2)


def test_parts_of_one_layer_are_in_one_stage():
    model = wavemare.annotate(gpt2(), {"stages": {"s0": ["wte", "wpe"], "s1": ["drop", "layers"]}})
    with refuses(PlanError, "stage", "s1"):
        plan(model, 2)


def test_regions_beside_each_other_share_the_devices():
    model = gpt2()
    with wavemare.replica():
        assign(model, "lm_head")
    with wavemare.split(2):
        assign(model, *(f"transformer.h.{n}" for n in range(4)))
    with refused_at(2, "split", "split(2)"):
        plan(model, 4)
    model = gpt2()
    with wavemare.replica():
        assign(model, "lm_head")
    with wavemare.stage("s0"):
        assign(model, "transformer")
    with refuses(PlanError, "replica", "replica()"):
        plan(model, 4)


def test_a_pipeline_without_stages():
    with pipeline():
        model = gpt2()
    with refuses(PlanError, "pipeline", "pipeline()"):
        plan(model, 2)
    with refuses(PlanError, "mapping.pipeline", {}):
        wavemare.annotate(gpt2(), {"pipeline": {"micro_batches": 2}})


def test_degrees_that_are_not_the_number_of_processes():
    model = wavemare.annotate(gpt2(), {"stages": 2, "split": 2, "replica": 3})
    with refuses(PlanError, "world_size", 8):
        plan(model, 8)


def test_what_a_scope_says_is_not_said_again():
    with pipeline(4, schedule="pipemare", stages=2):
        model = gpt2()
    for key, section in {
        "wavemare.pipeline.stages": {"pipeline": {"stages": 2}},
        "wavemare.pipeline.schedule": {"pipeline": {"schedule": "1f1b"}},
        "wavemare.tensor_parallel.size": {"tensor_parallel": {"size": 2}},
    }.items():
        with refused_at(1, key):
            plan(model, 2, wavemare=section)
    with refused_at(1, "gradient_accumulation_steps", 2):
        plan(model, 2, gradient_accumulation_steps=2)
    with refuses(PlanError, "pipeline", "gpipe"):
        pipeline(schedule="gpipe")
    for value in (0, True, 1.5):
        with refuses(PlanError, "split", value):
            wavemare.split(value)


def test_a_model_without_annotations():
    for model in (gpt2(), wavemare.annotate(gpt2(), {})):
        with refuses(PlanError, "model", "GPT2LMHeadModel"):
            plan(model, 2)


def test_models_that_cannot_be_cut():
    with pipeline(stages=2):
        model = nn.Sequential(nn.Linear(2, 2))
    with refuses(ModelError, "model", "Sequential"):
        plan(model, 2)
    with refuses(ModelError, "model", "Linear"):
        wavemare.annotate(nn.Linear(2, 2), {"stages": 2})
    with refuses(ConfigError, "mapping.stage", 2):
        wavemare.annotate(gpt2(), {"stage": 2})
