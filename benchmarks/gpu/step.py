# SPDX-License-Identifier: Apache-2.0
"""Part ``step``: a data-parallel step of a GPT in bf16, beside a loop in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

import wavemare
from benchmarks.gpu.request import TORCH_STEP
from benchmarks.gpu.run import skip
from benchmarks.gpu.timing import Scene, make_rows
from benchmarks.ranks import SEED, build_gpt
from benchmarks.request import GptRequest
from benchmarks.run import describe_error
from benchmarks.sparse.step import EngineSystem, StepSystem, TorchSystem

GPT_124M = GptRequest(layers=12, hidden=768, heads=12, vocabulary=50_304, sequence=1024, batch=8)
TINY_GPT = GptRequest(layers=2, hidden=32, heads=2, vocabulary=64, sequence=16, batch=2)
LEARNING_RATE = 1e-4


class _Masters(StepSystem):
    """Plain torch with weights in bf16, and copies in fp32 that the optimizer steps."""

    def __init__(self, model: nn.Module, *, fused: bool) -> None:
        self._model = model.to(torch.bfloat16)
        self._weights = list(model.parameters())
        self._masters = [weight.detach().float() for weight in self._weights]
        self._optimizer = torch.optim.AdamW(self._masters, lr=LEARNING_RATE, fused=fused)

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        """Do an optimizer step; return the loss."""
        loss: Tensor = self._model(**batch).loss
        loss.backward()
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        self._optimizer.step()
        with torch.no_grad():
            for weight, master in zip(self._weights, self._masters, strict=True):
                weight.copy_(master)
        return loss.detach()


def measure(scene: Scene) -> Iterator[dict[str, Any]]:
    """Yield the rows; ``loss`` is of the last step."""
    size = TINY_GPT if scene.job.tiny else GPT_124M
    build: dict[str, Callable[[], StepSystem]] = {
        TORCH_STEP: partial(_torch, scene, size),
        "torch-masters": lambda: _Masters(_model(scene, size), fused=scene.on_gpu),
        "deepspeed": partial(_engine, scene, size, deepspeed.initialize, 0),
        "wavemare": partial(_engine, scene, size, wavemare.initialize, 0),
        "deepspeed-zero1": partial(_engine, scene, size, deepspeed.initialize, 1),
        "wavemare-zero1": partial(_engine, scene, size, wavemare.initialize, 1),
    }
    case = f"{size.batch} x {size.sequence} tokens"
    batch = random_batch(size, scene.device)
    systems: dict[str, StepSystem] = {}
    losses: dict[str, Tensor] = {}

    def step(name: str) -> None:
        losses[name] = systems[name].step(batch)

    for name, make in build.items():
        scene.note(f"building {name}")
        try:
            systems[name] = make()
            step(name)
        except Exception as error:  # too little memory, for example: the others are measured
            systems.pop(name, None)
            yield skip("step", describe_error(error), case=case, system=name)
    samples = scene.rounds({name: partial(step, name) for name in systems})
    found = {name: float(loss) for name, loss in losses.items()}
    yield from make_rows("step", case, samples, loss=found)
    for system in systems.values():
        system.close()


def random_batch(size: GptRequest, device: torch.device) -> dict[str, Tensor]:
    """Return tokens and labels, each (batch, sequence)."""
    generator = torch.Generator().manual_seed(SEED)
    shape = (size.batch, size.sequence)
    tokens = torch.randint(0, size.vocabulary, shape, generator=generator).to(device)
    return {"input_ids": tokens, "labels": tokens}


def autocast_gpt(scene: Scene, size: GptRequest) -> Any:
    """Return a GPT with weights in fp32 that computes in bf16."""
    model = _model(scene, size)
    model.forward = torch.autocast(scene.device.type, torch.bfloat16)(model.forward)
    return model


def _model(scene: Scene, size: GptRequest) -> Any:
    return build_gpt(size, ties=True).to(scene.device)


def _torch(scene: Scene, size: GptRequest) -> StepSystem:
    model = autocast_gpt(scene, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=scene.on_gpu)
    return TorchSystem(model, optimizer)


def _engine(
    scene: Scene, size: GptRequest, initialize: Callable[..., Any], zero: int
) -> StepSystem:
    model = _model(scene, size)
    # Not one of the configuration: DeepSpeed would compile its own AdamW.
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=scene.on_gpu)
    config = {
        "train_micro_batch_size_per_gpu": size.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": zero},
        "steps_per_print": None,
    }
    return EngineSystem(initialize(model=model, optimizer=optimizer, config=config)[0])
