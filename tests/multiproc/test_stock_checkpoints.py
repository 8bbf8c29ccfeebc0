# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of stock DeepSpeed resume here and ours there bit for bit, or are refused by name."""

from itertools import product

import pytest

CASES = ["1-bf16-adamw", "3-fp32-adam", "0-bf16-fused", "2-fp32-fused", "elastic-fp32-adamw"]
CASES += ["moe-fp32-adamw", "pipe1-fp32-fused", "pipe0-bf16-adamw"]
KINDS = ["0", "1", "2", "3", "elastic", "moe", "pipe0", "pipe1"]
MATRIX = ["-".join(cell) for cell in product(KINDS, ["fp32", "bf16"], ["adamw", "adam", "fused"])]

FUSED, TORCH = "DeepSpeed's FusedAdam", "torch's Adam"
OTHERS = {
    "0-bf16-fused:0-bf16-default": (FUSED, TORCH, "WAVEMARE_COMPILED_OPS=1"),
    "2-fp32-fused:2-fp32-adamw": (FUSED, TORCH, 'leave out "torch_adam"'),
    "1-bf16-adamw:1-bf16-fused": (TORCH, FUSED, '"torch_adam": true'),
    "0-bf16-fused:0-bf16-sgd": (FUSED, "momentum (SGD)", "the optimizer that saved it"),
    "elastic-fp32-adamw:elastic-fp32-adamw": ("elastic_checkpoint", "keeps no learning rates"),
}

BY_STOCK = [("stock", "save"), ("ours", "load")]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("cells", [CASES, pytest.param(MATRIX, marks=pytest.mark.nightly)])
def test_checkpoints_resume_in_both_directions_or_are_refused_by_name(launch, tmp_path, cells):
    def run(side, action, *cells):
        results = tmp_path / f"{side}-{action}"
        results.mkdir()
        checkpoints = tmp_path / ("by-stock" if (side, action) in BY_STOCK else "by-us")
        program = ("stock_checkpoints.py", checkpoints, side, action)
        return launch(*program, *cells, folder=results).check()

    stock, ours = (run(side, "save", *cells) for side in ("stock", "ours"))
    elastic = [cell for cell in cells if cell.startswith("elastic")]
    equal = [f"{cell}:{cell}" for cell in cells if cell not in elastic]
    here = run("ours", "load", *OTHERS, *equal)
    # DeepSpeed cannot read its own: of pipelines in bf16 without ZeRO.
    read = [f"{cell}:{cell}" for cell in cells if not cell.startswith("pipe0-bf16")]
    there = run("stock", "load", *read)
    for rank in range(2):
        whole = stock.result(rank)
        assert ours.result(rank) == whole
        for loaded, pairs in ((here, equal), (there, read)):
            for pair in pairs:
                assert loaded.result(rank)[pair] == whole[pair.split(":")[0]], pair
        for pair, words in OTHERS.items():
            refused = here.result(rank)[pair]
            assert refused["error"].startswith("CheckpointError"), refused
            assert all(word in refused["error"] for word in words), refused
            assert refused["untouched"], pair
