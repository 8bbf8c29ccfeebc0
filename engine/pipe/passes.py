# SPDX-License-Identifier: Apache-2.0
"""What the passes of a stage are: forward, backward, and the two parts of a backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import Tensor

from wavemare.engine.pipe.micro_batch import MicroBatch, Tensors, as_tuple
from wavemare.engine.pipe.split_backward import SplitBackward
from wavemare.errors import ModelError

if TYPE_CHECKING:
    from wavemare.engine.pipe.engine import PipelineEngine


class StagePasses:
    """Runs the passes of this rank's stages, the active one of its module at a time.

    Args:
        engine: Its DeepSpeed part is built; its messages are not yet.
        split: Whether its plan splits backward passes.

    Attributes:
        splitter: Defers weight gradients in steps with split backward passes; None before them.
        splits: Whether the present step has any.
    """

    def __init__(self, engine: PipelineEngine, *, split: bool) -> None:
        self._engine = engine
        self._module = engine.module
        self.splitter = self._new_splitter() if split else None
        self.splits = False

    def _new_splitter(self) -> SplitBackward:
        # DeepSpeed's wrappers have hooks where gradients are accumulated.
        return SplitBackward(self._module, direct=self._engine.steps_plainly)

    @contextmanager
    def step(self, *, split: bool) -> Iterator[None]:
        """Return the context of an optimizer step's passes.

        Args:
            split: Whether its backward passes are split.
        """
        if not split:
            yield
            return
        if self.splitter is None:
            self.splitter = self._new_splitter()
        self.splits = True
        try:
            with self.splitter.step():
                yield
        finally:
            self.splits = False

    def first_inputs(self, inputs: Any) -> Tensors:
        """Return what a batch gives to the first layer, as leaves."""
        tensors = as_tuple(inputs)
        if self._engine._reentrant_activation_checkpointing():
            tensors = tuple(t.clone().requires_grad_(t.is_floating_point()) for t in tensors)
        return tensors[0] if isinstance(inputs, Tensor) else tensors

    def forward(self, micro_batch: MicroBatch, *, is_last: bool) -> None:
        """Do a forward pass; the micro-batch gets its outputs, or on the last stage its loss.

        Raises:
            ModelError: No gradient would come to weights that are trained, or the loss cannot be
                differentiated.
        """
        engine, inputs = self._engine, micro_batch.inputs
        # Cloned because a layer may change its input in place, and leaves must not change.
        clones = tuple(tensor.clone() for tensor in as_tuple(inputs))
        outputs = engine.call_module(clones[0] if isinstance(inputs, Tensor) else clones)
        if not self._module.training:
            checkpointing.reset()  # no backward pass will free the buffers of its checkpoints
        trains = torch.is_grad_enabled()
        if not is_last:
            micro_batch.outputs = outputs
            if trains and not any(t.requires_grad for t in as_tuple(outputs)):
                self._check_frozen(outputs)
            return
        loss_fn = self._module.loss_fn if trains or engine._compute_loss else None
        micro_batch.loss = outputs if loss_fn is None else loss_fn(outputs, micro_batch.labels)
        if engine.eval_return_logits:
            engine.outputs = outputs
        if trains and not isinstance(micro_batch.loss, Tensor):
            reason, remedy = "training takes the gradient of one tensor", "Return it alone"
            raise ModelError("loss_fn", type(micro_batch.loss).__name__, reason, remedy)

    def backward(self, micro_batch: MicroBatch, *, is_last: bool) -> None:
        """Do a whole backward pass; the micro-batch's inputs get their gradients.

        Args:
            micro_batch: Its forward pass is done.
            is_last: Whether the stage is the last one.
        """
        if is_last:
            self._engine.backward_from(micro_batch.loss)
        else:
            self._engine.accumulate(micro_batch.backward)

    def input_gradient(
        self, micro_batch: MicroBatch, place: tuple[int, int], *, is_last: bool
    ) -> None:
        """Do the part of a backward pass that gives the gradients of the inputs; as `backward`.

        Args:
            micro_batch: Its forward pass is done.
            place: Stage and number of the micro-batch.
            is_last: Whether the stage is the last one.
        """
        assert self.splitter is not None
        with self.splitter.input_pass(place):
            self.backward(micro_batch, is_last=is_last)

    def weight_gradient(self, place: tuple[int, int]) -> None:
        """Do the other part, which gives the gradients of the weights."""
        assert self.splitter is not None
        self._engine.accumulate(partial(self.splitter.backward_weight, place))

    def _check_frozen(self, outputs: Any) -> None:
        """Refuse outputs without a graph, unless the active stage has nothing to train."""
        layers = [layer for layer in self._module.forward_funcs if hasattr(layer, "parameters")]
        if not any(p.requires_grad for layer in layers for p in layer.parameters()):
            return
        checkpoints = self._engine._reentrant_activation_checkpointing()
        reason = "this stage has weights to train, and none of its outputs needs a gradient"
        if checkpoints:
            reason += ": reentrant activation checkpoints lose the gradients of a group of layers "
            reason += "whose inputs are all integers or need no gradient"
        remedy = (
            'Set "use_reentrant": false in the section "pipeline" of the configuration'
            if checkpoints
            else "Let the layers return what depends on their weights, or freeze these"
        )
        shapes = [tuple(t.shape) for t in as_tuple(outputs)]
        raise ModelError("activations", shapes, reason, remedy)
