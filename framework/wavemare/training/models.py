# SPDX-License-Identifier: Apache-2.0
"""What recipes do with a model: check its files, make or load it, and export it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wavemare.data.tokens import check_length
from wavemare.engine.observe.choices import tell
from wavemare.errors import ConfigError, ModelError, WavemareError, did_you_mean
from wavemare.files import read_json
from wavemare.training.arguments import TrainArguments, given_start
from wavemare.training.described import check_agreement, described
from wavemare.training.megatron import MODEL, given

if TYPE_CHECKING:
    from wavemare.training.text import TrainingText


def check_model_folder(
    folder: str, sequence_length: int, *, causal: bool = False, key: str = "--model"
) -> None:
    """Check that a folder holds a configuration and weights of a model that is long enough.

    Args:
        folder: The folder.
        sequence_length: Tokens per sample.
        causal: Whether the model has to continue text, from left to right.
        key: The option that names the folder, for messages.

    Raises:
        ModelError: A file is missing, or the model reads in both directions.
        ConfigError: The sequences are longer than the model.
    """
    path = Path(folder)
    if not path.is_dir():
        reason = "there is no such folder"
        remedy = (
            "Name a folder that save_pretrained wrote, for example the 'model' folder of a run of "
            f"the pretraining recipe. From the Hub: hf download OWNER/{path.name} --local-dir "
            f"{path.name}"
        )
        raise ModelError(key, folder, reason, remedy)
    weights = [*path.glob("*.safetensors"), *path.glob("*.bin")]
    if not (path / "config.json").is_file() or not weights:
        missing = "weights" if (path / "config.json").is_file() else "config.json"
        raise ModelError(key, folder, f"it has no {missing}", "Name a complete folder")
    values = read_model_config(str(path / "config.json"), sequence_length, key=key)

    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as READERS

    if causal and values["model_type"] in READERS and not values.get("is_decoder"):
        reason = f"a {values['model_type']} model fills gaps in text, and does not continue it"
        remedy = "Name the folder of a GPT, or use wavemare train bert/finetune"
        raise ModelError(key, folder, reason, remedy)


def read_model_config(
    file: str,
    sequence_length: int,
    options: TrainArguments | None = None,
    key: str = "--model_config",
) -> dict[str, Any]:
    """Read a transformers configuration with its ``model_type``.

    Args:
        file: The JSON file.
        sequence_length: Tokens per sample.
        options: Those of the recipe that describe a model change values.
        key: The option that names the file, for messages.

    Raises:
        ConfigError: The file is missing, no JSON object, names no model type that transformers
            knows, the sequences are longer than the model, or options describe no model.
        ModelError: transformers cannot make such a configuration.
    """
    values = read_json(Path(file), ConfigError, key, "Name the JSON file of a configuration")
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        reason, remedy = "it names no model_type", 'Add "model_type", as transformers does'
        raise ConfigError(key, file, reason, remedy)

    from transformers import CONFIG_MAPPING, AutoConfig

    if values["model_type"] not in CONFIG_MAPPING:
        remedy = did_you_mean(values["model_type"], CONFIG_MAPPING.keys())
        reason = f"transformers knows no model type {values['model_type']!r}"
        raise ConfigError(key, file, reason, remedy)
    if options is not None:
        values = described(values, options)
    with reraise_model_errors(key, file):
        config = AutoConfig.for_model(**values)
    _check_names(values, type(config), key)
    check_length(sequence_length, max_positions(config))
    return values


def _check_names(values: Mapping[str, Any], kind: type, key: str) -> None:
    """Refuse names that look like another one of a configuration, which takes any name silently.

    Raises:
        ConfigError: Naming the first.
    """
    usual: Any = kind()
    known = {*usual.to_dict(), *usual.attribute_map, *vars(usual)}
    for name in values.keys() - known:
        near = get_close_matches(name, known, n=1, cutoff=0.7)
        if near and not name.startswith("_"):
            reason = f"a {usual.model_type} has no such value, and would leave it out"
            remedy = f"Did you mean {near[0]!r}?"
            raise ConfigError(f"{key}: {name}", values[name], reason, remedy)


def check_model(args: Any) -> None:
    """Check the model of a recipe before torch is imported: ``--model``, a checkpoint, or sizes.

    Args:
        args: The recipe's options.

    Raises:
        ConfigError: See `read_model_config`, or options do not agree with the folder or checkpoint.
        ModelError: See `check_model_folder` and `open_start`.
        CheckpointError: The checkpoint is damaged.
    """
    folder = getattr(args, "model", None)
    if folder is None or args.pretrained_checkpoint is not None:
        model_config_of(args)
        return
    check_model_folder(folder, args.sequence_length, causal=args.megatron_checkpoints)
    if given(args, MODEL):
        from transformers import AutoConfig

        with reraise_model_errors("--model", folder):
            config = AutoConfig.from_pretrained(folder)
        check_agreement(config, args, "--model", folder)


def model_config_of(args: Any) -> dict[str, Any]:
    """Return the configuration of a new model, or of Megatron's checkpoint to start from.

    Args:
        args: Options of a recipe that makes a model.

    Raises:
        ConfigError: See `read_model_config`, or options and checkpoint do not agree.
        CheckpointError: The checkpoint is damaged.
        ModelError: It is of a model that transformers does not have.
    """
    if args.pretrained_checkpoint is None:
        return read_model_config(args.model_config, args.sequence_length, args)
    return dict(open_start(args).config.to_dict())


def open_start(args: Any) -> Any:
    """Open Megatron's checkpoint that a run starts from; its configuration as the options have it.

    Raises:
        ConfigError: Options that describe a model do not agree with it, or the sequences are longer
            than the model.
        CheckpointError: The checkpoint is damaged.
        ModelError: It is of a model that transformers does not have.
    """
    import torch

    from wavemare.megatron import open_checkpoint

    folder = args.pretrained_checkpoint
    tokens = getattr(args, "vocab_size", None)
    opened = open_checkpoint(folder, vocab_size=tokens, dtype=torch.float32)
    key = "--load" if folder == args.load else "--pretrained-checkpoint"
    opened.config.update(check_agreement(opened.config, args, key, folder))
    check_length(args.sequence_length, max_positions(opened.config))
    return opened


def tokenizer_folder_of(args: Any) -> str | None:
    """Return the folder of the tokenizer that options name, or that of the checkpoint.

    Raises:
        ConfigError: A checkpoint has no tokenizer, and none is named.
    """
    named = getattr(args, "tokenizer", None)
    if named is not None or given_start(args) is None:
        return named
    from wavemare.megatron.models import beside

    folder = beside(open_start(args).store)
    if folder is None or not any(folder.glob("tokenizer*.json")):
        reason = f"the checkpoint in {args.pretrained_checkpoint} has no tokenizer beside it"
        remedy = "Name the Hugging Face folder of the tokenizer that made its tokens"
        raise ConfigError("--tokenizer", None, reason, remedy)
    return str(folder)


def load_causal_model(args: Any) -> Any:
    """Return the model to go on with, in fp32: of ``--model``, or of Megatron's checkpoint.

    Where its family is known, weights are read later, by each rank its own; see
    `wavemare.models.from_folder`.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from wavemare.megatron.arguments import FAMILIES, language_model_of
    from wavemare.models.deferred import from_folder, unread_model

    if args.pretrained_checkpoint is not None:
        opened = open_start(args)
        if not args.resume:
            said = f"iteration {opened.iteration}" if opened.iteration else "the checkpoint"
            tell(
                f"Weights of {said} in {args.pretrained_checkpoint}: steps, learning rate and the "
                "order of the data begin anew"
            )
        for note in opened.notes:
            tell(note)
        kind = language_model_of(opened.config)
        return _exportable(args, unread_model(opened.config, opened.weights, torch.float32, kind))
    folder = Path(args.model).resolve()  # adapters name it
    with reraise_model_errors("--model", args.model):
        config = AutoConfig.from_pretrained(folder)
        if config.model_type in FAMILIES:
            with suppress(ModelError):  # files of another form are loaded whole
                kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
                return _exportable(args, from_folder(folder, dtype=torch.float32, kind=kind))
        return _exportable(args, AutoModelForCausalLM.from_pretrained(folder, dtype="float32"))


def _exportable(args: Any, model: Any) -> Any:
    """Return a model that ``--save-megatron`` can write, if it is given.

    Raises:
        ConfigError: Megatron has no such model.
    """
    if args.save_megatron is not None:
        import torch

        from wavemare.megatron.arguments import arguments_of

        try:
            arguments_of(model.config, dtype=torch.float32)
        except ModelError as error:
            reason = f"Megatron has no such model ({error.key}: {error.reason})"
            raise ConfigError(
                "--save-megatron", args.save_megatron, reason, "Leave it out"
            ) from error
    return model


def make_or_load_model(
    args: Any, text: TrainingText, tensor_parallel: int = 1, *, resume: bool = False
) -> Any:
    """Return a model that continues text: a new one, or that of Megatron's checkpoint.

    Without a vocabulary size, a new one has the tokenizer's.

    Args:
        args: Options of the model, which `check_model` has checked.
        text: What it reads.
        tensor_parallel: Ranks that share a layer; the vocabulary is padded for them.
        resume: Whether a checkpoint replaces the weights, so that a new model has zeros.

    Raises:
        ConfigError: The model is shorter than the samples.
        DataError: It lacks a token of the text.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if args.pretrained_checkpoint is not None:
        model = load_causal_model(args)
    else:
        end = text.tokenizer.eos_token_id
        rows = args.padded(len(text.tokenizer), tensor_parallel)
        own = {"vocab_size": rows, "bos_token_id": end, "eos_token_id": end}
        config = {**own, **model_config_of(args)}
        with reraise_model_errors("--model_config", args.model_config):
            made = AutoConfig.for_model(**config)
            model = _new_model(lambda: AutoModelForCausalLM.from_config(made), made, resume)
            model = _exportable(args, model)
    text.check_fits(args.sequence_length, model.config)
    return model


def _new_model(make: Callable[[], Any], config: Any, resume: bool) -> Any:
    """Return a new model; one of zeros if a checkpoint will replace its weights.

    A model of another family needs numbers, by which its cut is proved.
    """
    from wavemare.megatron.arguments import FAMILIES
    from wavemare.models.deferred import zero_model

    return zero_model(make) if resume and config.model_type in FAMILIES else make()


def make_masked_model(args: Any, text: TrainingText, tensor_parallel: int = 1) -> Any:
    """Return a new model that fills gaps in text, as `make_or_load_model` does."""
    from transformers import AutoConfig, AutoModelForMaskedLM

    rows = args.padded(len(text.tokenizer), tensor_parallel)
    own = {"vocab_size": rows, "pad_token_id": text.tokenizer.pad_token_id}
    with reraise_model_errors("--model_config", args.model_config):
        config = AutoConfig.for_model(**{**own, **model_config_of(args)})
        model = AutoModelForMaskedLM.from_config(config)
    text.check_fits(args.sequence_length, model.config)
    return model


def make_or_load_classifier(args: Any, corpus: Any, tensor_parallel: int) -> tuple[Any, Any]:
    """Return the tokenizer and the model to start from: of the folder ``--model``, or new.

    Args:
        args: The recipe's options.
        corpus: The labelled texts, whose names the model gets.
        tensor_parallel: Ranks that share a layer; the vocabulary is padded for them.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from wavemare.data.tokenizer import cached_tokenizer, load_tokenizer

    names = dict(enumerate(corpus.label_names))
    labels = {"id2label": names, "label2id": {name: index for index, name in names.items()}}
    if args.model is not None:
        tokenizer = load_tokenizer(args.model, "--model")
        with reraise_model_errors("--model", args.model):
            model = AutoModelForSequenceClassification.from_pretrained(
                args.model, dtype="float32", num_labels=len(names), **labels
            )
        return tokenizer, model
    cache = Path(args.cache).expanduser()
    tokenizer = cached_tokenizer(corpus.train, args.trained_vocabulary, "bert", cache)
    rows = args.padded(len(tokenizer), tensor_parallel)
    own = {"num_labels": len(names), "pad_token_id": tokenizer.pad_token_id, **labels}
    with reraise_model_errors("--model_config", args.model_config):
        config = AutoConfig.for_model(**{"vocab_size": rows, **model_config_of(args), **own})
        return tokenizer, AutoModelForSequenceClassification.from_config(config)


def load_chat_model(args: Any, *, packs: bool) -> tuple[Any, Any]:
    """Return the tokenizer and the model to start from, with LoRA's layers if they are wanted.

    Args:
        args: The options of the recipe.
        packs: Whether several rows share a sample.

    Raises:
        ConfigError: The file of the chat template cannot be read.
        ModelError: The model cannot keep the rows of a packed sample apart.
    """
    from wavemare.data.tokenizer import load_tokenizer, set_chat_template
    from wavemare.models.deferred import read_weights

    own = tokenizer_folder_of(args)
    tokenizer: Any = load_tokenizer(own or args.model, "--tokenizer" if own else "--model")
    if args.chat_template is not None:
        set_chat_template(tokenizer, args.chat_template)
    model = load_causal_model(args)
    if packs:
        check_packing(model)
    if args.lora_r is None:
        return tokenizer, model
    from peft import LoraConfig, get_peft_model

    read_weights(model)  # adapters are made on the device of the weights

    targets: Any = (
        args.lora_targets if args.lora_targets == "all-linear" else args.lora_targets.split(",")
    )
    lora = LoraConfig(
        r=args.lora_r, lora_alpha=args.lora_alpha, target_modules=targets, task_type="CAUSAL_LM"
    )
    with reraise_model_errors("--lora_targets", args.lora_targets):
        return tokenizer, get_peft_model(model, lora)


def check_packing(model: Any) -> None:
    """Check on a few tokens that rows of a packed sample do not see each other.

    A model whose weights are still to be read has a small one of its class in its place.

    Raises:
        ModelError: The second of two rows differs from the same row alone.
    """
    import torch

    from wavemare.models.deferred import is_deferred

    if is_deferred(model):
        with torch.random.fork_rng(devices=[]):
            model = _of_one_layer(model)
    training = model.training
    ids, length = torch.arange(16)[None] % model.config.vocab_size, 8
    positions = torch.arange(length).repeat(2)[None]
    try:
        with torch.no_grad():
            model.eval()
            packed = model(ids, position_ids=positions, use_cache=False).logits[:, length:]
            alone = model(ids[:, length:], use_cache=False).logits
        apart = bool(torch.allclose(packed, alone, atol=1e-3 * float(alone.abs().max())))
    except TypeError:  # it takes no positions
        apart = False
    model.train(training)
    if not apart:
        reason = "it does not keep the rows of a packed sample apart"
        raise ModelError("--model", type(model).__name__, reason, "Give --no_packing")


def _of_one_layer(model: Any) -> Any:
    """Return a new model of the same class and width, of one layer and few tokens."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers, config.vocab_size, config.pad_token_id = 1, 32, None
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    return type(model)(config)


def max_positions(config: Any) -> int:
    """Return the longest sequence that a model takes; a very large number if it has no limit."""
    return int(getattr(config, "max_position_embeddings", None) or sys.maxsize)


@contextmanager
def reraise_model_errors(key: str, value: str) -> Iterator[None]:
    """Name the option where transformers cannot make or load a model.

    Raises:
        ModelError: With transformers' own words.
    """
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    kinds = (OSError, RuntimeError, ValueError, TypeError, KeyError, ArithmeticError)
    try:
        yield
    except WavemareError:  # which names its own key
        raise
    except (*kinds, SafetensorError, StrictDataclassError) as error:
        said = " ".join(str(error).split())[:200]
        reason = f"transformers cannot make a model of it ({said})"
        raise ModelError(key, value, reason, "Mend the configuration or the files") from error


def export(args: Any, engine: Any, folder: Path, tokenizer: Any, **options: Any) -> None:
    """Write the trained model: a Hugging Face folder, and Megatron's if the options name one.

    Args:
        args: The recipe's options.
        engine: Holds the model.
        folder: The Hugging Face folder.
        tokenizer: Is written with it.
        options: Of `wavemare.save_pretrained`.
    """
    import wavemare

    wavemare.save_pretrained(engine, folder, tokenizer=tokenizer, **options)
    if args.save_megatron is not None:
        from wavemare.megatron import save_megatron

        save_megatron(
            engine,
            args.save_megatron,
            iteration=engine.global_steps,
            consumed_samples=engine.global_samples,
            tokenizer=tokenizer,
        )
