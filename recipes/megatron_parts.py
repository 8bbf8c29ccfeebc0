# SPDX-License-Identifier: Apache-2.0
"""Megatron data as the recipes read it: one data set or a blend, cut by ``--split``."""

from __future__ import annotations

from typing import Any

from wavemare.errors import DataError

__all__ = ["MegatronParts"]

_SPLIT = "969,30,1"  # Megatron's own default


class MegatronParts:
    """The data sets of a source, and which documents of each are for what.

    Args:
        source: Megatron data, as resolved.
        split: The ``--split`` option; None for Megatron's default.
        vocab_size: Size of the tokenizer's vocabulary.

    Raises:
        DataError: A file is missing or damaged.
        ConfigError: The shares cannot be read.
    """

    def __init__(self, source: Any, split: str | None, vocab_size: int) -> None:
        from wavemare.data import open_indexed, split_ranges

        self.weights = source.weights or None
        self.stores = [open_indexed(p).store(vocab_size, sequences=True) for p in source.files]
        self._split = split or _SPLIT
        ranges = [split_ranges(self._split, store.num_documents) for store in self.stores]
        self._train, self._held_out, _ = zip(*ranges, strict=True)

    def ends(self) -> list[tuple[Any, Any]]:
        """Return the tokens to train on and those held out, of each data set."""
        return [
            (store.select(train.start, train.stop), store.select(held_out.start, held_out.stop))
            for store, train, held_out in zip(self.stores, self._train, self._held_out, strict=True)
        ]

    def samples(self, sequence_length: int, num_samples: int, seed: int) -> tuple[Any, Any]:
        """Return the samples to train on, in the order of Megatron's GPT, and those held out.

        Samples have ``sequence_length`` tokens and do not overlap (Megatron's
        ``add_extra_token_to_sequence`` off): the model shifts the labels.

        Raises:
            DataError: No document is held out.
        """
        from torch.utils.data import ConcatDataset

        from wavemare.data import MegatronSamples, blended_samples

        if not any(self._held_out):
            reason = "by these shares no document is held out"
            remedy = "Give the second share more, or more documents"
            raise DataError("--split", self._split, reason, remedy)
        train = blended_samples(
            self.stores,
            self._train,
            self.weights,
            num_samples=num_samples,
            sequence_length=sequence_length,
            seed=seed,
        )
        held_out = [
            MegatronSamples(
                store, part, num_samples=None, sequence_length=sequence_length, seed=seed
            )
            for store, part in zip(self.stores, self._held_out, strict=True)
            if part
        ]
        return train, ConcatDataset(held_out)
