# SPDX-License-Identifier: Apache-2.0
"""Forward and backward passes of a pipeline stage, alone or in pairs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from wavemare.engine.context import StageContext
from wavemare.engine.pipe.micro_batch import MicroBatch
from wavemare.engine.waves.passes import Pass, PassRunner
from wavemare.engine.waves.wavelet import AccumulationProtocol
from wavemare.errors import ConfigError
from wavemare.pipeline.plan.plan import Kind

KEY = "wavemare.pipeline.overlap_forward_backward"


class StagePasses:
    """Runs the passes of one stage of a split model.

    In a pair, the all-reduces of one pass overlap the computation of the other.

    Args:
        engine: A pipeline engine.
        forward: Does a micro-batch's forward pass, given what calls the module.
        context: Of each forward pass; gets the micro-batch's number.

    Raises:
        ConfigError: The configuration asks for activation checkpoints.
    """

    def __init__(
        self,
        engine: StageContext,
        forward: Callable[[MicroBatch, Callable[..., Any]], None],
        context: Callable[[int], AbstractContextManager[Any]] = lambda number: nullcontext(),
    ) -> None:
        if engine.module.activation_checkpoint_interval > 0:
            raise ConfigError(
                KEY,
                True,
                "pairs of passes are not tested with DeepSpeed's activation checkpoints",
                "Leave it out, or set activation_checkpoint_interval to 0",
            )
        self._do_forward = forward
        self._context = context
        self._protocol = AccumulationProtocol(engine)
        self._runner = PassRunner(engine.device)

    def forward(self, number: int, micro_batch: MicroBatch) -> None:
        """Do a forward pass; the micro-batch gets its outputs or its loss."""
        self._run(self._runner.alone, self._forward(number, micro_batch))

    def backward(self, number: int, micro_batch: MicroBatch) -> None:
        """Do a backward pass; the micro-batch's inputs get their gradients."""
        self._run(self._runner.alone, self._backward(number, micro_batch))

    def pair(
        self, number: int, micro_batch: MicroBatch, next_number: int, next_micro_batch: MicroBatch
    ) -> None:
        """Do the backward pass of one micro-batch together with the forward pass of another."""
        backward = self._backward(number, micro_batch)
        self._run(self._runner.pair, backward, self._forward(next_number, next_micro_batch))

    def _run(self, run: Callable[..., Any], *passes: Pass) -> None:
        try:
            run(*passes)
        except BaseException:
            self._protocol.discard_step()
            raise

    def _forward(self, number: int, micro_batch: MicroBatch) -> Pass:
        def forward() -> None:
            with self._context(number):
                self._do_forward(micro_batch, self._protocol.forward)

        return Pass(Kind.FORWARD, number, forward)

    def _backward(self, number: int, micro_batch: MicroBatch) -> Pass:
        if micro_batch.loss is None:
            backward = partial(self._protocol.accumulate, micro_batch.backward)
        else:
            backward = partial(self._protocol.backward, micro_batch.loss)
        return Pass(Kind.BACKWARD, number, backward)


def check_overlap(model: Any) -> None:
    """Check that a model is one whose stages sum over ranks.

    Raises:
        ConfigError: It is not a pipeline of a split model.
    """
    grid = model.mpu() if hasattr(model, "mpu") else None
    if grid is None or grid.get_slice_parallel_world_size() == 1:
        raise ConfigError(
            KEY,
            True,
            "there are no sums over ranks that could run behind other passes: "
            f"{type(model).__name__} is no pipeline whose stages are split",
            'Leave it out, or set "tensor_parallel": {"size": 2} and 2 or more stages',
        )
