# SPDX-License-Identifier: Apache-2.0
"""Random numbers that differ between the ranks of a group where the ranks compute different things.

Outside a split region the ranks draw the same numbers, from generators in the same state, so that
what is replicated stays equal. A region's own numbers follow from one that all draw at its
beginning. So there is no second state: whoever saves and restores the generators of torch, such as
activation checkpointing, restores the regions too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from wavemare.parallel.tensor.layers import sums_deferred

__all__ = ["DropoutAfterSum", "SplitRandom", "align_generators"]

_SEEDS = 2**32  # torch's generator of the CPU looks at no more bits than these
_SPACING = 2654435769  # odd, so that ranks never share a seed; the golden ratio of 2**32


class SplitRandom:
    """Gives a rank numbers of its own between :meth:`enter` and :meth:`leave`.

    Args:
        rank: The rank in its group.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._outside: tuple[torch.Generator, Tensor] | None = None

    def enter(self, device: torch.device) -> None:
        """Begin a region of a device, unless one is open."""
        if self._outside is not None:
            return
        common = int(torch.randint(_SEEDS, ()))
        generator = _default_generator(device)
        self._outside = generator, generator.get_state()
        generator.manual_seed((common + self._rank * _SPACING) % _SEEDS)

    def leave(self) -> None:
        """End the region, if one is open: go on with the numbers that all ranks draw."""
        if self._outside is not None:
            generator, state = self._outside
            generator.set_state(state)
            self._outside = None

    def surround(self, module: nn.Module, dropout: nn.Dropout) -> None:
        """Make the forward pass of a module a region as long as its dropout draws anything."""

        def enter(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if module.training and dropout.p > 0:
                self.enter(inputs[0].device)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(lambda *_: self.leave(), always_call=True)


class DropoutAfterSum(nn.Dropout):
    """Dropout of what all ranks have in common, at the end of a split region.

    It is left out, as the sum before it, within ``deferred_sums()``.

    Args:
        p: Probability of a zero.
        random: The region's numbers.
    """

    def __init__(self, p: float, random: SplitRandom) -> None:
        super().__init__(p)
        self.random = random

    def forward(self, input: Tensor) -> Tensor:
        """Drop elements, the same ones on all ranks."""
        if sums_deferred():
            return input
        self.random.leave()
        return super().forward(input)


def align_generators(device: torch.device, group: Any) -> None:
    """Give all ranks the state of the first one's generators: of the CPU, and of a device."""
    for kind in {"cpu", device.type}:
        generator = _default_generator(device if kind == device.type else torch.device(kind))
        state = generator.get_state()
        # A state is in the memory of the host, and NCCL sends only that of a device.
        shared = state.to(device)
        dist.broadcast(shared, group_src=0, group=group)
        generator.set_state(shared.cpu())


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
