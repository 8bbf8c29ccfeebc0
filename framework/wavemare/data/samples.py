# SPDX-License-Identifier: Apache-2.0
"""Samples of equal length from documents laid end to end, plain or with masked tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from wavemare.data.tokens import TokenStore
from wavemare.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


Sample = dict[str, torch.Tensor]

_IGNORED = -100  # the label that the loss leaves out
_MASKING = 1  # separates these random numbers from those of the shuffling
_SHORTEST = 4  # [CLS], [SEP] and two tokens between, at least one of which ends no document
_SHARE_MASKED = 0.8
_SHARE_RANDOM = 0.1


class PackedDataset(Dataset[Sample]):
    """Windows of ``sequence_length`` tokens; the rest after the last whole window is left out.

    An item is ``{"input_ids": int64 [sequence_length], "labels": int64 [sequence_length]}``. Labels
    follow the Hugging Face convention: they equal the inputs and the model shifts them. The label
    of the first token of each document is -100: nothing is predicted across a document boundary.

    Args:
        store: The tokens.
        sequence_length: Tokens per window.

    Raises:
        ConfigError: The length is below 2, so that nothing could be predicted.
        DataError: The store does not fill one window.
    """

    def __init__(self, store: TokenStore, sequence_length: int) -> None:
        if sequence_length < 2:  # noqa: PLR2004
            reason = "a window needs two tokens for one prediction"
            raise ConfigError("sequence_length", sequence_length, reason, "Give at least 2")
        if store.num_tokens < sequence_length:
            reason = f"its {store.num_tokens} tokens do not fill one window of {sequence_length}"
            remedy = "Give more data or a smaller sequence length"
            raise DataError("--data", store.name, reason, remedy)
        self.store = store
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        return self.store.num_tokens // self.sequence_length

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.sequence_length
        end = start + self.sequence_length
        input_ids = self.store.tokens[start:end].astype(np.int64)
        labels = input_ids.copy()
        offsets = self.store.offsets
        first, last = np.searchsorted(offsets, [start, end])
        labels[offsets[first:last] - start] = _IGNORED
        return {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}


class MaskedDataset(Dataset[Sample]):
    """BERT's task: windows ``[CLS] tokens [SEP]`` in which some tokens are hidden.

    An item is ``{"input_ids": int64 [T], "labels": int64 [T]}``. The store is cut into windows of
    ``T - 2`` tokens. Of the chosen tokens 80 % become [MASK], 10 % a random token and 10 % stay;
    labels are -100 elsewhere. Special tokens are never chosen, and at least one token is. The masks
    depend on seed, epoch and index alone, so that a resumed run sees the same ones; a collator with
    a random generator of its own cannot promise that.

    Args:
        store: The tokens.
        sequence_length: Tokens per sample, T.
        tokenizer: The tokenizer of the store, with [CLS], [SEP] and [MASK].
        probability: Chance that a token is chosen.
        seed: Of the masks.

    Raises:
        ConfigError: The sequences are too short, or the probability is out of range.
        DataError: The tokenizer lacks one of the three tokens, or the store fills no window.
    """

    def __init__(
        self,
        store: TokenStore,
        sequence_length: int,
        tokenizer: PreTrainedTokenizerFast,
        probability: float = 0.15,
        seed: int = 0,
    ) -> None:
        if sequence_length < _SHORTEST:
            reason = "[CLS] and [SEP] leave too little room for text"
            raise ConfigError(
                "sequence_length", sequence_length, reason, f"Give at least {_SHORTEST}"
            )
        if not 0.0 < probability <= 1.0:
            reason = "the share of masked tokens must lie between 0 and 1"
            raise ConfigError("mask_probability", probability, reason, "BERT uses 0.15")
        self._windows = PackedDataset(store, sequence_length - 2)
        self._cls, self._sep, self._mask = (
            _special(tokenizer, role) for role in ("cls_token", "sep_token", "mask_token")
        )
        self._is_special = np.zeros(max(len(tokenizer), store.vocab_size), dtype=np.bool_)
        self._is_special[tokenizer.all_special_ids] = True
        self._ordinary = np.flatnonzero(~self._is_special[: len(tokenizer)])
        self._probability = probability
        self._seed = seed

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Sample:
        return self.at(index, epoch=0)

    def at(self, index: int, epoch: int) -> Sample:
        """Return a sample with its masks of an epoch.

        Raises:
            DataError: The window holds special tokens alone.
        """
        window = self._windows[index]["input_ids"].numpy()
        sequence = np.random.SeedSequence(self._seed, spawn_key=(_MASKING, epoch, index))
        random = np.random.Generator(np.random.PCG64(sequence))
        chosen = self._choose(window, random, index)
        fate = random.random(len(window))
        masked = chosen & (fate < _SHARE_MASKED)
        replaced = chosen & ~masked & (fate < _SHARE_MASKED + _SHARE_RANDOM)
        inputs = window.copy()
        inputs[masked] = self._mask
        inputs[replaced] = random.choice(self._ordinary, size=len(window))[replaced]
        labels = np.where(chosen, window, _IGNORED)
        return {
            "input_ids": torch.from_numpy(np.concatenate([[self._cls], inputs, [self._sep]])),
            "labels": torch.from_numpy(np.concatenate([[_IGNORED], labels, [_IGNORED]])),
        }

    def _choose(
        self, window: NDArray[Any], random: np.random.Generator, index: int
    ) -> NDArray[Any]:
        candidates = ~self._is_special[window]
        if not candidates.any():
            reason = f"window {index} holds special tokens alone, so that none can be masked"
            remedy = "Leave blank documents out, or give longer sequences"
            raise DataError("--data", self._windows.store.name, reason, remedy)
        draw = random.random(len(window))
        chosen = candidates & (draw < self._probability)
        if not chosen.any():  # the mean loss over no token is not a number
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
