# SPDX-License-Identifier: Apache-2.0
"""From the ``--data`` option to the tokens that a recipe learns from."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from wavemare.errors import ConfigError
from wavemare.observe import Screen
from wavemare.recipes.arguments import JobArguments
from wavemare.recipes.megatron_parts import MegatronParts

__all__ = ["TextData"]

_SECONDS_BETWEEN_NOTES = 2.0


class TextData:
    """A corpus in two parts, to train on and held out, with its tokenizer.

    Args:
        arguments: The recipe's options, which say where the text is and what is cached where.

    Raises:
        DataError: There is no such text, found before anything slow begins.
        ConfigError: ``--split`` is given for text.
    """

    def __init__(self, arguments: JobArguments) -> None:
        from wavemare.data.sources import Kind, resolve

        self.source = resolve(arguments.data)
        self._split = arguments.split
        if self._split is not None and self.source.kind is not Kind.MEGATRON:
            raise ConfigError(
                "--split",
                self._split,
                f"{self.source.name} is text, of which a part is held out by its hash",
                "Leave it out, or make Megatron data with wavemare data build",
            )
        self._text_column = arguments.text_column
        self._cache = Path(os.path.expanduser(arguments.cache))

    def read(
        self, *, kind: Literal["gpt", "bert"], vocab_size: int = 0, tokenizer: str | None = None
    ) -> None:
        """Read and tokenise, or take what the cache holds of the same text.

        Args:
            kind: ``gpt`` or ``bert``, which decides the special tokens of a new tokenizer.
            vocab_size: Tokens of a new byte-level BPE.
            tokenizer: Hugging Face folder of the tokenizer to use instead of a new one.

        Raises:
            DataError: Data or tokenizer are damaged.
            ConfigError: Data of tokens is given without their tokenizer.
        """
        from wavemare.data import cached_tokenizer, load_text, load_tokenizer, tokenize
        from wavemare.data.sources import Kind

        self.tokenizer: Any = load_tokenizer(tokenizer) if tokenizer is not None else None
        if self.source.kind is Kind.MEGATRON:
            self._read_megatron()
            return
        corpus = load_text(self.source, text_column=self._text_column)
        if self.tokenizer is None:
            self.tokenizer = cached_tokenizer(corpus.train, vocab_size, kind, self._cache)
        progress = _notes("tokenising")
        read = partial(
            tokenize, tokenizer=self.tokenizer, cache_dir=self._cache, name=self.source.name
        )
        self.train, self.held_out = read(corpus.train, progress=progress), read(corpus.validation)

    def _read_megatron(self) -> None:
        from wavemare.data import read_indexed, split_store

        if self.tokenizer is None:
            raise ConfigError(
                "--tokenizer",
                None,
                f"{self.source.name} holds tokens, whose meaning the data does not say",
                "Name the Hugging Face folder of the tokenizer that made them",
            )
        if self.in_megatron_order:
            self.parts = MegatronParts(self.source, self._split, len(self.tokenizer))
            self.train, self.held_out = self.parts.ends()[0]
            return
        store = read_indexed(self.source.files[0], vocab_size=len(self.tokenizer))
        self.train, self.held_out = split_store(store)

    @property
    def in_megatron_order(self) -> bool:
        """Whether a GPT reads the data as Megatron's would: there is a blend or ``--split``."""
        return bool(self.source.weights) or self._split is not None

    def pack(self, sequence_length: int, *, positions: int, vocabulary: int) -> tuple[Any, Any]:
        """Lay both parts end to end and cut them into samples.

        Args:
            sequence_length: Tokens per sample.
            positions: Longest sequence that the model takes.
            vocabulary: Number of token ids that the model knows.

        Returns:
            The samples to train on, and those held out.

        Raises:
            DataError: A sequence is longer than the model, or a token id beyond it.
            ConfigError: A blend is given, which only Megatron's GPT reads.
        """
        from wavemare.data import PackedDataset, check_fits

        if self.source.weights:
            remedy = "Put the data sets into one: wavemare data merge"
            reason = "weights are for the order of Megatron's GPT"
            raise ConfigError("--data", self.source.name, reason, remedy)
        known = min(vocabulary, len(self.tokenizer))
        for tokens in (self.train, self.held_out):
            check_fits(tokens, sequence_length, positions, known)
        return (
            PackedDataset(self.train, sequence_length),
            PackedDataset(self.held_out, sequence_length),
        )

    def megatron_samples(
        self,
        sequence_length: int,
        *,
        positions: int,
        vocabulary: int,
        num_samples: int,
        seed: int,
    ) -> tuple[Any, Any]:
        """Return samples as `pack` does, in the order of Megatron's GPT.

        Args:
            sequence_length: Tokens per sample.
            positions: Longest sequence that the model takes.
            vocabulary: Number of token ids that the model knows.
            num_samples: Samples of the whole training.
            seed: Of the order.

        Raises:
            DataError: As `pack`; or no document is held out.
        """
        from wavemare.data import check_fits

        known = min(vocabulary, len(self.tokenizer))
        for store in self.parts.stores:
            check_fits(store, sequence_length, positions, known)
        return self.parts.samples(sequence_length, num_samples, seed)

    def beginning(self, positions: int, tokens: int = 8) -> str:
        """Return the first words of the held-out texts, with room after them in the model."""
        special = {*self.tokenizer.all_special_ids}
        ids = [token for token in self.held_out.tokens[:1024].tolist() if token not in special]
        start: str = self.tokenizer.decode(ids[: min(tokens, positions - 1)]).rstrip("\ufffd")
        return start

    def describe(self) -> dict[str, object]:
        """Return the panel's rows about the corpus."""
        pairs = self.parts.ends() if self.in_megatron_order else [(self.train, self.held_out)]
        documents, tokens = (
            [sum(getattr(store, what) for store in side) for side in zip(*pairs, strict=True)]
            for what in ("num_documents", "num_tokens")
        )
        return {
            "name": self.source.name,
            "documents": f"{documents[0]:,} to train, {documents[1]:,} held out",
            "tokens": f"{tokens[0]:,} to train, {tokens[1]:,} held out",
            "vocabulary": len(self.tokenizer),
        }

    def entropies(self, length: int) -> dict[str, float]:
        """Return the held-out cross-entropies of the corpus's own n-grams, nats per token.

        Args:
            length: Tokens per sample: only what the model is scored on counts.
        """
        if self.source.weights:
            return {}  # no one corpus to count
        from wavemare.data import bigram_cross_entropy, unigram_cross_entropy

        return {
            "unigram": unigram_cross_entropy(self.train, self.held_out, sequence_length=length),
            "bigram": bigram_cross_entropy(self.train, self.held_out, sequence_length=length),
        }


def _notes(what: str) -> Callable[[int, int], None]:
    """Return a callback that notes progress now and then; one process per host works and calls."""
    screen, shown = Screen(rank=0), time.monotonic()

    def note(done: int, total: int) -> None:
        nonlocal shown
        if time.monotonic() - shown >= _SECONDS_BETWEEN_NOTES:
            shown = time.monotonic()
            screen.note(f"{what} {done / max(total, 1):.0%}")

    return note
