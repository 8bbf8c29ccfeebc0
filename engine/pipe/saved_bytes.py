# SPDX-License-Identifier: Apache-2.0
"""What autograd saves for backward passes, in bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class SavedBytes:
    """Counts the memory that autograd saves: each storage once, weights not at all.

    Args:
        module: Owns the weights.
    """

    def __init__(self, module: nn.Module) -> None:
        self._weights = {weight.untyped_storage().data_ptr() for weight in module.parameters()}
        self._seen: set[int] = set()
        self._kept: list[Tensor] = []  # so that no storage is freed and its address used again
        self.total = 0

    def hooks(self) -> Any:
        """Return the context that counts saved tensors."""
        return torch.autograd.graph.saved_tensors_hooks(self._count, lambda kept: kept)

    def _count(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights and storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self._kept.append(tensor.detach())
            self.total += storage.nbytes()
        return tensor.detach()  # an operator's own output would hold the operator, which holds this
