# SPDX-License-Identifier: Apache-2.0
"""From the ``--data`` option to the samples of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wavemare.errors import ConfigError
from wavemare.extras import require

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from wavemare.data.chat import ChatSamples, EncodedRows
    from wavemare.data.sources import Source
    from wavemare.hf.steps import TokenMean


@dataclass(frozen=True)
class TrainingChats:
    """Rows to train on and to validate on, with their tokenizer.

    Attributes:
        source: Origin of the rows.
        tokenizer: Has formatted them.
        max_length: Tokens of a sample.
        template_arguments: What the chat template is given with each chat.
        rows: To train on.
        validation_rows: To validate on.
        train: Samples of the rows, packed if the options say so.
        fill: Token that fills samples up.
        packs: Whether the options say so.
    """

    source: Source
    tokenizer: Any
    max_length: int
    template_arguments: Mapping[str, Any] | None
    rows: EncodedRows
    validation_rows: EncodedRows
    train: ChatSamples
    fill: int
    packs: bool

    def describe(self) -> dict[str, object]:
        """Return the panel's rows about the data."""
        return {
            "name": self.source.name,
            "rows": f"{len(self.rows)} to train in {len(self.train)} samples, "
            f"{len(self.validation_rows)} for validation",
        }

    def preview(self) -> str:
        """Return the text of the first row with its trained tokens in »«, and what was cut."""
        from wavemare.data.chat import describe_fates, mark_trained

        fates = describe_fates((self.rows, self.validation_rows), self.max_length)
        row = mark_trained(self.rows[0], self.tokenizer)
        return f"{fates or ''}\n\nThe first row, with what is trained in »«:\n{row}\n".lstrip("\n")

    def evaluation_loader(self, engine: Any, limit: int | None = None) -> DataLoader[Any]:
        """Return this rank's micro-batches of validation rows, equally many on every rank.

        Packed as those to train on: the mean over tokens does not depend on it. Samples without a
        row fill the last micro-batches up.

        Args:
            engine: Of `wavemare.initialize`.
            limit: Rows over all ranks at most, spread over the whole set; None for all.

        Raises:
            DataError: The rows are not packed, and fewer than the data-parallel ranks.
        """
        from wavemare.data.chat import ChatSamples
        from wavemare.data.tokens import spread
        from wavemare.training.evaluation import evaluation_loader

        rows, length, packs = self.validation_rows, self.max_length, self.packs
        if not packs:
            samples = ChatSamples(rows, length, self.fill, packs=False, positions=False)
            return evaluation_loader(engine, samples, limit)
        count = len(rows) if limit is None else min(max(limit, 1), len(rows))
        chosen = spread(len(rows), count).tolist()
        samples = ChatSamples(rows, length, self.fill, packs=True, positions=True, chosen=chosen)
        ranks, micro = engine.data_world_size, engine.train_micro_batch_size_per_gpu()
        samples.fill_up(ranks if len(samples) < ranks * micro else ranks * micro)
        return evaluation_loader(engine, samples)

    def question(self) -> str:
        """Return what the assistant is asked by the first validation row."""
        from wavemare.data.chat import last_question

        row = self.validation_rows.first
        return last_question(row, self.tokenizer, self.template_arguments)


def read_chats(source: Source, arguments: Any, tokenizer: Any) -> TrainingChats:
    """Format and tokenize rows, or open those of the same data from the cache.

    Args:
        source: Of `wavemare.training.text.find_data`.
        arguments: The options of the recipe.
        tokenizer: With a chat template where the rows are chats.

    Raises:
        DataError: See `wavemare.data.chat.prepare_chats`.
    """
    from wavemare.data.chat import ChatSamples

    length, packs = arguments.sequence_length, not arguments.no_packing
    rows, validation_rows = prepare_rows(source, arguments, tokenizer)
    fill, given = fill_token(tokenizer), template_arguments_of(arguments)
    train = ChatSamples(rows, length, fill, packs=packs, positions=packs)
    return TrainingChats(
        source, tokenizer, length, given, rows, validation_rows, train, fill, packs
    )


def prepare_rows(
    source: Source, arguments: Any, tokenizer: Any, *, pairs: bool = False
) -> tuple[EncodedRows, EncodedRows]:
    """Return the rows to train on and to validate on, by the options; see `prepare_chats`."""
    from wavemare.data.chat import prepare_chats

    return prepare_chats(
        source,
        tokenizer,
        arguments.sequence_length,
        Path(arguments.cache).expanduser(),
        long_rows=arguments.long_rows,
        template_arguments=template_arguments_of(arguments),
        pairs=pairs,
    )


def template_arguments_of(arguments: Any) -> Mapping[str, Any] | None:
    """Return what the options give to the chat template with each chat."""
    from wavemare.data.row_format import parse_arguments

    found: Mapping[str, Any] | None = parse_arguments(arguments.chat_template_kwargs)
    return found


def fill_token(tokenizer: Any) -> int:
    """Return the token that fills samples up."""
    fill = tokenizer.pad_token_id
    return int(tokenizer.eos_token_id if fill is None else fill)


def check_chat_options(args: Any) -> None:
    """Refuse options that cannot work with rows of fine-tuning.

    Raises:
        ConfigError: ``--balance`` is given, ``--long_rows`` is another word, or LoRA is to be
            written for Megatron.
        LaunchError: peft is not installed.
    """
    if args.balance != "none":
        reason = "rows of fine-tuning are shared equally"
        raise ConfigError("--balance", args.balance, reason, "Leave it out")
    if args.long_rows not in ("cut", "skip"):
        reason = "there is no such way to treat them"
        raise ConfigError("--long_rows", args.long_rows, reason, "Give cut or skip")
    if args.save_megatron is not None and args.lora_r is not None:
        reason = "Megatron's checkpoints have no adapters"
        remedy = f"Leave it out, give --merge, and convert {args.output}/model"
        raise ConfigError("--save-megatron", args.save_megatron, reason, remedy)
    if args.lora_r is not None:
        require("peft", "--lora_r")


def use_token_mean(engine: Any) -> TokenMean:
    """Make the mean over the labels of a step the loss of an engine; see `TokenMean`."""
    from wavemare.hf.steps import TokenMean

    return TokenMean(engine)
