# SPDX-License-Identifier: Apache-2.0
"""What a run folder says of an engine, which a plan may have built unlike its configuration."""

from types import SimpleNamespace
from typing import Any

import pytest

from wavemare.engine.config import WavemareConfig
from wavemare.observe.engine_facts import EngineFacts

BATCH = {
    "train_batch_size": 24,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 3,
}


def engine(section: dict[str, Any] | None, **values: Any) -> SimpleNamespace:
    """Return what is asked of an engine; of DeepSpeed's own for no section."""
    sizes = {name: lambda size=size: size for name, size in BATCH.items()}
    ours = {} if section is None else {"_sections": WavemareConfig.model_validate(section)}
    return SimpleNamespace(**sizes, **ours, zero_optimization_stage=lambda: 1, **values)


def pipeline(schedule: str, warmup: int = 0) -> dict[str, Any]:
    """Return a section whose length of the pipeline is not the engine's."""
    return {"pipeline": {"schedule": schedule, "pipemare": {"warmup_steps": warmup}}}


@pytest.mark.parametrize(
    ("section", "stages", "schedule", "settled"),
    [
        (pipeline("pipemare", 20), 4, "pipemare", 24),
        (pipeline("pipemare", 20), 1, "data parallel", 0),
        (pipeline("1f1b"), 4, "1f1b", 0),
        (None, 4, "1f1b", 0),
        (None, 1, "data parallel", 0),
    ],
)
def test_the_engine_says_how_the_model_is_laid_out(
    section: dict[str, Any] | None, stages: int, schedule: str, settled: int
) -> None:
    facts = EngineFacts(engine(section, num_stages=stages))
    assert facts.settled == settled
    assert facts.layout() == {
        "processes": 1, "stages": stages, "schedule": schedule, "zero_stage": 1, **BATCH,
    }  # fmt: skip
    configuration = facts.configuration()
    assert configuration["batch"] == BATCH
    assert ("wavemare" in configuration) == (section is not None)
    if section is not None:
        assert configuration["wavemare"]["pipeline"]["stages"] == stages


def test_ranks_that_share_layers_are_those_of_the_engine() -> None:
    assert EngineFacts(engine({"tensor_parallel": {"size": 2}})).tensor_parallel == 2
    assert EngineFacts(engine(None)).tensor_parallel == 1


def test_no_engine_tells_nothing() -> None:
    facts = EngineFacts(None)
    assert (facts.stages, facts.settled, facts.learning_rate) == (1, 0, None)
    assert facts.configuration() == {}
    assert facts.layout() == {"processes": 1}
    assert facts.line(0.5, None) == {"learning_rate": 0.5, "tokens_per_second": None}
