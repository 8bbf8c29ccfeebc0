# SPDX-License-Identifier: Apache-2.0
"""From the ``--data`` option to the tokens and samples of a language model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from wavemare.data.sources import Kind, Source, resolve
from wavemare.errors import ConfigError, DataError
from wavemare.training.arguments import ModelArguments, TrainArguments

if TYPE_CHECKING:
    from wavemare.data.classification import LabelledCorpus
    from wavemare.data.tokens import TokenStore

Baselines = tuple[Mapping[str, Any], Mapping[str, float]]
"""Results by name, and losses to compare with by name."""
_FORMAT_VERSION = "1"  # part of every cache key: raise it when text is split in another way
_PARTS = "parts.json"
_SPLIT = "969,30,1"  # Megatron's own default


def find_data(arguments: TrainArguments) -> Source:
    """Find the text, table or chats that the options name; nothing is read yet.

    Raises:
        DataError: There is no such data.
        ConfigError: ``--split`` is given for other data than Megatron's.
    """
    source = resolve(arguments.data)
    if arguments.split is not None and source.kind is not Kind.MEGATRON:
        reason = f"a hash chooses what of {source.name} is for validation"
        remedy = "Leave it out, or make Megatron data with wavemare data build"
        raise ConfigError("--split", arguments.split, reason, remedy)
    return source


@dataclass(frozen=True)
class TrainingText:
    """Tokens to train on and to validate on, with their tokenizer.

    Attributes:
        source: Origin of the tokens.
        tokenizer: A fast tokenizer.
        train: Tokens to train on, one store for each data set of a blend.
        validation: Tokens to validate on, likewise.
        split: Megatron's ``--split`` if a GPT reads the data in Megatron's order, else None.
    """

    source: Source
    tokenizer: Any
    train: tuple[TokenStore, ...]
    validation: tuple[TokenStore, ...]
    split: str | None = None

    @property
    def shuffles(self) -> bool:
        """Whether the samples are to be shuffled: Megatron's order is complete."""
        return self.split is None

    def check_fits(self, sequence_length: int, model_config: Any) -> None:
        """Check that a model takes all tokens.

        Raises:
            ConfigError: The sequences are longer than the model.
            DataError: A token is beyond the vocabulary.
        """
        from wavemare.data.tokens import check_fits, check_length
        from wavemare.training.models import max_positions

        positions = max_positions(model_config)
        check_length(sequence_length, positions)
        if self.source.kind is not Kind.MEGATRON:  # then no token needs to be read
            if max(self.tokenizer.get_vocab().values()) < model_config.vocab_size:
                return
        known = min(model_config.vocab_size, len(self.tokenizer))
        for store in (*self.train, *self.validation):
            if store.num_tokens:
                check_fits(store, sequence_length, positions, known)

    def single(self) -> tuple[TokenStore, TokenStore]:
        """Return the training and validation tokens of one data set.

        Raises:
            ConfigError: The data is a blend, which only GPT reads.
        """
        if self.source.weights:
            remedy = "Put the data sets into one: wavemare data merge"
            reason = "weights are for the order of Megatron's GPT"
            raise ConfigError("--data", self.source.name, reason, remedy)
        return self.train[0], self.validation[0]

    def causal_samples(
        self, sequence_length: int, *, num_samples: int, seed: int
    ) -> tuple[Any, Any]:
        """Return samples for a GPT, to train on and to validate on.

        The number of samples of the whole training and the seed decide Megatron's order.

        Raises:
            DataError: The tokens do not fill one sample, or none is left for the validation.
        """
        from wavemare.data.samples import PackedDataset

        if self.split is None:
            train, validation = self.single()
            return (
                PackedDataset(train, sequence_length),
                PackedDataset(validation, sequence_length),
            )
        from torch.utils.data import ConcatDataset

        from wavemare.data.megatron_order import blended_samples

        filled = [store for store in self.validation if store.num_documents]
        if not filled:
            reason = "these shares leave no document for validation"
            remedy = "Give the second share more, or more documents"
            raise DataError("--split", self.split, reason, remedy)
        options: dict[str, Any] = {"sequence_length": sequence_length, "seed": seed}
        # Samples do not overlap (Megatron's add_extra_token_to_sequence is off): the model shifts.
        samples = blended_samples(
            self.train, self.source.weights or None, num_samples=num_samples, **options
        )
        parts = [blended_samples([store], None, num_samples=None, **options) for store in filled]
        return samples, ConcatDataset(parts)

    def masked_samples(
        self, sequence_length: int, *, probability: float, seed: int
    ) -> tuple[Any, Any]:
        """Return samples with gaps to fill, to train on and to validate on.

        Args:
            sequence_length: Tokens of a sample.
            probability: Share of the tokens that are gaps.
            seed: Determines the gaps.

        Raises:
            ConfigError: The data is a blend.
        """
        from wavemare.data.samples import MaskedDataset

        options: dict[str, Any] = {"probability": probability, "seed": seed}
        train, validation = (
            MaskedDataset(store, sequence_length, self.tokenizer, **options)
            for store in self.single()
        )
        return train, validation

    def choose_prompt(self, prompt: str | None, model_config: Any) -> str:
        """Return the start of a text to write: the given one, or the validation text's.

        Raises:
            ConfigError: It is empty, or leaves no room in the model.
        """
        from wavemare.training.models import max_positions

        positions = max_positions(model_config)
        if prompt is None:
            return self.beginning(positions)
        length = len(self.tokenizer(prompt)["input_ids"])
        if not 0 < length < positions:
            reason = f"it has {length} tokens, and the model takes {positions}"
            remedy = f"Give a prompt of 1 to {positions - 1} tokens"
            raise ConfigError("--prompt", prompt, reason, remedy)
        return prompt

    def beginning(self, positions: int, tokens: int = 8) -> str:
        """Return the first words of the validation text, with room after them in the model."""
        special = {*self.tokenizer.all_special_ids}
        some = next(store for store in self.validation if store.num_tokens)
        first = some.tokens[:1024].tolist()
        ids = [token for token in first if token not in special]
        return self.tokenizer.decode(ids[: min(tokens, positions - 1)]).rstrip("\ufffd")

    def describe(self) -> dict[str, object]:
        """Return the panel's rows about the corpus."""

        def count(what: str) -> str:
            sums = [
                sum(getattr(s, what) for s in stores) for stores in (self.train, self.validation)
            ]
            return "{:,} to train, {:,} for validation".format(*sums)

        return {
            "name": self.source.name,
            "documents": count("num_documents"),
            "tokens": count("num_tokens"),
            "vocabulary": len(self.tokenizer),
        }

    def unigram_baselines(self, sequence_length: int) -> Baselines:
        """Return the `baselines` of a model that reads both sides of a gap: not the bigrams."""
        results, losses = self.baselines(sequence_length)
        kept = {name: value for name, value in results.items() if "bigram" not in name}
        return kept, {"unigram": losses["unigram"]} if losses else {}

    def baselines(self, sequence_length: int, windows: int | None = None) -> Baselines:
        """Count n-grams, as results of a run and as losses to compare with.

        At most `MOST_COUNTED` tokens are counted, the first ones. Megatron data has another order,
        and no baselines.

        Args:
            sequence_length: Tokens of a validation sample.
            windows: Validation samples that are evaluated; None for all.

        Raises:
            DataError: There is no token to predict.
        """
        if self.source.kind is Kind.MEGATRON:
            return {}, {}
        from wavemare.data.tokens import MOST_COUNTED, ngram_cross_entropies

        train, validation = self.single()
        losses = ngram_cross_entropies(
            train, validation, sequence_length=sequence_length, windows=windows
        )
        results: dict[str, Any] = {f"{n} cross-entropy": loss for n, loss in losses.items()}
        if train.num_tokens > MOST_COUNTED:
            results["counted for it"] = f"first {MOST_COUNTED:,} of {train.num_tokens:,} tokens"
        return results, losses


def read_text(
    source: Source,
    arguments: TrainArguments,
    *,
    special_tokens: Literal["gpt", "bert"] = "gpt",
) -> TrainingText:
    """Read and tokenise text, or open the tokens of the same text from the cache.

    Args:
        source: Of `find_data`.
        arguments: The recipe's options. The tokenizer is that of ``--tokenizer``, of a checkpoint
            or of ``--model``; without these, a byte-level BPE is trained.
        special_tokens: Whose special tokens a new tokenizer has.

    Raises:
        DataError: Data or tokenizer are damaged.
        ConfigError: Data of tokens is given without their tokenizer.
    """
    from wavemare.data.encode import cached_tokens, definition_of, open_tokens
    from wavemare.data.text import load_text, source_key
    from wavemare.data.tokenizer import build_once, content_key, load_tokenizer, tokenizer_folder
    from wavemare.training.models import tokenizer_folder_of

    given = tokenizer_folder_of(arguments) or getattr(arguments, "model", None)
    found: Any = None if given is None else load_tokenizer(given)
    size = arguments.trained_vocabulary if isinstance(arguments, ModelArguments) else 0
    if source.kind is Kind.MEGATRON:
        split = arguments.split or (_SPLIT if source.weights or arguments.data_path else None)
        return _read_megatron(source, split, found)
    cache = Path(arguments.cache).expanduser()
    # One process of a host reads the text; the others are told which entries of the cache it is.
    made = f"{special_tokens} {size}" if found is None else definition_of(found)
    settings = ("corpus", _FORMAT_VERSION, made, arguments.text_column, source_key(source))
    entry = cache / f"corpus-{content_key(settings)[:32]}"

    def build(target: Path) -> None:
        corpus = load_text(source, text_column=arguments.text_column)
        parts, own = {}, found
        if own is None:
            folder = tokenizer_folder(corpus.train, size, special_tokens, cache)
            own, parts["tokenizer"] = load_tokenizer(folder), folder.name
        for name, documents in (("train", corpus.train), ("validation", corpus.validation)):
            parts[name] = cached_tokens(documents, own, cache).name
        (target / _PARTS).write_text(json.dumps(parts), encoding="utf-8")

    def parts_of(entry: Path) -> dict[str, Path]:
        names = json.loads((entry / _PARTS).read_text(encoding="utf-8"))
        return {part: cache / name for part, name in names.items()}

    build_once(entry, build, lambda entry: all(each.is_dir() for each in parts_of(entry).values()))
    parts = parts_of(entry)
    if found is None:
        found = load_tokenizer(parts["tokenizer"])
    train, validation = (
        open_tokens(parts[part], found, name=source.name) for part in ("train", "validation")
    )
    return TrainingText(source, found, (train,), (validation,))


def _read_megatron(source: Source, split: str | None, tokenizer: Any) -> TrainingText:
    from wavemare.data.indexed import open_indexed, read_indexed
    from wavemare.data.megatron_order import split_ranges
    from wavemare.data.tokens import split_store

    if tokenizer is None:
        reason = f"{source.name} holds tokens, whose meaning the data does not say"
        remedy = "Name the Hugging Face folder of the tokenizer that made them"
        raise ConfigError("--tokenizer", None, reason, remedy)
    if split is None:
        store = read_indexed(source.files[0], vocab_size=len(tokenizer))
        train, validation = split_store(store)
        return TrainingText(source, tokenizer, (train,), (validation,))
    pairs = []
    for prefix in source.files:
        store = open_indexed(prefix).store(len(tokenizer), sequences=True)
        first, second, _ = split_ranges(split, store.num_documents)
        pairs.append(
            (store.select(first.start, first.stop), store.select(second.start, second.stop))
        )
    trains, validations = zip(*pairs, strict=True)
    return TrainingText(source, tokenizer, trains, validations, split)


def read_labelled_texts(source: Source, arguments: Any) -> LabelledCorpus:
    """Read the texts of a table with their labels, or open those of the same table from the cache.

    Raises:
        DataError: See `wavemare.data.classification.load_classification`.
    """
    from wavemare.data.classification import prepare_classification

    cache = Path(arguments.cache).expanduser()
    columns = {"text_column": arguments.text_column, "label_column": arguments.label_column}
    return prepare_classification(source, cache, **columns)
