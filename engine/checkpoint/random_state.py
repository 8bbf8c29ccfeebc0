# SPDX-License-Identifier: Apache-2.0
"""The random generators of a process, as a checkpoint keeps them for each rank."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, cast

import numpy
import torch
from deepspeed.accelerator import get_accelerator


def random_state() -> dict[str, Any]:
    """Return the states of torch's, Python's, NumPy's and the device's generator."""
    accelerator = get_accelerator()
    kind, keys, *rest = cast(tuple[Any, ...], numpy.random.get_state())
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(numpy.int64)), *rest),
    }
    if accelerator.device_name() != "cpu":
        state["device"] = accelerator.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Put states of `random_state` in place."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype(numpy.uint32), *rest))
    if "device" in state:
        get_accelerator().set_rng_state(state["device"])
