# SPDX-License-Identifier: Apache-2.0
"""Every schedule with every feature: equal to one process, or refused with its reason.

CI takes a third of the cells, the nightly tests all.
"""

import random

import pytest

SCHEDULES = ("1f1b", "zb-h1", "interleaved", "zbv", "auto", "plan", "pipemare")
FEATURES = (
    "two replicas",
    "ZeRO 1",
    "tensor parallelism",
    "clipping",
    "clipping, bf16",
    "clipping, fp16",
    "experts",
    "experts, clipping",
    "experts, clipping, bf16",
    "experts in bf16",
    "experts in bf16, ZeRO 1",
    "experts in fp16, ZeRO 1",
    "experts, sparse collective",
    "tensor parallelism and experts",
    "sparse collective",
    "local steps",
    "LoRA",
    "frozen stage",
    "dynamic shapes",
    "packed rows",
    "float without gradient",
    "reentrant checkpoints",
    "checkpoints",
    "bf16",
    "bf16, ZeRO 1",
    "autocast",
    "fp16",
    "fp16, ZeRO 1",
    "compiled layers",
    "weights tied within a stage",
    "weights tied across stages",
    "Embedding(sparse=True)",
    "auxiliary losses",
    "evaluation of other shapes",
    "exact resume",
    "resume elsewhere",
)
REFUSED = {
    **{f"{s}/local steps": "ConfigError: wavemare.pipeline.stages" for s in SCHEDULES},
    "pipemare/autocast": "ConfigError: torch_autocast.enabled",
    **{
        f"pipemare/{feature}": "ConfigError: fp16.enabled"
        for feature in ("fp16", "fp16, ZeRO 1", "clipping, fp16", "experts in fp16, ZeRO 1")
    },
    **{
        f"{s}/tensor parallelism and experts": "ConfigError: wavemare.tensor_parallel.size"
        for s in SCHEDULES
    },
    "pipemare/weights tied across stages": "ConfigError: wavemare.pipeline",
}
CELLS = [f"{schedule}/{feature}" for feature in FEATURES for schedule in SCHEDULES]
SAMPLE = sorted(random.Random(53).sample(CELLS, len(CELLS) // 3), key=CELLS.index)


def check(ranks):
    for cell, found in ranks[0].items():
        everywhere = [results[cell] for results in ranks]
        if cell in REFUSED:
            assert {result.get("refused") for result in everywhere} == {found.get("refused")}, cell
            assert str(found.get("refused")).startswith(REFUSED[cell]), (cell, found)
        else:
            assert found.get("equal") is True, (cell, everywhere)


@pytest.mark.world_size(4)
def test_a_third_of_all_cells(launch):
    finished = launch("pairs.py", *SAMPLE, ranks=4, timeout=280).check()
    check([finished.result(rank) for rank in range(4)])


@pytest.mark.nightly
@pytest.mark.world_size(4)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_cells_of_a_schedule(launch, schedule):
    cells = [cell for cell in CELLS if cell.startswith(f"{schedule}/")]
    finished = launch("pairs.py", *cells, ranks=4, timeout=280).check()
    check([finished.result(rank) for rank in range(4)])
