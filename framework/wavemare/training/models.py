# SPDX-License-Identifier: Apache-2.0
"""Checks of a model's configuration and files, before anything slow begins; a sample at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wavemare.data.tokens import check_length
from wavemare.errors import ConfigError, ModelError, did_you_mean
from wavemare.json_text import parse_json

__all__ = [
    "check_model_folder",
    "continue_text",
    "max_positions",
    "read_model_config",
    "reraise_model_errors",
]


def check_model_folder(folder: str, sequence_length: int, *, causal: bool = False) -> None:
    """Check that a folder holds a configuration and weights of a model that is long enough.

    Args:
        folder: The folder.
        sequence_length: Tokens per sample.
        causal: Whether the model has to continue text, from left to right.

    Raises:
        ModelError: A file is missing, or the model reads in both directions.
        ConfigError: The sequences are longer than the model.
    """
    path = Path(folder)
    if not path.is_dir():
        reason = "there is no such folder"
        remedy = (
            "Name a folder that save_pretrained wrote, for example the 'model' folder of a run of "
            "the pretraining recipe"
        )
        raise ModelError("--model", folder, reason, remedy)
    weights = [*path.glob("*.safetensors"), *path.glob("*.bin")]
    if not (path / "config.json").is_file() or not weights:
        missing = "weights" if (path / "config.json").is_file() else "config.json"
        raise ModelError("--model", folder, f"it has no {missing}", "Name a complete folder")
    values = read_model_config(str(path / "config.json"), sequence_length, key="--model")

    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as READERS

    if causal and values["model_type"] in READERS and not values.get("is_decoder"):
        reason = f"a {values['model_type']} model fills gaps in text, and does not continue it"
        remedy = "Name the folder of a GPT, or use wavemare train bert/finetune"
        raise ModelError("--model", folder, reason, remedy)


def read_model_config(
    file: str,
    sequence_length: int,
    sizes: Mapping[str, int] | None = None,
    key: str = "--model_config",
) -> dict[str, Any]:
    """Read a transformers configuration with its ``model_type``.

    Args:
        file: The JSON file.
        sequence_length: Tokens per sample.
        sizes: Replaces values, by transformers' common names.
        key: The option that names the file, for messages.

    Raises:
        ConfigError: The file is missing, no JSON object, names no model type that transformers
            knows, or the sequences are longer than the model.
        ModelError: transformers cannot make such a configuration.
    """
    try:
        values = parse_json(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = f"the model's configuration cannot be read ({error})"
        raise ConfigError(key, file, reason, "Name a JSON file") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        reason, remedy = "it names no model_type", 'Add "model_type", as transformers does'
        raise ConfigError(key, file, reason, remedy)

    from transformers import CONFIG_MAPPING, AutoConfig

    if values["model_type"] not in CONFIG_MAPPING:
        remedy = did_you_mean(values["model_type"], CONFIG_MAPPING.keys())
        reason = f"transformers knows no model type {values['model_type']!r}"
        raise ConfigError(key, file, reason, remedy)
    kind, sizes = CONFIG_MAPPING[values["model_type"]], sizes or {}
    for name, size in sizes.items():
        values[kind.attribute_map.get(name, name)] = size
    if "hidden_size" in sizes and hasattr(kind(), "intermediate_size"):
        values["intermediate_size"] = 4 * sizes["hidden_size"]
    with reraise_model_errors(key, file):
        config = AutoConfig.for_model(**values)
    check_length(sequence_length, max_positions(config))
    return values


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
    except (*kinds, SafetensorError, StrictDataclassError) as error:
        said = " ".join(str(error).split())[:200]
        reason = f"transformers cannot make a model of it ({said})"
        raise ModelError(key, value, reason, "Mend the configuration or the files") from error


def continue_text(folder: Path, prompt: str, seed: int, tokens: int = 48) -> str:
    """Return a prompt and an exported model's continuation of it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(seed)
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(
        **inputs,
        max_new_tokens=min(tokens, max_positions(model.config) - inputs["input_ids"].shape[1]),
        do_sample=True,
        top_k=40,
        temperature=0.8,
        pad_token_id=tokenizer.eos_token_id,
    )
    return str(tokenizer.decode(output[0]))
