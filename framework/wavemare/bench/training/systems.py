# SPDX-License-Identifier: Apache-2.0
"""The systems that `wavemare bench training` compares, each with a model of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import wavemare
from wavemare.bench.training.request import BASELINE, BOUND, TrainingRequest
from wavemare.bench.training.task import Batch, Task

__all__ = ["System", "build_system", "held_out_loss"]

_EVALUATED_AT_ONCE = 64
"""Texts."""


class System(ABC):
    """One system on one rank.

    Args:
        model: To be trained.
        optimizer: Of its parameters.

    Attributes:
        figures: What the collectives of the last step did, by name; empty for stock systems.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self._optimizer = optimizer
        self.figures: Mapping[str, float] = {}

    def set_learning_rate(self, rate: float) -> None:
        """Change the learning rate of the steps to come."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    @abstractmethod
    def step(self, batch: Batch) -> Tensor:
        """Do an optimizer step; return this rank's loss."""

    def close(self) -> None:
        """Give back what is held."""
        return None


class _Alone(System):
    """Plain torch, and the torch systems: only what the backward pass calls differs."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, called: nn.Module
    ) -> None:
        super().__init__(model, optimizer)
        self._called = called

    def step(self, batch: Batch) -> Tensor:
        loss: Tensor = self._called(**batch).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()


class _WavemareDdp(_Alone):
    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, request: TrainingRequest
    ) -> None:
        from wavemare.comm import SparseComm, register_ddp_hook

        called = DistributedDataParallel(model)
        self._comm = SparseComm(block=request.block, transport="mpi")
        register_ddp_hook(called, self._comm)
        super().__init__(model, optimizer, called)

    def step(self, batch: Batch) -> Tensor:
        loss = super().step(batch)
        self.figures = self._comm.totals.take()
        return loss

    def close(self) -> None:
        self._comm.close()


class _Engine(System):
    """DeepSpeed's engine, or wavemare's."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, engine: Any) -> None:
        super().__init__(model, optimizer)
        self._engine = engine

    def step(self, batch: Batch) -> Tensor:
        loss: Tensor = self._engine(**batch).loss
        self._engine.backward(loss)
        self._engine.step()
        if hasattr(self._engine, "step_metrics"):
            self.figures = self._engine.step_metrics()
        return loss.detach()

    def close(self) -> None:
        self._engine.destroy()


def build_system(name: str, request: TrainingRequest, task: Task) -> System:
    """Build a system; all ranks must call it together.

    Args:
        name: One of `wavemare.bench.training.request.SYSTEMS`.
        request: Model and data.
        task: What is learned.
    """
    model = _build_model(request, task.num_labels)
    if name == "deepspeed-sparse":
        model.get_input_embeddings().sparse = True
    optimizer = torch.optim.AdamW(model.parameters(), lr=request.learning_rate)
    if name == BOUND:
        return _Alone(model, optimizer, model)
    if name == "torch-ddp":
        return _Alone(model, optimizer, DistributedDataParallel(model))
    if name == "wavemare-ddp":
        return _WavemareDdp(model, optimizer, request)
    initialize: Any = deepspeed.initialize
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": request.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # by default DeepSpeed clips, and the others do not
        "zero_optimization": {"stage": 1 if name.endswith("-zero1") else 0},
        "steps_per_print": None,
    }
    if name.startswith("wavemare"):
        initialize = wavemare.initialize
        config["wavemare"] = {"sparse_collective": _section(name, request)}
    elif name == "deepspeed-sparse":
        optimizer.register_step_pre_hook(_make_dense)
    else:
        assert name.removesuffix("-zero1") == BASELINE
    engine = initialize(model=model, optimizer=optimizer, config=config)[0]
    return _Engine(model, optimizer, engine)


def _build_model(request: TrainingRequest, num_labels: int) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(request.seed)
    # Without dropout, equal gradients give equal losses whatever ran between two steps.
    config = BertConfig(
        vocab_size=request.vocabulary,
        hidden_size=request.hidden,
        num_hidden_layers=request.layers,
        num_attention_heads=request.heads,
        intermediate_size=4 * request.hidden,
        max_position_embeddings=request.sequence,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config.num_labels = num_labels
    return BertForSequenceClassification(config)


def _section(name: str, request: TrainingRequest) -> dict[str, Any]:
    mode = "pushpull" if name == "wavemare-pushpull" else "auto"
    transport = "torch" if name.endswith("-gloo") else "mpi"
    section: dict[str, Any] = {"mode": mode, "block": request.block, "transport": transport}
    if name == "wavemare-topk":
        section["compressor"] = {
            "type": "block_topk",
            "ratio": request.ratio,
            "error_feedback": True,
            "warmup_steps": request.compressor_warmup,
        }
    return section


def _make_dense(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Let AdamW take what was reduced sparsely, so that all systems train alike."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()


def held_out_loss(model: nn.Module, task: Task) -> float:
    """Return the mean loss over all held-out texts; all ranks must call it together.

    Args:
        model: The same on all ranks.
        task: Has the texts.
    """
    rank, ranks, size = dist.get_rank(), dist.get_world_size(), _EVALUATED_AT_ONCE
    count = len(task.held_out["labels"])
    total = torch.zeros((), dtype=torch.float64)
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        for first in range(rank * size, count, ranks * size):
            part = {name: values[first : first + size] for name, values in task.held_out.items()}
            total += model(**part).loss * len(part["labels"])
    model.train(was_training)
    dist.all_reduce(total)
    return float(total / count)
