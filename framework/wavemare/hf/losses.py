# SPDX-License-Identifier: Apache-2.0
"""The loss of a micro-batch where the engine calls the model: what ``compute_loss`` returns.

Labels are shifted, smoothed and counted by transformers' own code, or by the script's, whatever the
engine is. On a pipeline's last stage a `StageModel` stands for the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers.modeling_outputs import CausalLMOutput

from wavemare.errors import ModelError
from wavemare.hf.steps import MicroBatch
from wavemare.hf.trl import fused_output
from wavemare.lazy import Proxy
from wavemare.models.adapters import is_adapted
from wavemare.models.families import find_split_loss
from wavemare.models.packed import follows
from wavemare.parallel.tensor.output import with_late_logits

_ELSEWHERE = "a pipeline's last stage has the logits, the loss and the batch alone"
_REMEDY = (
    "Call the model once with the entries of the batch, and use the logits and the loss; or train "
    "data-parallel"
)
_HARMLESS = "return_dict", "use_cache", "logits_to_keep", "num_items_in_batch", "labels"


class StageError(ModelError, AttributeError):
    """What a pipeline's last stage does not have, so that ``hasattr`` of it is False."""


def _refusal(name: str, value: Any, reason: str = _ELSEWHERE) -> StageError:
    return StageError(name, value, reason, _REMEDY)


def refuse_hidden_outputs(model: Any, ignored: Any, *, loss_only: bool) -> None:
    """Refuse to predict what a configuration adds to the logits, of which stages keep nothing.

    Args:
        model: That the Trainer was given, inside adapters.
        ignored: ``ignore_keys`` of the evaluation; may be None.
        loss_only: Whether no predictions are asked for.

    Raises:
        ModelError: ``predictions`` would lack hidden states or attentions.
    """
    for name in ("hidden_states", "attentions"):
        key = f"output_{name}"
        if not loss_only and getattr(model.config, key, False) and name not in (ignored or ()):
            remedy = f'Set it to False, or give ignore_keys=["{name}"]'
            raise ModelError(f"config.{key}", True, _ELSEWHERE, remedy)


class TrainerLoss:
    """The loss of a micro-batch: what the Trainer's ``compute_loss`` returns for it.

    Args:
        trainer: Whose ``compute_loss`` it is.
        model: That the Trainer was given.

    Attributes:
        model: The one inside adapters.
        recent: The weighted losses of a step that this process has computed; scalars. Whoever
            begins a step clears them.
    """

    def __init__(self, trainer: Any, model: Any) -> None:
        self.recent: list[Tensor] = []
        self._trainer = trainer
        self.model = model.get_base_model() if is_adapted(model) else model

    def __call__(self, call: Callable[..., Any], batch: MicroBatch) -> Tensor:
        """Return the weighted loss, scalar.

        Args:
            call: Calls the model with arguments by name.
            batch: On the device.
        """
        return self.of(_Called(self.model, call), batch)

    def of(self, model: Any, batch: MicroBatch) -> Tensor:
        """Return the weighted loss with what stands for the model."""
        inputs, items, weight = batch
        with self._trainer.compute_loss_context_manager():
            loss: Tensor = self._trainer.compute_loss(model, dict(inputs), num_items_in_batch=items)
        loss = loss if weight == 1 else loss * weight
        if weight:
            self.recent.append(loss.detach())
        return loss


class _Called(Proxy):
    """A model that is called in another way; it tells the name of the class inside wrappers."""

    def __init__(self, model: Any, call: Callable[..., Any]) -> None:
        super().__init__(model)
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def _get_name(self) -> str:
        return type(self._inner).__name__


class StageLoss:
    """`TrainerLoss` on a pipeline's last stage, of which it is the loss function.

    Args:
        loss: Of the Trainer.
        engine: The pipeline's. Its loss function is of (logits, labels) or (logits, labels, number
            of items).

    Attributes:
        predict: Evaluates instead, from what stands for the model, and the inputs; None to train.
        predicted: What that returned last, or its error: the other stages must learn of it.
    """

    def __init__(self, loss: TrainerLoss, engine: Any) -> None:
        self.predict: Callable[[Any, dict[str, Any]], Any] | None = None
        self.predicted: Any = None
        self._loss, self._engine, self._head = loss, engine, engine.module.loss_fn

    def __call__(self, outputs: Any, batch: Any) -> Tensor:
        """Return the loss of the last layer's outputs and a `MicroBatch`, or plain labels.

        Raises:
            ModelError: ``compute_loss`` asks for what is not here.
        """
        if not isinstance(batch, MicroBatch):
            loss: Tensor = self._head(outputs, batch)
            return loss
        if self.predict is None and not batch.weight:
            # It fills up a short step: compute_loss may count the batches that it is called for.
            parts = outputs if isinstance(outputs, tuple) else (outputs,)
            return sum((part.sum(dtype=torch.float32) for part in parts), torch.zeros(())) * 0
        model = StageModel(self._loss.model, self._engine, self._head, outputs, batch.inputs)
        if self.predict is None:
            loss = self._loss.of(model, batch)
            model.check_called()
            return loss
        found = None
        try:
            self.predicted = self.predict(model, batch.inputs)
            model.check_called()
            found = self.predicted[0]
        except Exception as error:  # raised where all stages hear of it
            self.predicted = error
        return torch.zeros((), device=self._engine.device) if found is None else found


class StageModel:
    """Stands for the model where the last stage has run: a call returns what came out.

    Args:
        model: That the Trainer was given.
        engine: The pipeline's.
        head: The pipeline's loss function.
        outputs: Of the last layer: logits, or logits and the sums of routers. Rows that have filled
            the micro-batch up follow those of the batch.
        inputs: The batch.

    Attributes:
        config: The model's.
        training: Whether the engine trains.
        device: Of this stage's weights.
        dtype: Of this stage's weights.
    """

    def __init__(
        self, model: Any, engine: Any, head: Any, outputs: Any, inputs: Mapping[str, Any]
    ) -> None:
        self._was_called = False
        self.config = model.config
        self.training = engine.module.training
        one = next(engine.module.parameters(), torch.empty(0, device=engine.device))
        self.device, self.dtype = one.device, one.dtype
        self._modules: dict[str, nn.Module] = {}  # accelerate looks for compiled ones
        self._whole, self._travels = model, engine.module.inputs
        self._head, self._outputs, self._inputs = head, outputs, inputs

    def _get_name(self) -> str:
        return type(self._whole).__name__

    def check_called(self) -> None:
        """Check that a loss came of the batch.

        Raises:
            ModelError: The model was not called.
        """
        if not self._was_called:
            raise _refusal("compute_loss", "no call", "it has not called the model")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _refusal(f"model.{name}", type(self._whole).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model's ``forward`` would for the batch: the loss, if labels are given.

        Without gradients it may be called again, which gives the same numbers.

        Raises:
            ModelError: The stages have not computed what is asked for.
        """
        if self._was_called and torch.is_grad_enabled():
            reason = "the stages make one forward pass of each micro-batch"
            raise _refusal("compute_loss", "a second call of the model", reason)
        self._was_called = True
        fused = kwargs.pop("fused_lm_head", False)  # of TRL
        named = _by_name(type(self._whole).forward, self._whole, *args, **kwargs)
        shifted = named.pop("shift_labels", None) if fused else None
        self._check(named)
        labels, items = named.get("labels"), named.get("num_items_in_batch")
        if not fused:
            return self._output(labels, items)
        logits = self._output(None, None).logits
        if shifted is not None:
            return fused_output(logits, shifted, items, shifted=True)
        return fused_output(logits, named["labels"], items, shifted=False)

    def _check(self, named: Mapping[str, Any]) -> None:
        """Refuse arguments that differ from what the stages have computed with."""
        for name in dict.fromkeys([*self._travels, *named]):
            own, value = self._inputs.get(name), named.get(name)
            if name in self._travels:
                if not _are_equal(value, own):
                    reason = "the stages have computed with this entry as the batch has it"
                    raise _refusal(name, type(value).__name__, reason)
            elif name == "attention_mask" and value is own:
                continue  # of ones alone, else the stages would refuse it
            elif follows(name, value, self._positions()):
                continue
            elif name not in _HARMLESS and value is not None and value is not False:
                raise _refusal(name, value if isinstance(value, bool) else type(value).__name__)
        if named.get("return_dict", True) is False or named.get("logits_to_keep"):
            raise _refusal("forward", "return_dict=False or logits_to_keep")

    def _positions(self) -> Any:
        return self._inputs.get("position_ids") if "position_ids" in self._travels else None

    def _output(self, labels: Any, items: Any) -> Any:
        outputs = _first_rows(self._outputs, len(self._inputs["input_ids"]))
        if not torch.is_grad_enabled():
            outputs = tree_map_only(Tensor, Tensor.detach, outputs)
        logits = outputs[0] if isinstance(outputs, tuple) else outputs  # beside sums of routers
        loss = None
        if labels is not None:
            loss = self._head(outputs, labels, *(() if items is None else (items,)))
        output, split = StageOutput(loss=loss, logits=logits), find_split_loss(self._head)
        return output if split is None else with_late_logits(output, partial(split.gather, logits))


class StageOutput(CausalLMOutput):
    """A model's output of which the last stage has the loss and the logits alone."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("hidden_states", "attentions") and self.__dict__.get(name) is None:
            raise _refusal(f"outputs.{name}", None)
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise _refusal(f"outputs.{name}", None)


def _by_name(function: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a method by their names."""
    signature = inspect.signature(function)
    own, *parameters = signature.parameters.values()
    named = dict(signature.bind(model, *args, **kwargs).arguments)
    named.pop(own.name)
    for each in parameters:
        if each.kind is each.VAR_KEYWORD:
            named |= named.pop(each.name, {})
    return named


def _are_equal(value: Any, own: Any) -> bool:
    if value is own:
        return True
    tensors = isinstance(value, Tensor) and isinstance(own, Tensor)
    return tensors and value.shape == own.shape and torch.equal(value, own)


def _first_rows(outputs: Any, rows: int) -> Any:
    """Return outputs without the rows that have filled a micro-batch up."""
    if isinstance(outputs, tuple):
        return (_first_rows(outputs[0], rows), *outputs[1:])
    return outputs if len(outputs) == rows else outputs[:rows]
