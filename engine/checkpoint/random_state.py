# SPDX-License-Identifier: Apache-2.0
"""The random generators of a process, as a checkpoint keeps them for each rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any, cast

import numpy
import torch
from deepspeed.accelerator import get_accelerator
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

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


def _present() -> Callable[[], None]:
    """Return a call that puts the present states back; faster than a checkpoint's form of them."""
    accelerator = get_accelerator()
    has_device = accelerator.device_name() != "cpu"
    device = accelerator.get_rng_state() if has_device else None
    own = torch.get_rng_state(), random.getstate(), numpy.random.get_state(legacy=False)

    def put_back() -> None:
        torch.set_rng_state(own[0])
        random.setstate(own[1])
        numpy.random.set_state(own[2])
        if has_device:
            accelerator.set_rng_state(device)

    return put_back


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators of torch, NumPy and Python; restore their states afterwards."""
    put_back = _present()
    _seed(seed)
    try:
        yield
    finally:
        put_back()


def drawn_alike(batches: Iterator[Any], seed: int, *, epoch: int = 0) -> Iterator[Any]:
    """Yield an epoch's batches, for which all ranks draw the same random numbers.

    Dropout draws differently on stages, and the caller's generators go on as if nothing had been
    read. `share_draws` lets each data rank draw other numbers for its rows.

    Args:
        batches: Of an epoch.
        seed: Of the run.
        epoch: Number of the epoch.
    """
    seed += epoch * _EPOCH_STRIDE
    with seeded(seed):
        go_on = _present()
    while True:
        put_back, token = _present(), _epoch_seed.set(seed)
        go_on()
        try:
            batch = next(batches, _ENDED)
            go_on = _present()
        finally:
            _epoch_seed.reset(token)
            put_back()
        if batch is _ENDED:
            return
        yield batch


_ENDED = object()
_epoch_seed: ContextVar[int | None] = ContextVar("epoch_seed", default=None)
"""While a batch is read: what the order of its epoch is drawn from."""


def share_draws(loader: DataLoader[Any], data_rank: int) -> None:
    """Let a loader draw the order of its rows on all ranks alike, and all else by data rank.

    Its batches are then read by `drawn_alike`. The data set and the collator draw by the number of
    the batch, wherever an epoch begins; in the loader's processes they go on from their first seed.
    A data set that is iterated draws the order itself: only the collator draws by data rank.

    Args:
        loader: Changed, once; its sampler is wrapped in a `SharedOrder`.
        data_rank: Of the model.
    """
    if isinstance(loader.dataset, IterableDataset):
        if not isinstance(loader.collate_fn, _OwnDraws):
            loader.collate_fn = _OwnDraws(loader.collate_fn, data_rank)
        return
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    order = getattr(loader, name)
    if not isinstance(order, SharedOrder):
        vars(loader)[name] = SharedOrder(order, data_rank)  # torch refuses to set it


def begin_late(loader: DataLoader[Any]) -> None:
    """Let a loader begin an epoch with its first batch, which `drawn_alike` reads.

    torch's loaders ask their sampler, and fill their processes, as soon as an iterator is made.

    Args:
        loader: Its class changes, once.
    """
    kind = type(loader)
    if not issubclass(kind, LateLoader):
        loader.__class__ = type(kind.__name__, (LateLoader, kind), {})


class LateLoader(DataLoader[Any]):
    """See `begin_late`."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


class SharedOrder(BatchSampler):
    """A sampler whose draws go on where they were, whatever is drawn for the rows in between.

    It has the attributes of the sampler that it stands for. Only `drawn_alike` makes a difference.

    Args:
        order: The sampler.
        data_rank: Draws the numbers for the rows of each next batch.
    """

    def __init__(self, order: Any, data_rank: int) -> None:
        vars(self).update(order=order, data_rank=data_rank)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["order"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.order, name, value)

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Any]:
        seed = _epoch_seed.get()
        if seed is None:
            return iter(self.order)
        _seed(seed)  # a loader with processes of its own begins twice
        order, go_on = iter(self.order), _present()
        own = seed + self.data_rank * _RANK_STRIDE
        _seed(own)  # from here the loader takes the seed of its processes
        return self._read(order, go_on, own)

    def _read(self, order: Iterator[Any], go_on: Callable[[], None], own: int) -> Iterator[Any]:
        for number in count(1):
            go_on()
            rows = next(order, _ENDED)
            go_on = _present()
            if rows is _ENDED:
                return
            _seed(own + number)
            yield rows


class _OwnDraws:
    """A collator that draws by data rank.

    Args:
        collate: The collator.
        data_rank: Of the model.
    """

    def __init__(self, collate: Callable[[Any], Any], data_rank: int) -> None:
        self._collate, self._data_rank = collate, data_rank

    def __call__(self, rows: Any) -> Any:
        with seeded(int(torch.randint(2**62, ())) + self._data_rank * _RANK_STRIDE):
            return self._collate(rows)
