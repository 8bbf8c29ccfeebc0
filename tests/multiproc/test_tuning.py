# SPDX-License-Identifier: Apache-2.0
"""Bases of bitsandbytes and torchao, and trainers of TRL, on two ranks (``make test-tuning``)."""

from importlib.util import find_spec

import pytest

NEEDS_BNB = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
NEEDS_BOTH = pytest.mark.skipif(
    not all(map(find_spec, ("bitsandbytes", "torchao"))), reason="needs bitsandbytes and torchao"
)
NEEDS_TRL = pytest.mark.skipif(find_spec("trl") is None, reason="needs trl")
pytestmark = [pytest.mark.nightly, pytest.mark.world_size(2)]

FOUR_BIT = (
    *("zero1", "zero2", "tensor", "packed, tensor", "narrow"),  # before the grids of stages
    *("packed, 1f1b", "packed, zbv"),
    *("1f1b", "zb-h1", "zbv", "interleaved", "stages and zero1", "double", "dora", "pipemare"),
    *("late", "resume", "evaluated", "whole"),
)
LAYERS = 4 * 7  # of four blocks
EXACT = ("1f1b", "double", "dora", "zb-h1", "zbv", "interleaved")
ROUNDED = ("stages and zero1", "zero1", "zero2", "packed, 1f1b", "packed, zbv")
SPLIT = ("tensor", "packed, tensor")


def check_adapters(found, limit, action):
    assert found["names"]
    assert found["moved"] > 1e-3
    assert found["adapter"] <= limit
    # A whole model is the base with the adapter added, and is not quantized.
    assert not found["config"]
    assert found["layers"] == LAYERS
    assert "dora" in action or found["merged"] <= max(limit, 1e-6)


@NEEDS_BNB
@pytest.mark.parametrize("action", [*EXACT, *ROUNDED, *SPLIT])
def test_adapters_of_a_4_bit_base_are_those_of_one_process(launch_once, action):
    for results in launch_once("quantized_bases.py", *FOUR_BIT):
        limit = 1e-4 if action in SPLIT else 0 if action in EXACT else 1e-6
        check_adapters(results[action], limit, action)


@NEEDS_BNB
def test_a_stale_pipeline_learns_on_a_4_bit_base(launch_once):
    for results in launch_once("quantized_bases.py", *FOUR_BIT):
        losses = results["pipemare"]
        assert losses[-1] < losses[0] - 0.15


@NEEDS_BNB
def test_blocks_of_4_bits_that_lie_across_ranks_are_refused(launch_once):
    for results in launch_once("quantized_bases.py", *FOUR_BIT):
        assert results["narrow"].startswith("ModelError: ")
        assert "blocks of 64 numbers" in results["narrow"]  # which size, and why


@NEEDS_BNB
def test_a_rank_reads_and_quantizes_its_own_stage_to_the_bits_of_from_pretrained(launch_once):
    ranks = [results["late"] for results in launch_once("quantized_bases.py", *FOUR_BIT)]
    for found in ranks:
        assert found["equal"]
        assert found["layers"][1] == LAYERS
    assert sum(found["layers"][0] for found in ranks) == LAYERS
    assert len({tuple(found["losses"]) for found in ranks}) == 1


@NEEDS_BNB
def test_a_checkpoint_has_the_4_bit_base_and_goes_on(launch_once):
    for results in launch_once("quantized_bases.py", *FOUR_BIT):
        first, again, at_other_sizes = results["resume"]
        assert first == again
        assert at_other_sizes.startswith("TopologyError")
        assert "quantized" in at_other_sizes


@NEEDS_BNB
def test_training_goes_on_after_an_evaluation(launch_once):
    for results in launch_once("quantized_bases.py", *FOUR_BIT):
        before, evaluation, after = results["evaluated"]
        assert evaluation != pytest.approx(before, rel=1e-4)  # a step lies between them
        assert after == pytest.approx(evaluation, rel=1e-5)


@NEEDS_BNB
def test_whole_weights_are_numbers_again(launch_once):
    first, last = (results["whole"] for results in launch_once("quantized_bases.py", *FOUR_BIT))
    assert first == {"equal": True, "names": []}
    assert last is None


INT8_EXACT = tuple(f"int8 {n}" for n in ("1f1b", "zbv", "interleaved", "dora"))
INT8_WITHOUT_STAGES = tuple(f"int8 {n}" for n in ("zero0", "zero1", "zero2", "tensor"))
INT8_ROUNDED = ("int8 stages and zero1", "int8 packed, zbv")
INT8 = (  # without stages first, as above
    *(*INT8_WITHOUT_STAGES, *INT8_EXACT, *INT8_ROUNDED),
    *(f"int8 {n}" for n in ("pipemare", "late", "resume", "whole")),
)


@NEEDS_BOTH
@pytest.mark.parametrize("action", [*INT8_WITHOUT_STAGES, *INT8_EXACT, *INT8_ROUNDED])
def test_adapters_of_an_int8_base_are_those_of_one_process(launch_once, action):
    for results in launch_once("quantized_bases.py", *INT8):
        limit = 1e-4 if "tensor" in action else 0 if action in INT8_EXACT else 1e-6
        check_adapters(results[action], limit, action)


@NEEDS_BOTH
def test_a_stale_pipeline_learns_on_an_int8_base(launch_once):
    for results in launch_once("quantized_bases.py", *INT8):
        losses = results["int8 pipemare"]
        assert losses[-1] < losses[0] - 0.15


@NEEDS_BOTH
def test_a_rank_quantizes_its_own_stage_and_merges_as_peft_with_torchao(launch_once):
    ranks = [results["int8 late"] for results in launch_once("quantized_bases.py", *INT8)]
    for found in ranks:
        assert found["equal"]
        assert len(set(found["losses"])) == 1
        early, late, alone = found["merged"]
        assert early == late == pytest.approx(alone, rel=1e-6)
    assert sum(found["layers"] for found in ranks) == LAYERS


@NEEDS_BOTH
def test_a_checkpoint_has_the_int8_base_and_goes_on(launch_once):
    for results in launch_once("quantized_bases.py", *INT8):
        first, again, at_other_sizes = results["int8 resume"]
        assert first == again
        assert at_other_sizes.startswith("TopologyError")
        assert "quantized" in at_other_sizes


@NEEDS_BOTH
def test_whole_weights_of_an_int8_base_are_those_of_torchao(launch_once):
    first, last = (r["int8 whole"] for r in launch_once("quantized_bases.py", *INT8))
    assert first == {"equal": True, "names": []}
    assert last is None


KINDS = ("sft", "dpo")
ALONE = (
    *(f"{k} alone" for k in KINDS),
    *(f"{k} whole alone" for k in KINDS),
    "sft packed alone",
)
PACKED = ("sft packed stages", "sft packed split")
BY_TRL = (
    "dpo whole stages",  # first: it builds a stock engine of the reference
    *("sft whole stages", "sft stages", "dpo stages", "sft split", "dpo split", *PACKED),
    *("sft stale", "refused", "undeclared"),
)


@pytest.fixture(scope="module")
def of_one_process():
    return {}


@NEEDS_TRL
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *((kind, layout) for kind in KINDS for layout in ("stages", "whole stages", "split")),
        *(("sft", "packed stages"), ("sft", "packed split"), ("dpo", "precomputed")),
    ],
)
def test_trainers_of_trl_give_the_figures_and_weights_of_one_process(
    launch_once, of_one_process, kind, layout
):
    # Of whole models, of packed rows, or neither.
    whole = next((f"{word} " for word in ("whole", "packed") if word in layout), "")
    if not of_one_process:  # read before the next launch, which has the same folder
        of_one_process.update(launch_once("trl_trainers.py", *ALONE, ranks=1)[0])
    # Adam makes steps of rounding where gradients are small.
    near = 1e-2 if "whole" in layout else 2e-3
    expected = of_one_process[f"{kind} {whole}alone"]
    actions = ("dpo precomputed",) if layout == "precomputed" else BY_TRL
    for results in launch_once("trl_trainers.py", *actions):
        found = results[f"{kind} {layout}"]
        assert len(found["logs"]) == len(expected["logs"])
        for ours, theirs in zip(found["logs"], expected["logs"], strict=True):
            assert ours.keys() == theirs.keys()
            for name, value in theirs.items():
                if "accuracies" not in name:  # of margins that are zero but for rounding at first
                    assert ours[name] == pytest.approx(value, rel=near, abs=2e-3), name
        assert found["weights"].keys() == expected["weights"].keys()
        for name, sums in expected["weights"].items():
            assert found["weights"][name] == pytest.approx(sums, rel=1e-2, abs=2e-2), name


@NEEDS_TRL
def test_an_sft_trainer_learns_with_stale_gradients(launch_once):
    for results in launch_once("trl_trainers.py", *BY_TRL):
        losses = [each["loss"] for each in results["sft stale"]["logs"] if "loss" in each]
        assert losses[-1] < losses[0]


@NEEDS_TRL
def test_what_a_trainer_of_trl_cannot_do_in_stages_is_refused(launch_once):
    keys = {
        "offloading": "activation_offloading = True",
        "waves": "wavemare.wavelet.mode",
        "waves and dpo": "wavemare.wavelet.mode",
        "stale reference": "wavemare.pipeline.schedule = 'pipemare'",
        "synchronized": "sync_ref_model = True",
        "other size": "ref_model = 'LlamaForCausalLM'",
        "second adapter": "model = 'PeftModel'",
        "reward": "wavemare.pipeline.stages = 2",
    }
    for results in launch_once("trl_trainers.py", *BY_TRL):
        found = results["refused"]
        assert found.keys() == keys.keys()
        for name, key in keys.items():
            assert found[name].startswith(f"ConfigError: {key}"), name
        assert results["undeclared"].startswith("ModelError: position_ids = ")
