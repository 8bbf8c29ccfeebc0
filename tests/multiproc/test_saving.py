# SPDX-License-Identifier: Apache-2.0
"""Every public way of saving, copying and calling a trained model, with every layout.

A way gives the whole model's bytes, or a typed error on all ranks. CI takes some cells, the
nightly tests all.
"""

import math

import pytest

WHOLE = ("zero0", "zero1", "zero2", "waves")
"""Layouts in which each rank has the whole model."""
REPLICAS = ("local steps", "local steps zero1")
GATHERED = (
    *("zero3", "stock zero3", "tensor", "tensor zero1", "tensor zero3"),
    *("experts", "experts zero1", "tensor experts", "tensor experts zero1", *REPLICAS),
)
"""Layouts in which each rank has a part of each layer, or a copy of its own."""
CUT = ("1f1b", "1f1b zero1", "zb-h1", "zbv", "zbv zero1", "pipemare", "pipemare zero1")
THEIRS = ("their experts",)
ON_FOUR = ("1f1b experts", "1f1b tensor")

LOCAL = {
    *("engine_save_pretrained", "module_save_pretrained", "model_save_pretrained"),
    *("unwrapped_save_pretrained", "base_save_pretrained", "push_to_hub", "module_push_to_hub"),
    *("engine_state_dict", "module_state_dict", "model_state_dict", "deepcopy"),
}
"""Ways that do not gather: they refuse wherever a rank has a part."""
CALLS = {"forward", "generate", "engine_generate"}
HOOKS = {"forward_hook", "backward_hook"}
"""What would run in a call of the whole model."""
CHANGES = {"set_embeddings", "resize_embeddings"}
"""What changes an embedding, of which stages and ranks that split layers have a part."""
ALONE = [f"{layout}/{kind}" for layout in (*WHOLE, *GATHERED, *CUT) for kind in ("whole", "lora")]
NAMED = [
    *(f"{layout}/named" for layout in ("zero0", "zero3", "tensor", "experts", "1f1b", "pipemare")),
    *(f"{layout}/two" for layout in ("zero0", "zero3")),
    *("zero1/dora", "zero3/dora"),
    *(f"{layout}/{kind}" for layout in ("tensor", "zbv", "zero3") for kind in ("pissa", "olora")),
]
SAMPLE = ["zero3/two", "tensor/pissa", "experts zero1/whole", "pipemare/whole", "zbv/named"]
SAMPLE += ["tensor experts/lora"]
SAMPLE += ["local steps/whole", "their experts/whole"]
OTHERS = ("again", "inside", "unlike lengths", "hooks", "changed")
REFUSED = ["their experts/lora", "their experts of qwen2/whole"]


def expected(layout, kind, way):
    """Return what a way gives with a layout: ``equal``, or the beginning of a refusal."""
    if way == "zero_to_fp32" and layout == "zero1" and kind != "whole":
        return "refused SystemExit"  # DeepSpeed keeps no frozen weights for it
    if way == "save_megatron" and kind != "whole":
        return "refused ModelError"  # it has no place for adapters
    if layout in WHOLE or way == "push_to_hub_of_trainer":
        return "equal"
    if "zero_to_fp32" in way:
        error = "SystemExit" if way == "zero_to_fp32" else "CheckpointError"
        return "equal" if layout in ("zero3", "stock zero3") else f"refused {error}"
    refuses = LOCAL - ({"deepcopy"} if layout in REPLICAS else set())
    if layout in (*CUT, *ON_FOUR):
        refuses = LOCAL | CALLS | HOOKS | {"unwrapped_with_state"}
    if layout in THEIRS and way not in CALLS | CHANGES | HOOKS:
        refuses = {way}
    if layout in (*CUT, *ON_FOUR) or layout.startswith("tensor"):
        refuses = refuses | CHANGES
    return "refused ModelError" if way in refuses else "equal"


def check(ranks):
    for cell, ways in ranks[0].items():
        layout, kind = cell.split("/")
        assert len(ways) > len(LOCAL), (cell, ways)
        for way in ways:
            found, wanted = [results[cell][way] for results in ranks], expected(layout, kind, way)
            if wanted == "equal":
                # Files are read on the first rank alone; weights may be on it alone.
                assert found[0] == "equal", (cell, way, found)
                assert {*found[1:]} <= {"equal", "nothing"}, (cell, way, found)
            else:
                everywhere = found[:1] if "zero_to_fp32" in way else found
                assert all(each.startswith(wanted) for each in everywhere), (cell, way, found)


@pytest.fixture
def sample(launch_once):
    """What each rank saw of the cells of CI, and of other uses."""
    return launch_once("saving.py", *SAMPLE, *REFUSED, *OTHERS)


@pytest.mark.world_size(2)
def test_each_way_gives_the_whole_model_or_refuses_on_all_ranks(sample):
    check([{cell: found[cell] for cell in SAMPLE} for found in sample])


@pytest.mark.world_size(2)
def test_experts_that_deepspeed_cannot_divide_are_refused_by_their_section(sample):
    for found in sample:
        for cell in REFUSED:
            assert found[cell]["refused"].startswith("ConfigError: expert_parallel = {"), found


@pytest.mark.world_size(2)
def test_a_model_that_was_cut_goes_to_engines_that_cut_it_alike(sample):
    for found in sample:
        again = found["again"]
        assert again["same cuts"] == "accepted"
        for use in ("other cuts", "no stages", "called", "called again"):
            assert again[use].startswith("ModelError"), (use, again)


@pytest.mark.world_size(2)
def test_models_inside_other_modules_train_and_say_what_they_are(sample):
    for found in sample:
        inside = found["inside"]
        assert math.isfinite(inside["loss"])
        assert (inside["pipeline"], inside["saved"], inside["whole"]) == ("", "", "")
        for use in ("folder", "state"):
            assert inside[use].startswith("ModelError"), (use, inside)


@pytest.mark.world_size(2)
def test_hooks_that_would_not_run_or_see_a_part_are_refused_after_initialize(sample):
    """Of a tied head, of which stages use the embedding's weight, and of a list; of split layers.

    Others run, and those of DeepSpeed's profiler.
    """
    columns = {"forward", "full_backward", "full_backward_pre"}
    of_weight = {"register_hook", "register_post_accumulate_grad_hook"}
    parts = {
        "lm_head": columns,
        "transformer.h.1.mlp.c_fc": columns,
        "transformer.h.1.mlp.act": {"forward_pre", *columns},
        "transformer.h.1.mlp.c_fc.weight": of_weight,
    }
    for found in sample:
        for case, said in found["hooks"].items():
            layout, name, *kind = case.split()
            if name == "ran":
                assert said == 2, case  # each of two micro-batches once; or on each of two ranks
            elif layout == "tensor":
                refused = kind[0] in parts.get(name, ())
                assert said == ("ModelError" if refused else "accepted"), case
            else:
                refused = name in ("lm_head", "transformer.h")
                assert said == ("ModelError" if refused else "accepted"), case


@pytest.mark.world_size(2)
def test_changes_after_initialize_that_stages_would_not_see_are_refused(sample):
    """The last stage trains a pruned weight, which the whole model has not."""
    for found in sample:
        for case, said in found["changed"].items():
            change, way = case.split()
            goes_on = change in ("nothing", "called", "pruned")
            if way == "saved":
                goes_on = change != "pruned"
            assert said == ("accepted" if goes_on else "ModelError"), case


@pytest.mark.world_size(2)
def test_ranks_that_share_experts_generate_texts_of_their_own_lengths(sample):
    assert [found["unlike lengths"] for found in sample] == [True, True]


@pytest.mark.nightly
@pytest.mark.world_size(2)
@pytest.mark.parametrize("cells", [ALONE[::2], ALONE[1::2], NAMED], ids=["whole", "lora", "named"])
def test_all_ways_with_all_layouts(launch, cells):
    finished = launch("saving.py", *cells).check()
    check([finished.result(rank) for rank in range(2)])


@pytest.mark.nightly
@pytest.mark.world_size(4)
def test_stages_whose_layers_or_experts_are_divided_too(launch):
    finished = launch("saving.py", *(f"{layout}/whole" for layout in ON_FOUR), ranks=4).check()
    check([finished.result(rank) for rank in range(4)])
