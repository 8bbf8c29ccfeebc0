# SPDX-License-Identifier: Apache-2.0
"""What is learned: to tell labelled texts apart, made up or from a table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wavemare.bench.training.request import TrainingRequest

__all__ = ["Batch", "Task", "make_task"]

Batch = dict[str, Tensor]
"""``input_ids`` and ``attention_mask``, both (B, T), and ``labels``, (B,); all int64."""

_PADDING = 0
_FIRST_WORD = 5
"""Below are the special tokens, as of most BERT vocabularies."""
_HELD_OUT_TEXTS = 512
_ZIPF_EXPONENT = 1.0
_CLASSES = 4
_MARKERS = 32
_MARKED = 0.1
_MISLABELLED = 0.1


class Task(ABC):
    """Texts to train on without end, and others to be judged by.

    Attributes:
        name: For people.
        num_labels: Number of classes.
        held_out: All texts that are not trained on.
    """

    name: str
    num_labels: int
    held_out: Batch

    @abstractmethod
    def batch(self, step: int, rank: int) -> Batch:
        """Return what a rank trains on in a step: the same in each call."""


class _MadeUpTexts(Task):
    """Words as frequent as in a language, and in each text some that betray its label.

    A tenth of a text's words are drawn from its label's 32 markers. A tenth of the labels are drawn
    anew, so that no model can bring the held-out loss to zero.
    """

    name = "made-up texts"
    num_labels = _CLASSES

    def __init__(self, request: TrainingRequest) -> None:
        self._request = request
        words = request.vocabulary - _FIRST_WORD
        frequency = np.arange(1, words + 1) ** -_ZIPF_EXPONENT
        self._cumulative = np.cumsum(frequency) / frequency.sum()
        generator = np.random.default_rng([request.seed, 1])
        # Markers are words of medium frequency, and every class has alike ones.
        chosen = generator.permutation(words // 2)[: _CLASSES * _MARKERS]
        self._markers = chosen.reshape(_CLASSES, _MARKERS) + _FIRST_WORD
        self.held_out = self._draw(_HELD_OUT_TEXTS, np.random.default_rng([request.seed, 2]))

    def batch(self, step: int, rank: int) -> Batch:
        seed = [self._request.seed, 3, step, rank]
        return self._draw(self._request.batch, np.random.default_rng(seed))

    def _draw(self, count: int, generator: np.random.Generator) -> Batch:
        shape = count, self._request.sequence
        ids = np.searchsorted(self._cumulative, generator.random(shape)) + _FIRST_WORD
        ids = np.minimum(ids, self._request.vocabulary - 1)
        labels = generator.integers(_CLASSES, size=count)
        marked = generator.random(shape) < _MARKED
        which = generator.integers(_MARKERS, size=shape)
        ids = np.where(marked, self._markers[labels[:, None], which], ids)
        anew = generator.random(count) < _MISLABELLED
        labels = np.where(anew, generator.integers(_CLASSES, size=count), labels)
        return _batch(torch.from_numpy(ids), torch.from_numpy(labels))


class _Table(Task):
    """The texts of a table, in an order that is drawn anew for each pass over them."""

    def __init__(self, request: TrainingRequest) -> None:
        from wavemare.data.classification import load_classification
        from wavemare.data.tokenizer import train_tokenizer

        assert request.data is not None
        self._request = request
        corpus = load_classification(request.data)
        self.name, self.num_labels = Path(corpus.name).name, len(corpus.label_names)
        tokenizer = train_tokenizer(corpus.train["text"], request.vocabulary, kind="bert")

        def encode(rows: Any) -> Batch:
            encoded = tokenizer(
                list(rows["text"]),
                padding="max_length",
                truncation=True,
                max_length=request.sequence,
                return_tensors="pt",
            )
            return _batch(encoded["input_ids"], torch.tensor(rows["label"][:]))

        assert tokenizer.pad_token_id == _PADDING
        self._train = encode(corpus.train)
        self.held_out = encode(corpus.validation)

    def batch(self, step: int, rank: int) -> Batch:
        size, texts = self._request.batch, len(self._train["labels"])
        first = (step * self._request.ranks + rank) * size
        numbers = np.arange(first, first + size)
        # The last batch of a pass takes its rest from the next pass.
        chosen = [self._order(int(n) // texts)[int(n) % texts] for n in numbers]
        return {name: values[torch.tensor(chosen)] for name, values in self._train.items()}

    def _order(self, number: int) -> np.ndarray:
        generator = np.random.default_rng([self._request.seed, 3, number])
        return generator.permutation(len(self._train["labels"]))


def make_task(request: TrainingRequest) -> Task:
    """Return the texts that a request asks for, the same on all ranks.

    Raises:
        DataError: The table cannot be read, or is of another kind.
    """
    return _MadeUpTexts(request) if request.data is None else _Table(request)


def _batch(ids: Tensor, labels: Tensor) -> Batch:
    return {"input_ids": ids, "attention_mask": (ids != _PADDING).long(), "labels": labels}
