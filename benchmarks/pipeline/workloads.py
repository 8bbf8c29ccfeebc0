# SPDX-License-Identifier: Apache-2.0
"""The models that the pipelines of ``benchmarks pipeline`` train, in parts: a GPT, or waits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import set_seed

from benchmarks.device_like import sleep, sleeping
from benchmarks.pipeline.request import PipelineRequest
from benchmarks.ranks import SEED, build_gpt
from benchmarks.request import Waits
from wavemare.models.chains import gpt2_chain
from wavemare.models.families import LanguageModelLoss
from wavemare.models.layers import PipelineLayer
from wavemare.models.timing import layer_times
from wavemare.pipeline.plan.partition import balanced_cuts

_BATCHES = 8
_SYNTHETIC_WIDTH = 64
_INPUTS = ("input_ids",)

Batch = tuple[Tensor, Tensor]
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
"""AdamW, in fp32: the optimizer of all systems that name no other."""
GRADIENT_CLIPPING = 0.0
"""None: by default pipelines of DeepSpeed clip, and torch's do not."""


class Workload(ABC):
    """A model in parts, its loss and its micro-batches; the same on all ranks.

    Attributes:
        loss: From (output, labels) to a scalar.
        batches: Micro-batches (inputs, labels), to be repeated.
        activation_shape: Of the tensor between two parts, in fp32.
        settings: Of the configuration, beside batch and optimizer.
        adamw: AdamW's parameters. The other optimizers have them too.
        rates: The learning rate by optimizer, where it is another one.
    """

    loss: Callable[[Tensor, Tensor], Tensor]
    batches: list[Batch]
    activation_shape: tuple[int, ...]
    settings: Mapping[str, Any] = {"gradient_clipping": GRADIENT_CLIPPING}
    adamw: Mapping[str, Any] = ADAMW
    rates: Mapping[str, float] = {}

    def optimizer_params(self, kind: str) -> dict[str, Any]:
        """Return the parameters of an optimizer; Muon's steps are as large as AdamW's."""
        params = {**self.adamw, "lr": self.rates.get(kind, self.adamw["lr"])}
        return {**params, "adjust_lr_fn": "match_rms_adamw"} if kind == "Muon" else params

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Change the optimizer of a rank before its first step; this changes nothing."""
        return None

    @abstractmethod
    def parts(self, count: int) -> list[nn.Module]:
        """Return new modules of even costs, with the same initial weights each time."""


class GPTWorkload(Workload):
    """GPT-2 without dropout and with a head of its own, on random tokens.

    All processes must build it at the same time: its layers are timed on all of them.
    """

    def __init__(self, request: PipelineRequest) -> None:
        self._request = request
        model, chain = self._build()
        self._weights = layer_times(model, chain, _INPUTS)
        self.loss = LanguageModelLoss(model.loss_function, request.vocabulary)
        self.activation_shape = (request.batch, request.sequence, request.hidden)
        shape = (_BATCHES, request.batch, request.sequence)
        tokens = torch.randint(0, request.vocabulary, shape, generator=_generator())
        self.batches = [(part, part) for part in tokens]

    def parts(self, count: int) -> list[nn.Module]:
        """Cut a new model by the measured times of its layers."""
        _, chain = self._build()
        for parameter in chain[-1].parameters():
            head: Any = parameter
            head.use_muon = False  # an output head is no hidden matrix
        cuts = balanced_cuts(self._weights, count)
        return [nn.Sequential(*chain[cuts[i] : cuts[i + 1]]) for i in range(count)]

    def _build(self) -> tuple[Any, list[PipelineLayer]]:
        model = build_gpt(self._request)
        return model, gpt2_chain(model, _INPUTS)


class SyntheticWorkload(Workload):
    """Layers that sleep: many share a core, and real tensors travel between them."""

    def __init__(self, request: PipelineRequest) -> None:
        self._stages = request.stages
        self._waits = request.waits
        self._step_s = request.step_s
        self.loss = nn.functional.mse_loss
        self.activation_shape = (request.batch, _SYNTHETIC_WIDTH)
        values = torch.randn((_BATCHES, *self.activation_shape), generator=_generator())
        self.batches = [(part, torch.zeros_like(part)) for part in values]

    def parts(self, count: int) -> list[nn.Module]:
        """Return layers whose waits add up to the same whole for every number of parts."""
        set_seed(SEED)
        waits = self._waits.share(self._stages / count)
        return [TimedWait(waits) for _ in range(count)]

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the steps of an optimizer sleep, too."""
        seconds = self._step_s[type(optimizer).__name__]
        optimizer.register_step_pre_hook(lambda *_: sleep(seconds))


class TimedWait(nn.Module):
    """A linear layer that sleeps in its passes.

    Args:
        waits: How long.
    """

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.linear = nn.Linear(_SYNTHETIC_WIDTH, _SYNTHETIC_WIDTH)
        self.waits = waits
        self._run = sleeping(self.linear, self.linear.weight, waits)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 64) to (batch, 64)."""
        return self._run(inputs)


def build_workload(request: PipelineRequest) -> Workload:
    """Return the model of a request; all processes call this together."""
    return SyntheticWorkload(request) if request.synthetic else GPTWorkload(request)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)
