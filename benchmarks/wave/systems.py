# SPDX-License-Identifier: Apache-2.0
"""The steps of ``benchmarks wave``: a split model, and the order of its passes in each system."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.device_like import sleeping
from benchmarks.ranks import SEED, bench_device, build_gpt
from benchmarks.request import Waits
from benchmarks.wave.request import BASELINE, DOMINO, IN_PHASE, TICK_TOCK, WaveRequest
from wavemare.engine.pipe.split_backward import SplitBackward
from wavemare.engine.waves.passes import Pass, PassRunner
from wavemare.errors import CommError
from wavemare.parallel.experts import check_experts, split_experts
from wavemare.parallel.tensor.layers import ParallelLinear
from wavemare.parallel.tensor.split import split_model
from wavemare.pipeline.clock.simulate import Event
from wavemare.pipeline.plan.plan import COLLECTIVES, COMPUTE, Action, Kind

HALVES = "halves"
"""Accumulation of halved micro-batches: not a system, it measures the cost of halving."""
# Sums of halves are rounded in another order.
_TOLERANCE = 1e-4

_Batch = dict[str, Tensor]


class Systems:
    """Runs optimizer steps of each system, without the optimizer; all ranks must call together.

    Args:
        request: The options.
        group: Over which the model is split; by default all ranks.
        dtype: Of the weights.

    Attributes:
        sums_per_micro_batch: Collectives of whole activations: two of each layer in each direction,
            and of layers split by tensors the embedding's, and the head's input gradient's.
    """

    def __init__(
        self, request: WaveRequest, *, group: Any = None, dtype: torch.dtype = torch.float32
    ) -> None:
        self.device = bench_device()
        experts = request.parallel == "experts"
        model = _build(request) if experts or request.llama else build_gpt(request, ties=True)
        asleep = request.compute == "sleep"
        model, group = model.to(self.device, dtype), group or dist.group.WORLD
        if experts:
            if asleep:  # before the exchanges of rows, which do not sleep, are put around experts
                _put_to_sleep(_products_beside_experts(model, request.ranks), request.waits)
            self.model = split_experts(model, group)
        else:
            self.model = split_model(model, group)
            if asleep:
                _put_to_sleep(_split_products(self.model), request.waits)
        self.sums_per_micro_batch = 4 * request.layers + (0 if experts else 2)
        self._runner = PassRunner(self.device)
        self._splitter = SplitBackward(self.model)
        self._saved_tensors: Callable[[], AbstractContextManager[Any]] = nullcontext
        whole = _build_batches(request, self.device)
        halves = [_batch(part) for batch in whole for part in batch["input_ids"].chunk(2)]
        self._steps = {
            BASELINE: partial(self._accumulation, whole),
            IN_PHASE: partial(self._in_phase, whole),
            DOMINO: partial(self._domino, halves),
            TICK_TOCK: partial(self._tick_tock, whole),
            HALVES: partial(self._accumulation, halves),
        }

    def clear(self) -> None:
        """Drop the gradients."""
        self.model.zero_grad()

    def step(
        self,
        name: str,
        recorder: StepRecorder | None = None,
        saved_tensors: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Compute the gradients of a step, and add them to the present ones.

        Args:
            name: Of the system.
            recorder: Learns of the passes.
            saved_tensors: Context of each forward pass.
        """
        self._runner.recorder, self._saved_tensors = recorder, saved_tensors
        self._steps[name]()

    def _accumulation(self, batches: list[_Batch]) -> None:
        for number in range(len(batches)):
            loss = self._runner.alone(self._forward(batches, number))
            self._runner.alone(self._backward(number, loss))

    def _in_phase(self, batches: list[_Batch]) -> None:
        for number in range(0, len(batches), 2):
            if number + 1 == len(batches):
                self._accumulation(batches[number:])
                return
            pair = number, number + 1
            losses = self._runner.pair(*(self._forward(batches, each) for each in pair))
            self._runner.pair(*map(self._backward, pair, losses))

    def _domino(self, halves: list[_Batch]) -> None:
        """Run pairs of halves; a layer sums its input's gradient, then computes its weight's."""

        def compute_weight_gradients() -> None:
            if "pair" in self._splitter.kept_bytes:
                self._splitter.backward_weight("pair")

        self._runner.while_waiting = compute_weight_gradients
        try:
            with self._splitter.step():
                for number in range(0, len(halves), 2):
                    pair = number, number + 1
                    losses = self._runner.pair(*(self._forward(halves, each) for each in pair))
                    with self._splitter.input_pass("pair"):
                        self._runner.pair(*map(self._backward, pair, losses))
                    compute_weight_gradients()
        finally:
            self._runner.while_waiting = None

    def _tick_tock(self, batches: list[_Batch]) -> None:
        loss = self._runner.alone(self._forward(batches, 0))
        for number in range(1, len(batches)):
            backward = self._backward(number - 1, loss)
            _, loss = self._runner.pair(backward, self._forward(batches, number))
        self._runner.alone(self._backward(len(batches) - 1, loss))

    def _forward(self, batches: list[_Batch], number: int) -> Pass:
        def forward() -> Tensor:
            with self._saved_tensors():
                return self.model(**batches[number]).loss / len(batches)

        return Pass(Kind.FORWARD, number, forward)

    def _backward(self, number: int, loss: Tensor) -> Pass:
        return Pass(Kind.BACKWARD, number, loss.backward)

    def gradients(self) -> list[Tensor]:
        """Return copies of the gradients, in the order of the model's weights."""
        return [
            weight.grad.clone() for weight in self.model.parameters() if weight.grad is not None
        ]


def check_gradients(name: str, own: list[Tensor], expected: list[Tensor]) -> bool:
    """Compare a system's gradients with accumulation's.

    Returns:
        Whether they are equal bit for bit.

    Raises:
        CommError: They differ by more than rounding, or tick-tock's at all.
    """
    equal = all(map(torch.equal, own, expected))
    gaps = [
        float((a - b).norm() / b.norm().clamp(min=1e-30))
        for a, b in zip(own, expected, strict=True)
    ]
    if max(gaps) > _TOLERANCE or (name == TICK_TOCK and not equal):
        reason = f"its gradients are off by {max(gaps):g} of their norm"
        raise CommError("system", name, reason, "Report this: its measurements mean nothing")
    return equal


def _build(request: WaveRequest) -> Any:
    """Return a Llama, or a Mixtral with two experts for each rank."""
    import transformers

    experts = {"num_local_experts": 2 * request.ranks, "num_experts_per_tok": 2}
    transformers.set_seed(SEED)
    config = transformers.AutoConfig.for_model(
        "llama" if request.llama else "mixtral",
        num_hidden_layers=request.layers,
        hidden_size=request.hidden,
        intermediate_size=request.hidden * (3 if request.llama else 1),
        num_attention_heads=request.heads,
        num_key_value_heads=request.heads,
        vocab_size=request.vocabulary,
        max_position_embeddings=request.sequence,
        **({} if request.llama else experts),
    )
    return transformers.AutoModelForCausalLM.from_config(config)


class _Product(NamedTuple):
    """A function of a layer that can sleep.

    Args:
        layer: Has it.
        function: Its name.
        weight: Whose gradient it gives.
        numel: How many weights each of its rows meets.
    """

    layer: nn.Module
    function: str
    weight: Tensor
    numel: float


def _split_products(model: nn.Module) -> list[_Product]:
    """Return the products of layers that are split by tensors."""
    layers = [layer for layer in model.modules() if isinstance(layer, ParallelLinear)]
    return [_Product(each, "local_product", each.weight, each.weight.numel()) for each in layers]


def _products_beside_experts(model: Any, ranks: int) -> list[_Product]:
    """Return the linear layers and experts of a Mixtral, whose tokens meet some of the experts."""
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    met = model.config.num_experts_per_tok / model.config.num_local_experts
    return [
        *(_Product(each, "forward", each.weight, each.weight.numel()) for each in linear),
        *(
            _Product(
                each, "forward", each.gate_up_proj, met * sum(p.numel() for p in each.parameters())
            )
            for each in check_experts(model, ranks)
        ),
    ]


def _put_to_sleep(products: Sequence[_Product], waits: Waits) -> None:
    """Let functions sleep in their passes, by their numbers of weights."""
    total = sum(product.numel for product in products)
    for layer, function, weight, numel in products:
        own = getattr(layer, function)
        setattr(layer, function, sleeping(own, weight, waits.share(numel / total)))


def _build_batches(request: WaveRequest, device: torch.device) -> list[_Batch]:
    generator = torch.Generator().manual_seed(SEED)
    shape = (request.micro_batches, request.batch, request.sequence)
    tokens = torch.randint(0, request.vocabulary, shape, generator=generator).to(device)
    return [_batch(part) for part in tokens]


def _batch(tokens: Tensor) -> _Batch:
    return {"input_ids": tokens, "labels": tokens}


class StepRecorder:
    """Records the passes of a step, and the waits for collectives between them.

    Attributes:
        events: In order; events of collectives are the waits for them.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []

    def now(self) -> float:
        """Return the time."""
        return time.perf_counter()

    def note(self, action: Action, start_s: float, end_s: float) -> None:
        """Add an event."""
        self.events.append(Event(action, start_s, end_s))

    @property
    def compute_s(self) -> float:
        """Seconds in passes."""
        return sum(e.end_s - e.start_s for e in self.events if e.action.kind in COMPUTE)

    @property
    def waiting_s(self) -> float:
        """Seconds in which only collectives ran."""
        return sum(e.end_s - e.start_s for e in self.events if e.action.kind in COLLECTIVES)
