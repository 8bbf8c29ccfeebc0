# SPDX-License-Identifier: Apache-2.0
"""From the ``--data`` option to pairs for preference tuning, and to what the reference says."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from wavemare.engine.launch.group import gather
from wavemare.errors import ConfigError
from wavemare.training.chats import (
    check_chat_options,
    fill_token,
    prepare_rows,
    template_arguments_of,
)
from wavemare.training.models import (
    check_model,
    check_model_folder,
    load_chat_model,
    open_start,
    reraise_model_errors,
    tokenizer_folder_of,
)
from wavemare.training.text import find_data

if TYPE_CHECKING:
    from wavemare.data.chat import EncodedRows
    from wavemare.data.preferences import PairSamples
    from wavemare.data.sources import Source
    from wavemare.hf.preferences import LogProbs, PairLoss, PreferenceLoss
    from wavemare.training.setup import Setup

_SIZES = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "num_experts", "num_local_experts"),
)
_FILE = "reference.npz"
"""Of the run folder: what the reference says of all pairs, for a run that resumes."""


@dataclass(frozen=True)
class TrainingPairs:
    """Pairs to train on and to validate on, with their tokenizer.

    Attributes:
        source: Origin of the pairs.
        tokenizer: Has formatted them.
        arguments: The options of the recipe.
        rows: To train on, two for each pair.
        validation_rows: To validate on, likewise.
        train: Samples of the rows.
        validation: Samples of the validation rows.
    """

    source: Source
    tokenizer: Any
    arguments: Any
    rows: EncodedRows
    validation_rows: EncodedRows
    train: PairSamples
    validation: PairSamples

    def describe(self) -> dict[str, object]:
        """Return the panel's rows about the data."""
        counts = f"{len(self.train)} to train, {len(self.validation)} for validation"
        return {"name": self.source.name, "pairs": counts}

    def preview(self) -> str:
        """Return the texts of the first pair with trained tokens in »«, and what was cut."""
        from wavemare.data.chat import describe_fates, mark_trained

        parts = (self.rows, self.validation_rows)
        fates = describe_fates(parts, self.arguments.sequence_length)
        texts = (mark_trained(self.rows[side], self.tokenizer) for side in range(2))
        shown = "\n\n".join(
            f"The first pair, {name}, with the answer in »«:\n{text}"
            for name, text in zip(("chosen", "rejected"), texts, strict=True)
        )
        return f"{fates or ''}\n\n{shown}\n".lstrip("\n")

    def question(self) -> str:
        """Return what the assistant is asked by the first validation pair."""
        from wavemare.data.chat import last_question
        from wavemare.data.preferences import sides_of

        chosen, _ = sides_of(self.validation_rows.first)
        return last_question(chosen, self.tokenizer, template_arguments_of(self.arguments))

    def ask_reference(self, setup: Setup, loss: PreferenceLoss) -> None:
        """Compute the reference's log-probabilities of all pairs; all ranks call this.

        The run folder keeps them.

        Args:
            setup: Of the run.
            loss: Of an engine whose model is the reference.
        """
        import numpy as np

        known: dict[str, Any] = {}
        for name, samples in self._parts().items():
            samples.reference = loss.log_probs_of(samples)
            known |= {name: samples.reference, f"{name}_lengths": samples.lengths}
        if setup.rank == 0:
            np.savez(setup.folder / _FILE, **known)

    def ask_other_model(
        self, setup: Setup, initialize: Callable[[Any], tuple[Any, PreferenceLoss]]
    ) -> None:
        """Ask the model of ``--reference``, in an engine of its own; all ranks call this.

        Args:
            setup: Of the run.
            initialize: Returns the engine of a model, and its loss of pairs.
        """
        _, model = load_pair_model(self.arguments, self.arguments.reference)
        engine, loss = initialize(model)
        self.ask_reference(setup, loss)
        engine.destroy()
        del engine, loss, model
        gc.collect()  # the engine and its loss refer to each other

    def load_reference(self, setup: Setup) -> bool:
        """Load what `ask_reference` found before the run was interrupted; all ranks call this.

        Returns:
            Whether there was such, of these pairs.
        """
        import numpy as np

        file, known = setup.folder / _FILE, {}
        if setup.resume and setup.rank == 0 and file.is_file():
            with np.load(file) as opened:
                known = dict(opened)
        known = gather(known)[0]  # hosts may have a folder each
        for name, samples in self._parts().items():
            if not np.array_equal(known.get(f"{name}_lengths"), samples.lengths):
                return False
            samples.reference = known[name]
        return True

    def _parts(self) -> dict[str, PairSamples]:
        return {"train": self.train, "validation": self.validation}


def read_pairs(source: Source, arguments: Any, tokenizer: Any) -> TrainingPairs:
    """Format and tokenize pairs, or open those of the same data from the cache.

    Args:
        source: Of `wavemare.training.text.find_data`.
        arguments: The options of the recipe.
        tokenizer: With a chat template where the rows are chats.

    Raises:
        DataError: See `wavemare.data.chat.prepare_chats`; or a row lacks an answer.
    """
    from wavemare.data.preferences import PairSamples

    length, fill = arguments.sequence_length, fill_token(tokenizer)
    rows, validation_rows = prepare_rows(source, arguments, tokenizer, pairs=True)
    train, validation = (PairSamples(part, length, fill) for part in (rows, validation_rows))
    return TrainingPairs(source, tokenizer, arguments, rows, validation_rows, train, validation)


def use_pair_loss(engine: Any, log_probs: LogProbs, loss: PairLoss) -> PreferenceLoss:
    """Make a loss of pairs that of an engine's steps and evaluations; see `PreferenceLoss`."""
    from wavemare.hf.preferences import PreferenceLoss

    return PreferenceLoss(engine, log_probs, loss, inputs_of(engine.module.config))


def inputs_of(config: Any) -> tuple[str, ...]:
    """Return what a model of this configuration needs to know of pairs, by name.

    Rows are filled up at their end, which no token before it sees. Only routers would count it.
    """
    routes = getattr(config, "output_router_logits", False)
    return ("input_ids", "attention_mask") if routes else ("input_ids",)


def inputs_of_pairs(args: Any) -> tuple[str, ...]:
    """Return what the model to start from needs to know of pairs; `check_preferences` is first."""
    return inputs_of(_config_of(args))


def check_preferences(args: Any) -> None:
    """Check the options, data, model and reference, before torch is imported.

    Raises:
        ConfigError: Beta is no positive number, or the reference has another size than the model.
        WavemareError: See `check_chat_options`, `find_data`, `check_model`, `check_model_folder`.
    """
    check_chat_options(args)
    find_data(args)
    check_model(args)
    if not 0 < args.beta < float("inf"):
        reason = "without a positive number the loss does not depend on the answers"
        raise ConfigError("--beta", args.beta, reason, "Give a number above 0, such as 0.1")
    if args.reference is None:
        return
    from transformers import AutoConfig

    check_model_folder(args.reference, args.sequence_length, causal=True, key="--reference")
    with reraise_model_errors("--reference", args.reference):
        other = AutoConfig.from_pretrained(args.reference)
    if (found := unlike_size(other, _config_of(args))) is not None:
        reason = f"its {found[0]} is {found[1]}, and that of --model {found[2]}"
        remedy = "Name the folder that --model was trained from, or leave it out"
        raise ConfigError("--reference", args.reference, reason, remedy)


def _config_of(args: Any) -> Any:
    """Return the configuration of the model to start from."""
    from transformers import AutoConfig

    if args.pretrained_checkpoint is not None:
        return open_start(args).config
    with reraise_model_errors("--model", args.model):
        return AutoConfig.from_pretrained(args.model)


def unlike_size(reference: Any, model: Any) -> tuple[str, Any, Any] | None:
    """Return the first size in which the configurations of a reference and a model differ.

    Returns:
        Its name, the reference's and the model's; None if all are alike.
    """
    sizes = ((n, getattr(reference, n, None), getattr(model, n, None)) for n in _SIZES)
    return next((each for each in sizes if each[1] != each[2]), None)


def load_pair_model(args: Any, folder: str | None = None) -> tuple[Any, Any]:
    """Return the tokenizer and the model to start from, or the model of another folder.

    Adapters begin as zero, so that the model says what its base says. Dropout layers are off, as in
    TRL: a reward would be noise otherwise.

    Args:
        args: The options of the recipe.
        folder: In place of ``--model``.
    """
    from torch import nn

    if folder is not None:
        tokenizer = tokenizer_folder_of(args) or args.model
        others = {"pretrained_checkpoint": None, "save_megatron": None}
        args = replace(args, model=folder, tokenizer=tokenizer, **others)
    tokenizer, model = load_chat_model(args, packs=False)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return tokenizer, model
