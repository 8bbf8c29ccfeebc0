# SPDX-License-Identifier: Apache-2.0
"""The kinds of transformers models that can become a pipeline, and their losses, whole or split."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertForMaskedLM, BertForSequenceClassification, GPT2LMHeadModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForSequenceClassificationLoss

from wavemare.engine.labels import shifts_labels
from wavemare.errors import ConfigError, ModelError, did_you_mean
from wavemare.models.activations import SideInputs
from wavemare.models.chains import (
    classification_chain,
    decoder_chain,
    gpt2_chain,
    has_plan,
    masked_lm_chain,
    masked_lm_spares,
)
from wavemare.models.deferred import copy_of
from wavemare.models.layers import Head, PipelineLayer, TiedHead, TokenEmbedding
from wavemare.parallel.tensor.layers import (
    VocabParallelHead,
    VocabularyShare,
    copy_to_group,
    gather_from_group,
    next_tokens,
    vocab_parallel_cross_entropy,
)
from wavemare.parallel.tensor.partition import marked, split_embedding

SUPPORTED = (
    "GPT2LMHeadModel, BertForMaskedLM, BertForSequenceClassification, and causal language models "
    "whose configuration has a base_model_pp_plan (llama, qwen3, mistral, gpt_neox, ...)"
)

_DECODER_INPUTS = ("input_ids", "attention_mask", "position_ids")
_BERT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")


Loss = Callable[..., Tensor]
"""From (logits, labels), or (logits, labels, number of items), to a scalar. It is a mean over the
labels that count; given that number, the sum over them divided by it, if the model does so."""


@dataclass(frozen=True)
class LanguageModelLoss:
    """The cross-entropy over the labels other than -100.

    Args:
        function: transformers' loss of the head, ``ForCausalLMLoss``; None for the mean that a
            masked language model computes itself.
        vocab_size: Size of the logits' last dimension.
        shifts_labels: Whether the first label of each sequence is compared with nothing.
        model: Returns the model, which may get another ``loss_function``, or None if it is gone.
    """

    function: Callable[..., Tensor] | None
    vocab_size: int
    shifts_labels: bool = True
    model: Callable[[], Any] = lambda: None

    @property
    def counts_items(self) -> bool:
        """Whether a number of items divides the sum."""
        return self.function is not None

    @property
    def is_own(self) -> bool:
        """Whether it is now another one than transformers' of the class."""
        now = self._now
        return now is not self.function or (now is not None and now not in LOSS_MAPPING.values())

    @property
    def _now(self) -> Callable[..., Tensor] | None:
        if self.function is None:
            return None
        return getattr(self.model(), "loss_function", self.function)

    def __call__(self, logits: Tensor, labels: Tensor, items: Any = None) -> Tensor:
        """Return the loss of logits (batch, sequence, vocabulary) and labels (batch, sequence)."""
        function = self._now
        if function is None:  # unlike transformers' function of that purpose, BERT's own is
            # not in fp32
            return F.cross_entropy(logits.view(-1, self.vocab_size), labels.view(-1))
        return function(
            logits=logits, labels=labels, vocab_size=self.vocab_size, num_items_in_batch=items
        )


@dataclass(frozen=True)
class ClassificationLoss:
    """The loss of transformers' sequence classification.

    Args:
        num_labels: Number of outputs.
        problem_type: ``regression``, ``single_label_classification``,
            ``multi_label_classification`` or None: decided by each batch as transformers does.
    """

    num_labels: int
    problem_type: str | None
    counts_items = False
    shifts_labels = False

    def __call__(self, logits: Tensor, labels: Tensor, items: Any = None) -> Tensor:
        """Return the mean loss of logits (batch, labels) and labels (batch,) or (batch, labels)."""
        # transformers writes its decision into the configuration that it is given; only the last
        # stage sees labels, so it gets one of its own.
        config: Any = SimpleNamespace(num_labels=self.num_labels, problem_type=self.problem_type)
        return ForSequenceClassificationLoss(labels, logits, config)


@dataclass(frozen=True)
class Family:
    """How the models of a kind are taken apart.

    Args:
        name: ``gpt2``, ``bert`` or ``decoder``.
        accepted: Batch entries that the layers understand.
        default: Those that travel unless the caller declares others.
        chain: From a model and the declared names to its layers.
        loss: From a model to its loss.
        spares: From a model to weights that stand for others in its state dict that its forward
            pass does not use, by the names of these.
    """

    name: str
    accepted: tuple[str, ...]
    default: tuple[str, ...]
    chain: Callable[[Any, Sequence[str]], list[PipelineLayer]]
    loss: Callable[[Any], Loss]
    spares: Callable[[Any], Mapping[str, Tensor]] = lambda model: {}

    def declared(self, inputs: Sequence[str] | None) -> tuple[str, ...]:
        """Check declared names, or return the default ones.

        Raises:
            ConfigError: ``input_ids`` is not first, or a name is unknown or given twice.
        """
        if inputs is None:
            return self.default
        names = tuple(inputs)
        key, given = "wavemare.pipeline.inputs", list(names)
        if names[:1] != ("input_ids",):
            raise ConfigError(key, given, "'input_ids' is not the first name", "Put it first")
        if len(set(names)) < len(names):
            raise ConfigError(key, given, "a name is given twice", "Give each name once")
        for name in names:
            if name not in self.accepted:
                reason = f"models of the family {self.name} do not take {name!r}"
                raise ConfigError(key, given, reason, did_you_mean(name, self.accepted))
        return names


def _causal_loss(model: Any) -> Loss:
    vocabulary = model.config.vocab_size
    shifts, held = shifts_labels(model), weakref.ref(model)
    return LanguageModelLoss(model.loss_function, vocabulary, shifts, held)


def _masked_loss(model: Any) -> Loss:
    return LanguageModelLoss(None, model.config.vocab_size, shifts_labels=False)


def _classification_loss(model: Any) -> Loss:
    return ClassificationLoss(model.config.num_labels, model.config.problem_type)


_GPT2 = Family("gpt2", _DECODER_INPUTS, _DECODER_INPUTS[:2], gpt2_chain, _causal_loss)
_BERT_MLM = Family(
    "bert", _BERT_INPUTS, _BERT_INPUTS[:3], masked_lm_chain, _masked_loss, masked_lm_spares
)
_BERT_CLS = Family(
    "bert", _BERT_INPUTS, _BERT_INPUTS[:3], classification_chain, _classification_loss
)
_DECODER = Family("decoder", _DECODER_INPUTS, _DECODER_INPUTS[:2], decoder_chain, _causal_loss)

ACCEPTED = {family.name: family.accepted for family in (_GPT2, _BERT_MLM, _DECODER)}
"""Batch entries that the layers of each family understand."""


def family_of(model: Any) -> Family:
    """Return the family of a model.

    Raises:
        ModelError: The class is not supported; names the supported classes.
    """
    exact = {
        GPT2LMHeadModel: _GPT2,
        BertForMaskedLM: _BERT_MLM,
        BertForSequenceClassification: _BERT_CLS,
    }
    for kind, family in exact.items():
        if isinstance(model, kind):
            return family
    if has_plan(model):
        return _DECODER
    raise ModelError(
        "model",
        type(model).__name__,
        "this class cannot be cut into pipeline stages",
        f"Use one of {SUPPORTED}; or train it with one stage",
    )


class SplitTiedHead(TiedHead):
    """An output projection with this rank's rows of the word embedding.

    Args:
        inputs: Names of the tensors that enter the first layer.
        tied: The layer that owns the weights, a ``VocabParallelEmbedding``.
        bias: This rank's part of a bias of its own, (rows,).
    """

    def __init__(
        self, inputs: Sequence[str], tied: TokenEmbedding, bias: nn.Parameter | None = None
    ) -> None:
        super().__init__(inputs, tied, bias)
        embedding: Any = tied.embedding
        self._share: VocabularyShare = embedding.share
        self._group = embedding.group

    def run(self, hidden: Tensor, sides: SideInputs) -> Tensor:
        """Return this rank's logits, (batch, sequence, rows)."""
        return super().run(copy_to_group(hidden, self._group), sides)

    def untied(self) -> Head:
        """Return a head with a copy of this rank's rows; the bias is the same parameter."""
        weight: Any = self.tied.embedding.weight
        own = copy_of(weight)
        marked(own, weight.tensor_partition, weight.whole_numel)
        return Head(self.inputs, VocabParallelHead(own, self.bias, self._share, self._group))


@dataclass(frozen=True)
class SplitLoss:
    """The cross-entropy of logits that are spread over ranks, over the labels other than -100.

    A loss function of the caller's own gets the logits of the whole vocabulary.

    Args:
        whole: The loss of whole logits.
        share: Which tokens this rank's logits are of.
        group: The ranks.
    """

    whole: LanguageModelLoss
    share: VocabularyShare
    group: Any

    @property
    def shifts_labels(self) -> bool:
        """Whether a position predicts the next one's label."""
        return self.whole.shifts_labels

    @property
    def counts_items(self) -> bool:
        """Whether a number of items divides the sum; else the loss is the mean."""
        return self.whole.counts_items

    def __call__(self, logits: Tensor, labels: Tensor, items: Any = None) -> Tensor:
        """Return the loss of logits (batch, sequence, rows) and labels (batch, sequence)."""
        if self.whole.is_own:
            return self.whole(self.gather(logits), labels, items)
        shifted = next_tokens(labels) if self.shifts_labels else labels
        items = items if self.counts_items else None
        return vocab_parallel_cross_entropy(logits, shifted, self.share, self.group, items)

    def gather(self, logits: Tensor) -> Tensor:
        """Return the logits of all tokens on all ranks, (batch, sequence, tokens)."""
        return gather_from_group(logits, self.group)[..., : self.share.tokens]


def split_chain(chain: Sequence[PipelineLayer]) -> tuple[PipelineLayer, ...]:
    """Return the layers of a split model, given those that its family makes of a whole one."""
    return tuple(
        SplitTiedHead(layer.inputs, layer.tied, layer.bias)
        if isinstance(layer, TiedHead)
        else layer
        for layer in chain
    )


def whole_logits(loss: Any, outputs: Any) -> Tensor:
    """Return the logits of the whole vocabulary, (batch, sequence, tokens).

    Args:
        loss: Of a pipeline; a split model's gathers them from the ranks, which all call this.
        outputs: Of the last layer: logits, or these and the sums of routers.
    """
    logits = outputs if isinstance(outputs, Tensor) else outputs[0]
    head = find_split_loss(loss)
    return logits if head is None else head.gather(logits)


def find_split_loss(loss: Any) -> SplitLoss | None:
    """Return the loss inside others that knows how logits are spread over ranks, if one does."""
    while loss is not None and not isinstance(loss, SplitLoss):
        loss = getattr(loss, "main", None)
    return loss


def split_loss(model: nn.Module, loss: Loss) -> Loss:
    """Return the loss of a split model's head, given that of a whole one."""
    if isinstance(loss, ClassificationLoss):
        return loss
    embedding = split_embedding(model)
    return SplitLoss(cast(LanguageModelLoss, loss), embedding.share, embedding.group)
