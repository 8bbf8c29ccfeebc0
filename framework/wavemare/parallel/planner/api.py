# SPDX-License-Identifier: Apache-2.0
"""``wavemare.parallel.plan``: from a model and a description of devices to plans."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from wavemare.errors import ModelError, PlanError, did_you_mean
from wavemare.json_text import parse_json
from wavemare.parallel.planner.chains import model_costs
from wavemare.parallel.planner.cluster import Cluster
from wavemare.parallel.planner.cluster_file import read_cluster
from wavemare.parallel.planner.costs import ModelCosts
from wavemare.parallel.planner.predict import Settings
from wavemare.parallel.planner.search import PlanSearch, search_plans

__all__ = ["PRESETS", "plan", "read_model"]


def _gpt2(width: int, blocks: int, heads: int) -> dict[str, Any]:
    sizes = {"n_embd": width, "n_layer": blocks, "n_head": heads}
    return {"model_type": "gpt2", "n_positions": 1024, "vocab_size": 50257, **sizes}


def _bert(width: int, blocks: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "bert",
        "hidden_size": width,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "vocab_size": 30522,
    }


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "bert-base": _bert(768, 12, 12),
    "bert-large": _bert(1024, 24, 16),
}
"""Configurations of the published models, by name."""


def plan(
    model: Any,
    cluster: str | Path | Cluster,
    *,
    global_batch: int,
    sequence_length: int,
    dtype: str = "fp32",
    head: str | None = None,
    **settings: Any,
) -> PlanSearch:
    """Find the fastest layouts of a training job on given devices, by prediction.

    Args:
        model: A transformers model or configuration, the content or the path of a ``config.json``,
            a name of `PRESETS`, or `ModelCosts`, whose sequence and dtype then hold.
        cluster: A `Cluster`, its file, or a text such as ``8xV100,8xP100``.
        global_batch: Samples of one optimizer step.
        sequence_length: Tokens of a sample.
        dtype: fp32, fp16 or bf16.
        head: Class of the model where the configuration does not tell.
        settings: Others of `Settings`.

    Raises:
        ModelError: The planner does not know the model's layers.
        PlanError: The cluster or a setting cannot be used, or nothing fits into memory.
    """
    costs = model
    if not isinstance(costs, ModelCosts):
        known = type(model).__name__ if hasattr(model, "config") else None
        config = getattr(model, "config", model)
        if isinstance(config, str | Path):
            config = read_model(config)
        costs = model_costs(config, sequence_length, dtype=dtype, head=head or known)
    names = [field.name for field in fields(Settings)]
    for name, value in settings.items():
        if name not in names:
            raise PlanError(name, value, "there is no such setting", did_you_mean(name, names))
    chosen = Settings(global_batch=global_batch, **settings)
    return search_plans(costs, read_cluster(cluster, dtype), chosen)


def read_model(source: str | Path) -> Mapping[str, Any]:
    """Return a model's configuration from a preset's name or a file.

    Raises:
        ModelError: It is neither, or the file is no JSON mapping.
    """
    if str(source) in PRESETS:
        return PRESETS[str(source)]
    file = Path(source)
    if os.path.isdir(file):
        file = file / "config.json"
    try:
        values = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        reason = "it is neither a file nor the name of a preset"
        raise ModelError(
            "--model", str(source), reason, did_you_mean(str(source), PRESETS)
        ) from error
    except (OSError, ValueError) as error:
        reason = f"it cannot be read ({error})"
        raise ModelError("--model", str(source), reason, "Name a config.json") from error
    if not isinstance(values, dict):
        raise ModelError("--model", str(source), "it is no mapping", "Name a config.json")
    return values
