# SPDX-License-Identifier: Apache-2.0
"""Outputs of a model whose logits are spread over ranks, and are gathered when they are read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, cast

from torch import Tensor


def with_late_logits(output: Any, gather: Callable[[], Tensor]) -> Any:
    """Return an output that gathers its logits when ``logits`` is read by name.

    Args:
        output: A ``ModelOutput`` of transformers without logits.
        gather: Returns them, (batch, sequence, vocabulary); called at most once.
    """
    late = _late(cast(Any, type(output)))(**output)
    late.__dict__["_gather"] = gather
    return late


@functools.cache
def _late(kind: Hashable) -> Any:
    """Return a class of outputs whose logits come late."""
    base: Any = kind

    class Late(base):
        @property
        def logits(self) -> Tensor | None:
            gather = self.__dict__.pop("_gather", None)
            if gather is not None:
                self["logits"] = gather()
            return self.__dict__.get("_logits")

        @logits.setter
        def logits(self, value: Tensor | None) -> None:
            self.__dict__["_logits"] = value

        def __contains__(self, name: object) -> bool:
            return name == "logits" or super().__contains__(name)

        def __getitem__(self, name: Any) -> Any:
            return self.logits if name == "logits" else super().__getitem__(name)

        def get(self, name: str, default: Any = None) -> Any:
            return self.logits if name == "logits" else super().get(name, default)

    Late.__name__ = Late.__qualname__ = base.__name__
    return Late
