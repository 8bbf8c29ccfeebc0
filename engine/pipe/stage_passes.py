# SPDX-License-Identifier: Apache-2.0
"""Forward and backward passes of a pipeline stage, segment by segment, alone or in pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from wavemare.engine.context import StageContext
from wavemare.engine.pipe.micro_batch import MicroBatch, as_tuple
from wavemare.engine.waves.executor import Hooks, WaveExecutor
from wavemare.engine.waves.protocol import AccumulationProtocol
from wavemare.engine.waves.segments import no_shared_parameters
from wavemare.errors import ConfigError
from wavemare.pipeline.plan.plan import Action
from wavemare.pipeline.wave.schedule import backward_pass, forward_pass, pass_pair

KEY = "wavemare.pipeline.overlap_forward_backward"


class StagePasses:
    """Runs the passes of one stage of a split model.

    In a pair, the all-reduces of one pass overlap the computation of the other.

    Results equal the stage's own forward function, bit for bit.

    Args:
        engine: A pipeline engine, whose module has ``stage_segments``.
        forward: Context of each segment's forward pass; gets the micro-batch.

    Raises:
        ConfigError: The configuration asks for activation checkpoints.
    """

    def __init__(
        self,
        engine: StageContext,
        forward: Callable[[int], AbstractContextManager[Any]] = lambda micro_batch: nullcontext(),
    ) -> None:
        if engine.module.activation_checkpoint_interval > 0:
            raise ConfigError(
                KEY,
                True,
                "segments keep their activations, and no checkpoints are made of them",
                "Leave it out, or set activation_checkpoint_interval to 0",
            )
        self._engine = engine
        self._forward_context = forward
        self._segments = engine.module.stage_segments()
        self._count = len(self._segments.names)
        self._protocol = AccumulationProtocol(engine, steps=False)
        hooks = self._protocol.hooks()
        self._executor = WaveExecutor(
            self._segments,
            engine.module,
            no_shared_parameters(self._segments),
            Hooks(
                forward=self._forward_hook,
                begin_backward=hooks.begin_backward,
                scale=hooks.scale,
                end_backward=hooks.end_backward,
            ),
        )

    def forward(self, number: int, micro_batch: MicroBatch) -> None:
        """Do a forward pass; the micro-batch gets its outputs or its loss."""
        self._run(forward_pass(self._count, number), micro_batch)
        self._end_forward(number, micro_batch)

    def backward(self, number: int, micro_batch: MicroBatch) -> None:
        """Do a backward pass; the micro-batch's inputs get their gradients."""
        self._begin_backward(number, micro_batch)
        self._run(backward_pass(self._count, number))
        self._end_backward(number, micro_batch)

    def pair(
        self, number: int, micro_batch: MicroBatch, next_number: int, next_micro_batch: MicroBatch
    ) -> None:
        """Do the backward pass of one micro-batch together with the forward pass of another."""
        self._begin_backward(number, micro_batch)
        plan = pass_pair(
            self._segments.sums_output,
            self._segments.sums_gradient,
            backward=number,
            forward=next_number,
        )
        self._run(plan, next_micro_batch)
        self._end_backward(number, micro_batch)
        self._end_forward(next_number, next_micro_batch)

    def discard(self) -> None:
        """Drop the micro-batches in flight; they will be done again."""
        self._executor.discard()

    def _run(self, plan: Iterable[Action], forwarded: MicroBatch | None = None) -> None:
        given = [(as_tuple(forwarded.inputs), forwarded.labels)] if forwarded is not None else []
        try:
            for loss in self._executor.run(plan, iter(given)):
                assert forwarded is not None
                forwarded.loss = loss
        except BaseException:
            self._protocol.discard_step()
            raise

    def _end_forward(self, number: int, micro_batch: MicroBatch) -> None:
        if self._segments.head is None:
            activations = self._executor.outputs(number)
            micro_batch.outputs = activations[0] if len(activations) == 1 else activations

    def _begin_backward(self, number: int, micro_batch: MicroBatch) -> None:
        if self._segments.head is None:
            grads = iter(micro_batch.grads)
            self._executor.take_gradients(
                number,
                [
                    next(grads) if output.is_floating_point() else None
                    for output in as_tuple(micro_batch.outputs)
                ],
            )

    def _end_backward(self, number: int, micro_batch: MicroBatch) -> None:
        if not self._segments.continues:
            return
        gradients = self._executor.input_gradients(number)
        for tensor, gradient in zip(as_tuple(micro_batch.inputs), gradients, strict=True):
            if isinstance(gradient, Tensor):
                tensor.grad = gradient

    @contextmanager
    def _forward_hook(self, micro_batch: int) -> Iterator[None]:
        with self._protocol.forward(micro_batch), self._forward_context(micro_batch):
            yield


def check_overlap(model: Any) -> None:
    """Check that a model is one whose stages sum over ranks between segments.

    Raises:
        ConfigError: It is not a pipeline of a split model.
    """
    grid = model.mpu() if hasattr(model, "stage_segments") else None
    if grid is None or grid.get_slice_parallel_world_size() == 1:
        raise ConfigError(
            KEY,
            True,
            "there are no sums over ranks that could run behind other passes: "
            f"{type(model).__name__} is no pipeline whose stages are split",
            'Leave it out, or set "tensor_parallel": {"size": 2} and 2 or more stages',
        )
