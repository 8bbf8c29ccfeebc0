# SPDX-License-Identifier: Apache-2.0
"""The memory that ``wavemare plan memory`` predicts, and the peak that two ranks have."""

import json
from importlib.util import find_spec

import pytest
import transformers

from wavemare.parallel.planner.memory import MemorySettings, rank_memory

SIZES = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 8000,
    "max_position_embeddings": 1024,
}
COMMON = {"stages": 2, "micro_batches": 4, "samples": 2, "sequence": 256, "schedule": "1f1b"}
LORA = {"lora_r": 8, "lora_targets": "all-linear"}
CASES = {
    "lora": {"dtype": "fp32", **LORA},
    "whole": {"dtype": "fp32"},
    "checkpoints": {"dtype": "fp32", "checkpoints": True},
    # In fp32: what kernels of 16 bits need beside their results differs from CPU to CPU.
    "4 bits": {"dtype": "fp32", **LORA, "four_bit": True},
    "double": {"dtype": "fp32", **LORA, "four_bit": True, "double_quant": True},
    "int8": {"dtype": "fp32", **LORA, "int8": True},
}


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=[] if name == "lora" else [pytest.mark.nightly]) for name in CASES],
)
def test_the_peak_of_each_rank_is_near_the_predicted_one(launch, case):
    settings = {**COMMON, **CASES[case]}
    for form, package in (("four_bit", "bitsandbytes"), ("int8", "torchao")):
        if settings.get(form) and find_spec(package) is None:
            pytest.skip(f"needs {package}")
    predicted = rank_memory(transformers.LlamaConfig(**SIZES), MemorySettings(**settings))
    # In processes that have done nothing else.
    program = ("memory_of_ranks.py", json.dumps([SIZES, settings]))
    finished = launch(*program, ranks=2, own=True).check()
    for rank, expected in enumerate(predicted):
        found = finished.result(rank)
        assert found["parts"] == [0, predicted[1].layers[0][0], predicted[1].layers[0][1]]
        assert found["most"] == pytest.approx(expected.total, rel=0.1)
