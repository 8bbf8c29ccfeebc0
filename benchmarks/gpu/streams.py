# SPDX-License-Identifier: Apache-2.0
"""Part ``streams``: two waves on two streams beside one, for a model too small for the device.

Its kernels leave most of a GPU idle, which is what the Wavelet paper's gain comes from. The waves
have the weights in common, and gradients of their own, which are added at the end of a step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.request import ONE_STREAM
from benchmarks.gpu.run import skip
from benchmarks.gpu.timing import Scene, make_rows
from benchmarks.ranks import SEED
from benchmarks.run import describe_error

_TWO_STREAMS = "two-streams"
_GRAPHS = "-graphs"
_MICRO_BATCHES = 8
_TOLERANCE = 1e-5
"""Of the norm: sums of another order."""


class _Wave:
    """A replica of the model, with gradients and a stream of its own.

    Args:
        model: Replicas have its weights.
        stream: None for the current one.
        batches: Its micro-batches, each (batch, tokens, width).
    """

    def __init__(self, model: nn.Module, stream: Any, batches: list[Tensor]) -> None:
        self.model = copy.deepcopy(model)
        for own, shared in zip(self.model.parameters(), model.parameters(), strict=True):
            own.data = shared.data
            own.grad = torch.zeros_like(own)
        self.stream = stream
        self.batches = batches
        self.graphs: list[Any] = []

    def on_stream(self) -> Any:
        """Return a context in which work is queued on the wave's stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def clear(self) -> None:
        """Set the gradients to zero, where they are."""
        self.model.zero_grad(set_to_none=False)

    def run(self, number: int) -> None:
        """Compute the gradients of a micro-batch."""
        with self.on_stream():
            if self.graphs:
                self.graphs[number].replay()
            else:
                self.model(self.batches[number]).square().mean().backward()

    def record(self) -> None:
        """Record a graph of each micro-batch; `run` replays it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # graphs need a warm-up beside the default stream
            for batch in self.batches:
                self.model(batch).square().mean().backward()
        torch.cuda.current_stream().wait_stream(stream)
        graphs = []
        for batch in self.batches:
            graph = torch.cuda.CUDAGraph()
            # NCCL's watchdog may ask for events meanwhile, in a thread of its own.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.model(batch).square().mean().backward()
            graphs.append(graph)
        self.graphs = graphs


class _System:
    """A step of some waves.

    Args:
        waves: One or two.
    """

    def __init__(self, waves: list[_Wave]) -> None:
        self._waves = waves

    def __call__(self) -> None:
        """Compute the gradients of all micro-batches, in the first wave's model."""
        for wave in self._waves:
            wave.clear()
        streams = [wave.stream for wave in self._waves if wave.stream is not None]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        for number in range(len(self._waves[0].batches)):
            for wave in self._waves:
                wave.run(number)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        first, *others = (list(wave.model.parameters()) for wave in self._waves)
        for parameters in others:
            for own, other in zip(first, parameters, strict=True):
                assert own.grad is not None
                assert other.grad is not None
                own.grad += other.grad

    def gradients(self) -> Tensor:
        """Return all gradients of a step."""
        self()
        parameters = self._waves[0].model.parameters()
        return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).clone()


def measure(scene: Scene) -> Iterator[dict[str, Any]]:
    """Yield the rows, of a step; with graphs, the host does not hold up the device."""
    case = f"{_MICRO_BATCHES} micro-batches"
    build = partial(_system, scene, *_model(scene))
    makers: dict[str, Callable[[], _System]] = {
        ONE_STREAM: partial(build, 1),
        _TWO_STREAMS: partial(build, 2),
        ONE_STREAM + _GRAPHS: partial(build, 1, recorded=True),
        _TWO_STREAMS + _GRAPHS: partial(build, 2, recorded=True),
    }
    systems: dict[str, _System] = {}
    expected: Tensor | None = None
    for name, make in makers.items():
        if name.endswith(_GRAPHS) and not scene.on_gpu:
            yield skip("streams", "only a GPU records graphs", case=case, system=name)
            continue
        try:
            system = make()
            gradients = system.gradients()
        except RuntimeError as error:
            yield skip("streams", describe_error(error), case=case, system=name)
            continue
        expected = gradients if expected is None else expected
        gap = float((gradients - expected).norm() / expected.norm())
        if gap > _TOLERANCE:
            reason = f"its gradients are off by {gap:g} of their norm"
            yield skip("streams", reason, case=case, system=name)
            continue
        systems[name] = system
    yield from make_rows("streams", case, scene.rounds(systems))


def _model(scene: Scene) -> tuple[nn.Module, list[Tensor]]:
    """Return a small transformer in fp32, and its micro-batches."""
    torch.manual_seed(SEED)
    layers, width, tokens = (2, 16, 8) if scene.job.tiny else (4, 256, 64)
    blocks = [
        nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True
        )
        for _ in range(layers)
    ]
    model = nn.Sequential(*blocks).to(scene.device)
    shape = (2, tokens, width)
    return model, [torch.randn(shape, device=scene.device) for _ in range(_MICRO_BATCHES)]


def _system(
    scene: Scene, model: nn.Module, batches: list[Tensor], count: int, *, recorded: bool = False
) -> _System:
    waves = []
    for number in range(count):
        stream = torch.cuda.Stream() if scene.on_gpu and count > 1 else None
        wave = _Wave(model, stream, batches[number::count])
        if recorded:
            wave.record()
        waves.append(wave)
    return _System(waves)
