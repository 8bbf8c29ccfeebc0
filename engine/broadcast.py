# SPDX-License-Identifier: Apache-2.0
"""Which weights the first rank has to send to the others when an engine is made.

Most programs seed all ranks alike, or have them read the same files. Then nothing needs to be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from deepspeed import comm as dist
from deepspeed.moe.utils import is_moe_param
from torch import Tensor

from wavemare.engine.launch.group import gather
from wavemare.engine.seams import replaced

if TYPE_CHECKING:
    from wavemare.engine.base import EngineMixin


def broadcast_weights(engine: EngineMixin, broadcast: Callable[[], None]) -> None:
    """Give all ranks the weights of the first where they differ, also those without dimensions.

    Args:
        engine: It has its process groups.
        broadcast: DeepSpeed's method, which reaches the ranks of one replica.
    """
    # It views weights as bytes, which torch refuses without dimensions.
    scalars = [own for own in engine.module.parameters() if own.dim() == 0]
    for own in scalars:
        own.data = own.data.view(1)
    try:
        with replaced(engine, {"module": Differing(engine)}):
            broadcast()
        if engine.num_replicas > 1 and not engine.is_elastic:
            weights, replicas = list(engine.module.parameters()), engine._replicas
            for own in weights:
                own.data = own.data.contiguous()  # masters are flat views of it
            for own in weights if differ(weights, replicas.group) else ():
                whole = own.data.view(-1).view(torch.uint8)
                dist.broadcast(whole, replicas.first, group=replicas.group)
    finally:
        for own in scalars:
            own.data = own.data.view(())


class Differing:
    """Stands for an engine's model, with those weights alone that ranks have differently.

    Args:
        engine: It has its process groups. All ranks call this together.
    """

    def __init__(self, engine: EngineMixin) -> None:
        kinds: dict[str, list[str]] = {}  # experts have groups of their own
        named = dict(engine.module.named_parameters())
        for name, weight in named.items():
            kinds.setdefault(weight.group_name if is_moe_param(weight) else "", []).append(name)
        sent: set[str] = set()
        for kind, names in sorted(kinds.items()):
            groups = engine.expert_data_parallel_group
            group = groups[kind] if kind else engine.seq_data_parallel_group
            if differ([named[name] for name in names], group):
                sent.update(names)
        self._named = [(name, weight) for name, weight in named.items() if name in sent]

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Yield names and weights, in the model's order."""
        yield from self._named


def differ(weights: Sequence[Tensor], group: Any) -> bool:
    """Return whether ranks may hold other bits of some weights; all ranks of the group call it.

    Weights on an accelerator, and those of a class of their own, are not compared.
    """
    values = [weight.data for weight in weights]
    if dist.get_world_size(group) == 1:
        return False
    if any(type(value) is not Tensor or value.device.type != "cpu" for value in values):
        return True
    digests = gather(_digest(values), group)
    return any(digest != digests[0] for digest in digests)


def _digest(values: Sequence[Tensor]) -> str:
    """Return a checksum of all bits of tensors."""
    checksum = xxhash.xxh3_128()
    for value in values:
        checksum.update(f"{value.dtype} {tuple(value.shape)}".encode())
        checksum.update(value.contiguous().view(-1).view(torch.uint8).numpy().data)
    return checksum.hexdigest()
