# SPDX-License-Identifier: Apache-2.0
"""A split model from a Hugging Face folder: each rank reads its own parts from the disk."""

from __future__ import annotations

import os
from typing import Any

import torch

from wavemare.models.deferred import from_folder, read_weights
from wavemare.parallel.tensor.partition import check_equal_weights
from wavemare.parallel.tensor.split import split_model


def load_split(
    folder: str | os.PathLike[str], group: Any, *, dtype: torch.dtype | None = None
) -> Any:
    """Return the model of a folder, split over a group; no rank ever holds the whole.

    The proof of `split_model` needs the whole model, so it is not made here.

    Args:
        folder: With ``config.json`` and safetensors.
        group: The ranks, all of which call this.
        dtype: Of the weights; the folder's if omitted.

    Raises:
        ModelError: The class cannot be split, or the folder lacks files or a weight.
        CheckpointError: A file is missing or damaged.
    """
    model = split_model(from_folder(folder, dtype=dtype), group)
    read_weights(model)
    check_equal_weights(model, group)
    return model
