# SPDX-License-Identifier: Apache-2.0
"""The random generators of a process, as a checkpoint keeps them for each rank."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import numpy
import torch
from deepspeed.accelerator import get_accelerator

from wavemare.errors import CheckpointError

_MERSENNE_TWISTER = "MT19937"
_EPOCH_STRIDE = 1_000_003
_RANK_STRIDE = 7_919


def random_state() -> dict[str, Any]:
    """Return the states of torch's, Python's, NumPy's and the device's generator."""
    accelerator = get_accelerator()
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": _numpy_state(),
    }
    if accelerator.device_name() != "cpu":
        state["device"] = accelerator.get_rng_state()
    return state


def _numpy_state() -> Any:
    found = numpy.random.get_state(legacy=False)
    if found["bit_generator"] != _MERSENNE_TWISTER:  # of numpy.random.set_bit_generator
        return found
    kind, keys, *rest = cast(tuple[Any, ...], numpy.random.get_state())
    return (kind, torch.from_numpy(keys.astype(numpy.int64)), *rest)


def _set_numpy_state(state: Any) -> None:
    own = numpy.random.get_state(legacy=False)["bit_generator"]
    saved = state["bit_generator"] if isinstance(state, dict) else _MERSENNE_TWISTER
    if own != saved:
        reason = f"the checkpoint has the state of {saved}, and numpy.random is {own}"
        remedy = f"Call numpy.random.set_bit_generator(numpy.random.{saved}()) before the load"
        raise CheckpointError("numpy.random", own, reason, remedy)
    if not isinstance(state, dict):
        kind, keys, *rest = state
        state = (kind, keys.numpy().astype(numpy.uint32), *rest)
    numpy.random.set_state(state)


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Put states of `random_state` in place.

    Raises:
        CheckpointError: ``numpy.random`` has another kind of generator.
    """
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    _set_numpy_state(state["numpy"])
    if "device" in state:
        get_accelerator().set_rng_state(state["device"])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators of torch, NumPy and Python; restore their states afterwards."""
    state = random_state()
    torch.default_generator.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        restore_random_state(state)


def drawn_alike(
    batches: Iterator[Any], seed: int, *, epoch: int = 0, data_rank: int = 0, first: int = 0
) -> Iterator[Any]:
    """Yield batches for which all ranks of a model draw the same random numbers.

    Samplers, data sets and collators draw them. Dropout draws differently on stages, so that they
    would otherwise mask different tokens.

    Args:
        batches: Of an epoch.
        seed: Of the run.
        epoch: Number of the epoch.
        data_rank: Of the model; each draws other numbers.
        first: Number of the first batch.
    """
    number = first
    while True:
        # The first read draws the epoch's order, which all data ranks share.
        own = number + data_rank * _RANK_STRIDE if number > first else 0
        with seeded(seed + epoch * _EPOCH_STRIDE + own):
            batch = next(batches, _ENDED)
        if batch is _ENDED:
            return
        yield batch
        number += 1


_ENDED = object()
