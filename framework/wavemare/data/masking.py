# SPDX-License-Identifier: Apache-2.0
"""BERT's masked-token task, as a pure function of seed, epoch and sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import Dataset

from wavemare.data.packing import IGNORED, PackedDataset, Sample
from wavemare.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["MaskedDataset"]

_STREAM = 1  # keeps these random numbers apart from those of the shuffling
_SHORTEST = 4  # [CLS], [SEP] and two tokens between, of which one at least is no document's end
_SHARE_MASKED = 0.8
_SHARE_RANDOM = 0.1


class MaskedDataset(Dataset[Sample]):
    """Windows ``[CLS] tokens [SEP]`` in which some tokens are hidden and are to be found.

    An item is ``{"input_ids": int64 [T], "labels": int64 [T]}``, where ``T`` is the sequence length
    of the packed dataset: its store is cut anew into windows of ``T - 2`` tokens, so that no token
    is lost to the two that are added. Of the tokens chosen 80 % become [MASK], 10 % a random
    token and 10 % stay as they are; labels are -100 elsewhere. Special tokens are never chosen, and
    at least one token is.

    Args:
        packed: The packed tokens and their sequence length.
        tokenizer: The tokenizer of the store, with [CLS], [SEP] and [MASK].
        probability: Chance that a token is chosen.
        seed: Chooses the masks, together with epoch and index.

    Raises:
        ConfigError: The sequences are too short, or the probability is out of range.
        DataError: The tokenizer lacks one of the three tokens.
    """

    def __init__(
        self,
        packed: PackedDataset,
        tokenizer: PreTrainedTokenizerFast,
        probability: float = 0.15,
        seed: int = 0,
    ) -> None:
        if packed.sequence_length < _SHORTEST:
            reason = "[CLS] and [SEP] leave too little room for text"
            remedy = f"Give at least {_SHORTEST}"
            raise ConfigError("sequence_length", packed.sequence_length, reason, remedy)
        if not 0.0 < probability <= 1.0:
            reason = "the share of masked tokens must lie between 0 and 1"
            raise ConfigError("mask_probability", probability, reason, "BERT uses 0.15")
        self._windows = PackedDataset(packed.store, packed.sequence_length - 2)
        self._cls = _special(tokenizer, "cls_token")
        self._sep = _special(tokenizer, "sep_token")
        self._mask = _special(tokenizer, "mask_token")
        self._is_special = np.zeros(max(len(tokenizer), packed.store.vocab_size), dtype=np.bool_)
        self._is_special[tokenizer.all_special_ids] = True
        self._ordinary = np.flatnonzero(~self._is_special[: len(tokenizer)])
        self._probability = probability
        self._seed = seed

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Sample:
        return self.at(index, epoch=0)

    def at(self, index: int, epoch: int) -> Sample:
        """Return a sample with the masks that it has in an epoch.

        Raises:
            DataError: The window holds special tokens alone.
        """
        window = self._windows[index]["input_ids"].numpy()
        sequence = np.random.SeedSequence(self._seed, spawn_key=(_STREAM, epoch, index))
        random = np.random.Generator(np.random.PCG64(sequence))
        chosen = self._choose(window, random, index)
        fate = random.random(len(window))
        masked = chosen & (fate < _SHARE_MASKED)
        replaced = chosen & ~masked & (fate < _SHARE_MASKED + _SHARE_RANDOM)
        inputs = window.copy()
        inputs[masked] = self._mask
        inputs[replaced] = random.choice(self._ordinary, size=len(window))[replaced]
        labels = np.where(chosen, window, IGNORED)
        return {
            "input_ids": torch.from_numpy(np.concatenate([[self._cls], inputs, [self._sep]])),
            "labels": torch.from_numpy(np.concatenate([[IGNORED], labels, [IGNORED]])),
        }

    def _choose(self, window: np.ndarray, random: np.random.Generator, index: int) -> np.ndarray:
        candidates = ~self._is_special[window]
        if not candidates.any():
            reason = f"window {index} holds special tokens alone, so that none can be masked"
            remedy = "Leave blank documents out, or give longer sequences"
            raise DataError("--data", self._windows.store.name, reason, remedy)
        draw = random.random(len(window))
        chosen = candidates & (draw < self._probability)
        if not chosen.any():
            chosen[np.where(candidates, draw, np.inf).argmin()] = True
        return chosen


def _special(tokenizer: PreTrainedTokenizerFast, role: str) -> int:
    token = getattr(tokenizer, f"{role}_id")
    if token is None:
        reason = f"it has no {role}, which the masked-token task needs"
        raise DataError(
            "--tokenizer", tokenizer.name_or_path, reason, "Use the tokenizer of a BERT model"
        )
    return int(token)
