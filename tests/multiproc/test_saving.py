# SPDX-License-Identifier: Apache-2.0
"""Every public way of saving, copying and calling a trained model, with every layout.

A way gives the whole model's bytes, or a typed error on all ranks. CI takes some cells, the
nightly tests all.
"""

import pytest

WHOLE = ("zero0", "zero1", "zero2", "waves")
"""Layouts in which each rank has the whole model."""
REPLICAS = ("local steps", "local steps zero1")
GATHERED = (
    *("zero3", "stock zero3", "tensor", "tensor zero1", "tensor zero3"),
    *("experts", "experts zero1", *REPLICAS),
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
ALONE = [f"{layout}/{kind}" for layout in (*WHOLE, *GATHERED, *CUT) for kind in ("whole", "lora")]
NAMED = [
    *(f"{layout}/named" for layout in ("zero0", "zero3", "tensor", "experts", "1f1b", "pipemare")),
    *(f"{layout}/two" for layout in ("zero0", "zero3")),
    *("zero1/dora", "zero3/dora"),
    *(f"{layout}/{kind}" for layout in ("tensor", "zbv", "zero3") for kind in ("pissa", "olora")),
]
SAMPLE = ["zero3/two", "tensor/pissa", "experts/whole", "pipemare/whole", "zbv/named"]
SAMPLE += ["local steps/whole", "their experts/whole"]


def expected(layout, kind, way):
    """Return what a way gives with a layout: ``equal``, or the beginning of a refusal."""
    refused = "refused ModelError"
    if layout in WHOLE or (layout in REPLICAS and way in CALLS | {"deepcopy"}):
        return "equal"
    if layout in THEIRS:
        return "equal" if way in CALLS else refused
    if way == "zero_to_fp32" and layout not in ("zero3", "stock zero3"):
        return "raised "
    if way in LOCAL or (way in CALLS and layout in (*CUT, *ON_FOUR)):
        return refused
    if way == "unwrapped_with_state" and layout in (*CUT, *ON_FOUR):
        return refused
    return "equal"


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
            elif wanted.startswith("refused"):
                assert all(each.startswith(wanted) for each in found), (cell, way, found)
            else:
                assert found[0].startswith(wanted), (cell, way, found)


@pytest.mark.world_size(2)
def test_each_way_gives_the_whole_model_or_refuses_on_all_ranks(launch):
    finished = launch("saving.py", *SAMPLE).check()
    check([finished.result(rank) for rank in range(2)])


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
