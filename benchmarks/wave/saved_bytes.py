# SPDX-License-Identifier: Apache-2.0
"""Counts the memory that autograd saves for backward passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class SavedBytes:
    """Counts the memory that autograd saves: each storage once, weights not at all.

    Args:
        module: Owns the weights.

    Attributes:
        now: Bytes that are kept now.
        peak: The most at any moment.
    """

    def __init__(self, module: nn.Module) -> None:
        self._weights = {weight.untyped_storage().data_ptr() for weight in module.parameters()}
        self._holders: Counter[int] = Counter()
        self.now = 0
        self.peak = 0

    def hooks(self) -> Any:
        """Return the context in which saved tensors are counted."""
        return torch.autograd.graph.saved_tensors_hooks(self._keep, lambda held: held.tensor)

    def _keep(self, tensor: Tensor) -> _Held:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self._weights:
            return _Held(tensor, None)
        if not self._holders[address]:
            self.now += size
            self.peak = max(self.peak, self.now)
        self._holders[address] += 1

        def drop() -> None:
            self._holders[address] -= 1
            if not self._holders[address]:
                self.now -= size

        return _Held(tensor, drop)


class _Held:
    """A saved tensor; autograd drops it when it needs the tensor no more."""

    def __init__(self, tensor: Tensor, drop: Callable[[], None] | None) -> None:
        # An operator's own output would hold the operator, which holds this.
        self.tensor = tensor.detach()
        self._drop = drop

    def __del__(self) -> None:
        if self._drop is not None:
            self._drop()
