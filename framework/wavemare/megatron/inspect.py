# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint folder is: its format, sizes, parts, and what is missing in it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from wavemare.errors import CheckpointError, ModelError
from wavemare.files import read_json
from wavemare.megatron.arrays import DAMAGED
from wavemare.megatron.names import layer_of
from wavemare.megatron.store import Store, kind_of, open_store
from wavemare.models.source import Stored

_SIZES = {
    "layers": ("num_layers",),
    "hidden size": ("hidden_size",),
    "attention heads": ("num_attention_heads",),
    "key-value groups": ("num_query_groups",),
    "feed-forward size": ("ffn_hidden_size",),
    "experts": ("num_experts", "num_moe_experts"),
    "experts' feed-forward size": ("moe_ffn_hidden_size",),
    "experts per token": ("moe_router_topk",),
    "positions": ("max_position_embeddings", "seq_length"),
    "vocabulary": ("vocab_size",),
    "padded vocabulary": ("padded_vocab_size",),
}
"""Names of a size in Megatron's arguments and in Bridge's ``run_config.yaml``."""

_PARALLEL = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "virtual pipeline": "virtual_pipeline_model_parallel_size",
    "expert": "expert_model_parallel_size",
    "expert tensor": "expert_tensor_parallel_size",
    "context": "context_parallel_size",
    "data": "data_parallel_size",
    "ranks": "world_size",
}
_EMBEDDING = "embedding.word_embeddings.weight"
_CONVERTIBLE = "fully_reshardable"


def inspect(folder: str | Path, sizes: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Return what a folder holds, as plain values for JSON.

    Args:
        folder: Of Megatron, Hugging Face, DeepSpeed or this package.
        sizes: Of a run that is to load an engine's checkpoint, as in its topology: ``world_size``,
            ``pipe``, ``model``, ``experts``, ``zero_stage``. The others are those of the save.

    Raises:
        CheckpointError: It is none of these, or is damaged.
        ModelError: It is a Hugging Face folder whose ``config.json`` is damaged.
    """
    folder = Path(os.path.expanduser(folder))
    kind = kind_of(folder)
    if kind == "hf":
        return _hugging_face(folder)
    return _engine(folder, sizes or {}) if kind == "engine" else describe(open_store(folder))


def describe(store: Store) -> dict[str, Any]:
    """Return what a Megatron checkpoint holds; see `inspect`."""
    model = (store.run_config or {}).get("model")
    model = model if isinstance(model, Mapping) else {}
    arguments = {**model, **store.arguments}
    trained = store.common.get("train_state")
    trained = trained if isinstance(trained, Mapping) else {}
    samples = {**trained, **arguments}.get("consumed_train_samples")
    facts = {
        "format": f"Megatron {store.format}",
        "folder": str(store.step_folder),
        "iteration": store.iteration,
        "samples trained on": samples if isinstance(samples, int) else None,
        **_counted(store.weights.stored.values()),
        **_sizes(store, arguments),
        "saved with": _numbers(arguments, {k: (v,) for k, v in _PARALLEL.items()}),
        "optimizer": _optimizer(store),
        "tokenizer": None if store.tokenizer is None else str(store.tokenizer),
        "missing": _missing(store, arguments),
        "keys": _keys(store.weights.stored),
    }
    return {name: value for name, value in facts.items() if value not in (None, {})}


def _counted(stored: Iterable[Stored]) -> dict[str, Any]:
    found = list(stored)
    return {
        "tensors": len(found),
        "parameters": sum(prod(each.shape) for each in found),
        "bytes": sum(prod(each.shape) * each.dtype.itemsize for each in found),
        "data types": sorted({str(each.dtype).removeprefix("torch.") for each in found}),
    }


def _keys(stored: Mapping[str, Stored]) -> dict[str, list[int]]:
    """Return the shape of each weight; layers that are alike are one entry."""
    found: dict[str, list[int]] = {}
    for name, each in stored.items():
        layer = layer_of(name)
        key = name if layer is None else name.replace(f".{layer}.", ".N.", 1)
        if found.setdefault(key, list(each.shape)) != list(each.shape):
            found[name] = list(each.shape)
    return found


def _numbers(values: Mapping[str, Any], names: Mapping[str, Iterable[str]]) -> dict[str, int]:
    found = {}
    for said, keys in names.items():
        number = next((values[key] for key in keys if isinstance(values.get(key), int)), None)
        if number is not None and not isinstance(number, bool):
            found[said] = number
    return found


def _sizes(store: Store, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of the model: what the weights show, and what only arguments say."""
    stored = store.weights.stored
    shown: dict[str, int] = {}
    numbers = {number for name in stored if (number := layer_of(name)) is not None}
    if numbers:
        shown["layers"] = len(numbers)
    if _EMBEDDING in stored:
        shown["padded vocabulary"], shown["hidden size"] = stored[_EMBEDDING].shape
    said = _numbers(arguments, _SIZES)
    if arguments.get("group_query_attention") is False:
        said.pop("key-value groups", None)
    if not any("mlp.router." in name for name in stored):
        said = {name: number for name, number in said.items() if "expert" not in name}
    return {**said, **shown}


def _optimizer(store: Store) -> str | None:
    metadata = store.common.get("content_metadata")
    kind = metadata.get("distrib_optim_sharding_type") if isinstance(metadata, Mapping) else None
    if not store.has_optimizer:
        return None
    return str(kind) if kind else "as each rank has it"


def _missing(store: Store, arguments: Mapping[str, Any]) -> list[str]:
    missing = []
    if not arguments:
        missing.append("arguments of the model (convert with --config FOLDER)")
    elif not isinstance(arguments.get("vocab_size"), int) and store.tokenizer is None:
        missing.append("size of the vocabulary without padding (convert with --vocab-size)")
    if store.iteration is None:
        missing.append("iteration")
    if not store.has_optimizer:
        missing.append("optimizer state")
    elif _optimizer(store) != _CONVERTIBLE:
        missing.append(f"optimizer state that can be converted ({_CONVERTIBLE})")
    if store.lost_fp8:
        missing.append("history of FP8 scales, which only Transformer Engine can read")
    if store.tokenizer is None:
        missing.append("tokenizer")
    return missing


def _hugging_face(folder: Path) -> dict[str, Any]:
    from wavemare.models.folder import WEIGHTS, weight_map
    from wavemare.models.tensor_file import TensorFile

    remedy = "Give a folder that save_pretrained has written"
    config = read_json(folder / "config.json", ModelError, "model", remedy)
    if not isinstance(config, dict):
        raise ModelError("model", str(folder), "its config.json is no object", remedy)
    if (folder / "model" / "config.json").is_file():  # of a recipe's run
        remedy = f"Give {folder / 'model'}"
        raise ModelError("model", str(folder), "it is the folder of a run", remedy)
    stored: dict[str, Stored] = {}
    listed: dict[str, str] = {}
    try:
        listed = weight_map(folder) or {}
        files = set(listed.values()) or {WEIGHTS}
    except ModelError:  # there is neither one file nor an index
        files = {path.name for path in folder.glob("*.safetensors")}
    for file in sorted(files):
        if (folder / file).is_file():
            stored |= TensorFile(folder / file).stored
    missing = [] if stored else ["weights (*.safetensors)"]
    missing += [f"weight {name}" for name in sorted(listed.keys() - stored.keys())[:3]]
    if not any(folder.glob("tokenizer*")):
        missing.append("tokenizer")
    sizes = {
        "layers": ("num_hidden_layers", "n_layer"),
        "hidden size": ("hidden_size", "n_embd"),
        "attention heads": ("num_attention_heads", "n_head"),
        "key-value groups": ("num_key_value_heads",),
        "feed-forward size": ("intermediate_size", "n_inner"),
        "experts": ("num_local_experts", "num_experts"),
        "experts per token": ("num_experts_per_tok",),
        "positions": ("max_position_embeddings", "n_positions"),
        "vocabulary": ("vocab_size",),
    }
    return {
        "format": "Hugging Face",
        "folder": str(folder),
        "model": str(config.get("model_type")),
        **_counted(stored.values()),
        **_numbers(config, sizes),
        "missing": missing,
        "keys": {name: list(each.shape) for name, each in stored.items()},
    }


def _engine(folder: Path, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return what an engine's checkpoint is; the engine itself reads it."""
    latest = folder / "latest"
    step = folder
    if latest.is_file():
        tag = latest.read_text(encoding="utf-8", errors="replace").strip()[:200]
        step = folder / tag
        if "\0" in tag or not step.is_dir():
            reason = f"latest names {tag!r}, which is absent"
            raise CheckpointError("checkpoint", str(folder), reason, DAMAGED)
    manifest: Any = {}
    if (step / "wavemare.json").is_file():
        manifest = read_json(step / "wavemare.json", CheckpointError, "checkpoint", DAMAGED)
    topology = manifest.get("topology") if isinstance(manifest, dict) else None
    kind = "DeepSpeed" if not manifest else "DeepSpeed, written by wavemare"
    if (step / "zero").is_dir():
        kind = "DeepSpeed universal"
    told = {}
    if kind != "DeepSpeed universal":
        told["loads"] = _loading(step, manifest if isinstance(topology, dict) else None, sizes)
    return {
        "format": kind,
        "folder": str(step),
        "bytes": sum(file.stat().st_size for file in step.rglob("*") if file.is_file()),
        "files": sum(1 for file in step.rglob("*") if file.is_file()),
        "saved with": topology if isinstance(topology, dict) else {},
        **told,
        "use": "load it with engine.load_checkpoint, then save with wavemare.save_pretrained",
        "missing": [],
    }


def _loading(step: Path, manifest: Any, sizes: Mapping[str, int]) -> str:
    """Return whether an engine of other sizes can load a checkpoint, and else the reason."""
    from wavemare.engine.checkpoint.compatibility import resize_refusal
    from wavemare.engine.checkpoint.manifest import read_manifest
    from wavemare.engine.checkpoint.saved import Saved, stock_topology

    try:
        saved = stock_topology(step) if manifest is None else manifest["topology"]
        if saved is None:
            return "no: it has no file mp_rank_*_model_states.pt"
        current = {"world_size": 1, "pipe": 1, "model": 1, **saved, **sizes}
        models = current["pipe"] * current["model"]
        if current["world_size"] % models:
            return f"no: {current['world_size']} ranks cannot be divided by {models} for each model"
        if (refusal := resize_refusal(saved, current)) is not None:
            same = sizes and all(saved.get(name) == size for name, size in sizes.items())
            return "yes" if same else f"at the sizes of the save alone: {refusal}"
        Saved(step, read_manifest(step))
    except CheckpointError as error:
        return f"no: {error.reason}"
    return "yes, at these sizes" if sizes else "yes, at any number of ranks, stages and ZeRO stage"
