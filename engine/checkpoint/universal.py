# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's universal checkpoints: what their tool asks of ours, and what a load takes of one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.checkpoint.constants import (
    PIPELINE_REPLICATED_PARAMETER_PATTERNS,
    UNIVERSAL_CHECKPOINT_INFO,
    UNIVERSAL_CHECKPOINT_VERSION_KEY,
    UNIVERSAL_CHECKPOINT_VERSION_VALUE,
)
from deepspeed.pipe import PipelineModule
from deepspeed.utils.zero_to_fp32 import get_model_state_files, parse_model_states

from wavemare.engine.checkpoint.compatibility import keeps_adam_alone
from wavemare.engine.checkpoint.manifest import as_tag

if TYPE_CHECKING:
    from wavemare.engine.base import EngineMixin


def universal_tag(load_dir: Path, tag: object) -> str | None:
    """Return the tag given, else the one that ``latest_universal`` names, else None."""
    latest = load_dir / "latest_universal"
    if tag is not None or not latest.is_file():
        return None if tag is None else as_tag(tag)
    return latest.read_text(encoding="utf-8", errors="replace").strip()


def universal_weights(load_dir: str, tag: str | None) -> dict[str, Any]:
    """Return the whole weights and the buffers of a universal checkpoint of ZeRO 3."""
    folder = Path(load_dir, str(tag))
    state = parse_model_states(get_model_state_files(str(folder)))[0]
    weights = dict(state.buffers)
    for name, shape in (each for group in state.param_shapes for each in group.items()):
        found = torch.load(folder / "zero" / name / "fp32.pt", weights_only=True)
        weights[name] = (found["param"] if isinstance(found, Mapping) else found).view(shape)
    shared = {one: weights[other] for one, other in state.shared_params if other in weights}
    return weights | shared


def universal_information(engine: EngineMixin) -> dict[str, Any]:
    """Return what ``ds_to_universal`` asks of the client: which weights it takes of rank 0 alone.

    It asks rank 0, and reads weights that are tied on other ranks from each of them.
    """
    experts = engine.has_moe_layers or engine.settings.expert_parallel.size > 1
    if hasattr(engine.module, UNIVERSAL_CHECKPOINT_INFO) or experts:
        return {}  # tensor parallelism has put its own there, and experts have no place in it
    if not keeps_adam_alone(engine):
        return {}  # without it ds_to_universal refuses states that it would drop
    tied = engine.module.tied_modules if isinstance(engine.module, PipelineModule) else ()
    information = {
        UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_CHECKPOINT_VERSION_VALUE,
        PIPELINE_REPLICATED_PARAMETER_PATTERNS: [
            rf"tied_modules\.{re.escape(key)}\..*" for key in tied
        ],
    }
    return {UNIVERSAL_CHECKPOINT_INFO: information}
