# SPDX-License-Identifier: Apache-2.0
"""What a user's type checker sees of the package: `make lint` checks this file, nobody runs it."""

from collections.abc import Iterator
from typing import assert_type

import torch
from transformers import PreTrainedModel

import wavemare
from wavemare.comm import SparseComm
from wavemare.engine import DualPipeVEngine, Engine, PipelineEngine
from wavemare.errors import ConfigError, WavemareError


def train(model: PreTrainedModel, batches: Iterator[dict[str, torch.Tensor]]) -> None:
    engine, _, _, _ = wavemare.initialize(model=model, config="ds.json")
    assert_type(engine, Engine | PipelineEngine | DualPipeVEngine)
    loss: torch.Tensor = engine.train_batch(batches)
    assert loss.isfinite()
    assert_type(engine.step_metrics(), dict[str, float])
    engine.save_checkpoint("checkpoints", "last")
    wavemare.save_pretrained(engine, "model")


def annotate(model: PreTrainedModel) -> None:
    with wavemare.stage(), wavemare.split(2):
        wavemare.annotate(model, {"stages": ["h.0-5", "h.6-11"]})


def read(error: ConfigError) -> WavemareError:
    assert_type(error.key, str)
    return error


def reduce(comm: SparseComm, gradient: torch.Tensor) -> None:
    assert_type(comm.allreduce_(gradient, async_op=True).done(), bool)
