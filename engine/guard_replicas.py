# SPDX-License-Identifier: Apache-2.0
"""Replicas of the same weights, compared bit for bit every so many optimizer steps.

A digest is the sum of a parameter's bit patterns, as 64-bit words, modulo 2**64: one pass over the
weights on their device, whatever the order of its sums. A wrong bit always changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from torch import Tensor

from wavemare.engine.guard_config import GuardConfig
from wavemare.errors import NumericsError

__all__ = ["Replicas", "attach_replicas", "digest", "minority"]

_KEY = "wavemare.guard.replica_digest_interval"
_WORD = 8  # bytes


@dataclass(frozen=True)
class _Shared:
    """Parameters that all ranks of a group hold."""

    group: Any
    names: tuple[str, ...]
    parameters: tuple[Tensor, ...]


class Replicas:
    """Compares an engine's weights with those of the ranks that should hold the same.

    Args:
        engine: Complete.
        interval: Optimizer steps between two comparisons.
    """

    def __init__(self, engine: Any, interval: int) -> None:
        self._engine = engine
        self._interval = interval
        self._shared = _shared(engine)

    def begin_step(self) -> None:
        """Compare before a step, if it is time; all replicas must call it before the same steps.

        Before: ZeRO gathers what the owners have anew in each step, so that after it all are alike.

        Raises:
            NumericsError: Weights differ.
        """
        step = self._engine.global_steps + 1
        if step % self._interval:
            return
        for shared in self._shared:
            self._compare(shared, step)

    def _compare(self, shared: _Shared, step: int) -> None:
        own = torch.stack([digest(parameter) for parameter in shared.parameters])
        size = dist.get_world_size(shared.group)
        gathered = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(gathered, own, group=shared.group)
        table = [tuple(digests) for digests in torch.stack(gathered).tolist()]
        if len(set(table)) == 1:
            return
        ranks = dist.get_process_group_ranks(shared.group)
        first = next(
            i for i, digests in enumerate(zip(*table, strict=True)) if len(set(digests)) > 1
        )
        odd = [ranks[place] for place in minority(table)]
        who = f"the weights of rank {_listed(odd)} are not those of the others"
        if not odd:
            who = f"the weights of the ranks {_listed(ranks)} differ, and no majority says whose"
        raise NumericsError(
            _KEY,
            self._interval,
            f"{who}: found in optimizer step {step}, first in parameter {shared.names[first]!r}",
            "Resume from a checkpoint of before; check the memory of the machine, and that no "
            "script changes weights on some ranks alone",
        )


def digest(parameter: Tensor) -> Tensor:
    """Return the digest of a parameter's bits; () int64 on its device."""
    flat = parameter.detach().reshape(-1)
    per_word = _WORD // flat.element_size()
    whole = flat.numel() // per_word * per_word
    words, rest = flat[:whole], flat[whole:]
    if words.storage_offset() % per_word:  # a view of a flat buffer
        words = words.clone()
    if rest.numel():
        last = rest.new_zeros(per_word)
        last[: rest.numel()] = rest
        return words.view(torch.int64).sum() + last.view(torch.int64)[0]
    return words.view(torch.int64).sum()


def minority(table: Sequence[tuple[int, ...]]) -> list[int]:
    """Return the places of those that differ from more than half; none without a majority."""
    for value in set(table):
        if 2 * table.count(value) > len(table):
            return [place for place, other in enumerate(table) if other != value]
    return []


def attach_replicas(engine: Any, config: GuardConfig) -> Replicas | None:
    """Return what compares an engine's replicas; None where nobody asked, or there are none.

    Args:
        engine: Complete.
        config: The section ``guard``.
    """
    if not config.replica_digest_interval:
        return None
    replicas = Replicas(engine, config.replica_digest_interval)
    return replicas if replicas._shared else None


def _shared(engine: Any) -> list[_Shared]:
    """Return what is replicated: over the data ranks, and of tied weights over the stages."""
    found = []
    if engine.dp_world_size > 1:
        named = [(n, p) for n, p in engine.module.named_parameters() if not is_moe_param(p)]
        names, parameters = zip(*named, strict=True) if named else ((), ())
        found.append(_Shared(engine.data_parallel_group, names, parameters))
    for key, tied in getattr(engine.module, "tied_comms", {}).items():
        if "group" in tied and engine.global_rank in tied["ranks"]:
            module, weights = tied["module"], tied["weight_attr"]
            pairs = {f"{key}.{name}": module.get_parameter(name) for name in weights}
            found.append(_Shared(tied["group"], tuple(pairs), tuple(pairs.values())))
    return found


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
