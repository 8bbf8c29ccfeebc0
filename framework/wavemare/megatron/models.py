# SPDX-License-Identifier: Apache-2.0
"""Transformers models from Megatron's checkpoints, and into them."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wavemare.errors import ModelError, check_number
from wavemare.megatron.arguments import arguments_of, language_model_of
from wavemare.megatron.config import config_of, said_tokens, tokens_of
from wavemare.megatron.facts import Facts, facts_of
from wavemare.megatron.keys import EMBEDDING, POSITIONS, HfWeights, MegatronWeights
from wavemare.models.deferred import read_weights, unread_model
from wavemare.models.disk_names import empty_model
from wavemare.models.folder import LOCAL, read_config
from wavemare.models.source import MemorySource, WeightSource

CARRIED = "tokenizer"
"""Folder in a Megatron checkpoint with what a Hugging Face folder has beside the weights."""

_DESCRIBING = ("num_layers", "hidden_size", "num_attention_heads")


@dataclass(frozen=True)
class Opened:
    """A Megatron checkpoint as a model of transformers.

    Attributes:
        config: The configuration of transformers.
        weights: By the names that the model has in memory; read when asked for.
        arguments: Megatron's arguments, as far as the files have them.
        iteration: Steps that were trained; None if the checkpoint does not say it.
        consumed_samples: Training samples that were used.
        format: ``torch_dist``, ``torch`` or ``fsdp_dtensor``.
        store: The files; see `wavemare.megatron.store`.
        notes: What a user should know, in whole sentences.
    """

    config: Any
    weights: WeightSource
    arguments: Mapping[str, Any]
    iteration: int | None
    consumed_samples: int
    format: str
    store: Any
    notes: tuple[str, ...] = ()


def open_checkpoint(
    folder: str | os.PathLike[str],
    config: Any = None,
    *,
    vocab_size: int | None = None,
    num_attention_heads: int | None = None,
    dtype: torch.dtype | None = None,
) -> Opened:
    """Open a Megatron checkpoint of any format; weights are read later, one by one.

    Args:
        folder: What Megatron's ``--load`` names, or the folder of an iteration in it.
        config: A configuration of transformers, or a folder with ``config.json``, where the
            checkpoint does not say everything.
        vocab_size: Tokens without padding, where the checkpoint does not say it.
        num_attention_heads: Where the checkpoint does not say it.
        dtype: To which the weights will be cast; norms to which Megatron adds 1 are read in it.

    Raises:
        CheckpointError: There is none, or it is damaged.
        ModelError: There is no faithful conversion, or something else has to be known.
    """
    from wavemare.megatron.store import open_store

    given = config
    if isinstance(config, str | os.PathLike):
        given = read_config(Path(os.path.expanduser(config)))
    if given is not None and num_attention_heads is None:
        num_attention_heads = getattr(given, "num_attention_heads", None)
    store = open_store(Path(folder), num_attention_heads=num_attention_heads)
    facts = facts_of(store.arguments, store.run_config, legacy=_is_legacy(store))
    described = any(facts.get(name) is not None for name in _DESCRIBING)
    if num_attention_heads is not None and facts.get("num_attention_heads") is None:
        values = {**facts.values, "num_attention_heads": num_attention_heads}
        facts = replace(facts, values=values)
    found, notes = _described(store, facts, given, vocab_size, described=described)
    found.architectures = [language_model_of(found).__name__]
    centered = bool(facts.get("apply_layernorm_1p", False))
    weights = HfWeights(store.weights, found, centered=centered, dtype=dtype)
    _check_complete(found, weights, given=config is not None)
    if weights.rounded:
        kinds = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in weights.rounded))
        notes.append(
            f"The weights of norms, to which Megatron adds 1, are rounded to {kinds}. "
            "Give --dtype float32 to keep all their digits."
        )
    trained = Facts(store.common.get("train_state") or {}, "train_state.pt: ")
    samples = facts.get("consumed_train_samples") or trained.get("consumed_train_samples")
    return Opened(
        config=found,
        weights=weights,
        arguments=facts.values,
        iteration=store.iteration,
        consumed_samples=int(samples or 0),
        format=store.format,
        store=store,
        notes=tuple(notes),
    )


def _described(
    store: Any, facts: Facts, given: Any, vocab_size: int | None, *, described: bool
) -> tuple[Any, list[str]]:
    """Return the configuration of a checkpoint's model, and what its user should know of it.

    Args:
        store: The checkpoint.
        facts: What it says of itself.
        given: The caller's configuration, if any.
        vocab_size: Tokens without padding, if the caller says it.
        described: Whether the checkpoint itself says the model's sizes.
    """
    stored, carried = store.weights.stored, beside(store)
    _check_kept(vocab_size, facts, carried)
    notes = ["The checkpoint's history of FP8 scales is lost."] if store.lost_fp8 else []
    if given is None and carried is not None:
        given = _if_it_agrees(carried, facts, stored)
    if given is not None:
        found = copy.deepcopy(config_of(facts, stored, given=given))
        if vocab_size is not None:
            found.vocab_size = tokens_of(facts, stored[EMBEDDING].shape[0], vocab_size)
        return found, notes
    if not described:
        _check_guessed(store)
    tokens = vocab_size
    if tokens is None and facts.get("vocab_size") is None:
        tokens = _tokens_of(carried)
        if tokens is None and EMBEDDING in stored:
            rows = stored[EMBEDDING].shape[0]
            notes.append(
                f"The checkpoint does not say how many of its {rows} rows are tokens, so all "
                "stay. Give --vocab-size to cut padding off."
            )
    return config_of(facts, stored, vocab_size=tokens), notes


def load_hf(
    folder: str | os.PathLike[str],
    config: Any = None,
    *,
    dtype: torch.dtype | None = None,
    vocab_size: int | None = None,
    lazy: bool = False,
) -> Any:
    """Load a Megatron checkpoint as a model of transformers, in evaluation mode.

    Args:
        folder: See `open_checkpoint`.
        config: See `open_checkpoint`.
        dtype: Of the weights; the checkpoint's if omitted.
        vocab_size: See `open_checkpoint`.
        lazy: Whether `wavemare.initialize` reads the weights: each rank those of its stage, and its
            own parts of layers and experts that are divided.

    Raises:
        CheckpointError: There is none, or it is damaged.
        ModelError: There is no faithful conversion, or something else has to be known.
    """
    opened = open_checkpoint(folder, config, vocab_size=vocab_size, dtype=dtype)
    model = unread_model(opened.config, opened.weights, dtype, language_model_of(opened.config))
    if not lazy:
        read_weights(model)
    return model.eval()


def save_megatron(
    model_or_engine: Any,
    folder: str | os.PathLike[str],
    *,
    iteration: int = 0,
    consumed_samples: int = 0,
    tokenizer: Any = None,
) -> None:
    """Write a ``torch_dist`` checkpoint that Megatron loads at any size; every process calls this.

    Works for what `wavemare.models.save_pretrained` works for. The iteration's folder appears at
    the end; those of other iterations stay.

    Args:
        model_or_engine: An engine, its module, or a model of transformers.
        folder: What Megatron's ``--load`` will be.
        iteration: Steps that were trained; 0 writes a release.
        consumed_samples: Training samples that were used.
        tokenizer: A tokenizer to save beside the weights.

    Raises:
        ModelError: There is no transformers model in the engine, Megatron's GPT does not compute
            what it does, or rank 0 cannot write.
    """
    from wavemare.models.adapted import AdaptedPipeline
    from wavemare.models.adapters import is_adapted
    from wavemare.models.export import agree_on_failure
    from wavemare.models.module import TransformerPipeline
    from wavemare.models.whole import complete, gathered

    check_number(ModelError, "iteration", iteration, whole=True)
    check_number(ModelError, "consumed_samples", consumed_samples, whole=True)
    model = complete(model_or_engine)
    if is_adapted(model) or isinstance(model, AdaptedPipeline):
        reason = "Megatron's checkpoints have no adapters"
        remedy = "Call save_pretrained(engine, folder, merge=True), and convert the folder"
        raise ModelError("model", type(model).__name__, reason, remedy)
    arguments_of(model.config, dtype=torch.float32)  # before anything is gathered
    # A pipeline has a whole model, without weights, on the first rank alone.
    whole = model.skeleton if isinstance(model, TransformerPipeline) else model
    state = gathered(model)
    failure: Exception | None = None
    if state is not None:
        try:
            _write(
                whole,
                state,
                Path(os.path.expanduser(folder)),
                iteration,
                consumed_samples,
                tokenizer,
            )
        except Exception as error:  # the others wait for this rank
            failure = error
    agree_on_failure(failure, folder)


def _write(
    model: Any,
    state: Mapping[str, Tensor],
    folder: Path,
    iteration: int,
    consumed_samples: int,
    tokenizer: Any,
) -> None:
    from wavemare.megatron.write import write_torch_dist

    config = copy.deepcopy(model.config)
    config.architectures = [language_model_of(config).__name__]
    dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
    config.dtype = str(dtype).removeprefix("torch.")
    arguments = arguments_of(config, dtype=dtype) | {
        "iteration": iteration,
        "consumed_train_samples": consumed_samples,
    }
    if tokenizer is not None:
        arguments |= tokenizer_arguments(folder)
    weights = MegatronWeights(MemorySource(state), config, padded=arguments["padded_vocab_size"])
    write_torch_dist(folder, weights, arguments=arguments, iteration=iteration)
    beside_it = folder / CARRIED
    config.save_pretrained(beside_it)
    if model.can_generate():
        model.generation_config.save_pretrained(beside_it)
    if tokenizer is not None:
        tokenizer.save_pretrained(beside_it)


def tokenizer_arguments(folder: Path) -> dict[str, str]:
    """Return the arguments that name the tokenizer beside a checkpoint's weights."""
    model = str(folder.absolute() / CARRIED)
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": model}


def _check_complete(config: Any, weights: WeightSource, *, given: bool) -> None:
    """Refuse weights that are not those of the configuration's model.

    Raises:
        ModelError: One is missing, has another shape, or has no place.
    """
    state = empty_model(config, language_model_of(config)).state_dict()
    for name in [*state, *weights.stored]:
        wanted, held = state.get(name), weights.stored.get(name)
        if wanted is None or held is None or held.shape != tuple(wanted.shape):
            reason = f"the checkpoint lacks it, and {config.model_type} has it"
            if wanted is None:
                reason = f"the checkpoint has it, and {config.model_type} of this configuration not"
            elif held is not None:
                shapes = list(held.shape), list(wanted.shape)
                reason = f"its shape is {shapes[0]}, and the configuration has {shapes[1]}"
            remedy = "Give --config FOLDER with the model's config.json"
            if given:
                remedy = "Give the config.json of this model"
            raise ModelError("weight", name, reason, remedy)


def _check_guessed(store: Any) -> None:
    """Refuse a checkpoint that does not describe its model.

    Legacy files of before there were arguments are GPT-2's, whose defaults were all there was.

    Raises:
        ModelError: It is no such file.
    """
    if store.format == "torch" and POSITIONS in store.weights.stored:
        return
    reason = (
        "the checkpoint has none that describe the model, and no weight shows the heads, the "
        "activation, the epsilon of norms, or how positions are rotated"
    )
    remedy = "Give --config FOLDER with the model's config.json"
    raise ModelError("args", None, reason, remedy)


def _is_legacy(store: Any) -> bool:
    said = store.arguments.get("use_legacy_models")
    if said is None:
        said = not store.arguments.get("use_mcore_models", False)
    return store.format == "torch" and bool(said)


def beside(store: Any) -> Path | None:
    """Return the folder of a checkpoint's tokenizer; None if there is none."""
    for folder in (store.tokenizer, store.step_folder.parent / CARRIED):
        if folder is not None and folder.is_dir():
            return Path(folder)
    return None


def _if_it_agrees(carried: Path, facts: Any, stored: Any) -> Any:
    """Return the configuration beside a checkpoint if it is the checkpoint's."""
    if not (carried / "config.json").is_file():
        return None
    try:
        found = config_of(facts, stored, given=read_config(carried))
    except ModelError:
        return None
    # The folder is that of the newest iteration, whose vocabulary may have grown.
    said = facts.get("vocab_size") is not None
    other = said and said_tokens(facts, stored[EMBEDDING].shape[0]) != found.vocab_size
    return None if other else found


def _check_kept(vocab_size: int | None, facts: Facts, carried: Path | None) -> None:
    """Refuse a size that would cut tokens off, as far as it is known how many there are.

    Raises:
        ModelError: The checkpoint or the tokenizer beside it has more tokens.
    """
    if vocab_size is None:
        return
    for source, known in (
        ("the checkpoint", facts.get("vocab_size")),
        ("the tokenizer beside the checkpoint", _tokens_of(carried)),
    ):
        if isinstance(known, int) and vocab_size < known:
            reason = f"{source} has {known} tokens"
            raise ModelError(
                "--vocab-size", vocab_size, reason, "Give at least that, or leave it out"
            )


def _tokens_of(carried: Path | None) -> int | None:
    """Return the tokens of a tokenizer's folder; None without one."""
    if carried is None:
        return None
    import transformers

    try:
        return len(transformers.AutoTokenizer.from_pretrained(carried, **LOCAL))
    except Exception:  # a folder of another kind of tokenizer
        return None
