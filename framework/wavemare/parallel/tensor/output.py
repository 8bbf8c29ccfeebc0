# SPDX-License-Identifier: Apache-2.0
"""Outputs of a model that are spread over ranks: logits are gathered when they are read."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from transformers import PreTrainedModel

from wavemare.parallel.tensor.layers import gather_from_group

_loss_alone: ContextVar[bool] = ContextVar("loss_alone", default=False)


@contextmanager
def loss_alone() -> Iterator[None]:
    """Let late logits be no entries of outputs, so that who iterates over these gathers nothing."""
    token = _loss_alone.set(True)
    try:
        yield
    finally:
        _loss_alone.reset(token)


def with_late_logits(output: Any, gather: Callable[[], Tensor]) -> Any:
    """Return an output that gathers its logits when they are read, by name or by place.

    Iteration over the output reads them, too, unless gradients are recorded or only the loss is
    wanted (`loss_alone`): then they are no entry.

    Args:
        output: A ``ModelOutput`` of transformers with logits, whatever these are.
        gather: Returns the logits, (batch, sequence, vocabulary); called at most once.
    """
    entries = dict(output)
    if torch.is_grad_enabled() or _loss_alone.get():
        del entries["logits"]
    late = _late(cast(Any, type(output)))(**entries)
    late.__dict__["_gather"] = gather
    return late


def gather_attentions(model: nn.Module, group: Any) -> list[Any]:
    """Let a model, and models in it, return the attention probabilities of all ranks' heads.

    Nothing is gathered unless the caller asks for them; then all ranks of the group must ask.

    Args:
        model: A transformers model whose attention is split, or not, over the group.
        group: The ranks.

    Returns:
        The handles of the hooks.
    """

    def whole(each: Tensor) -> Tensor:  # (batch, heads of the rank, queries, keys)
        return gather_from_group(each.transpose(1, -1), group).transpose(1, -1)

    def gather(module: Any, _: Any, output: Any) -> Any:
        heads = getattr(module.config, "num_attention_heads", 0) // dist.get_world_size(group)
        if getattr(output, "attentions", None):
            output["attentions"] = tuple(
                whole(each) if each is not None and each.shape[1] == heads else each
                for each in output.attentions
            )
        return output

    models = [each for each in model.modules() if isinstance(each, PreTrainedModel)]
    return [each.register_forward_hook(gather, prepend=True) for each in models]


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
            if name == "logits":
                return self.logits
            if not isinstance(name, str):  # the loss must not cost the logits after it
                found = [f.name for f in fields(self) if f.name == "logits" or f.name in {*self}]
                chosen = found[name]
                single = isinstance(chosen, str)
                return self[chosen] if single else tuple(self[each] for each in chosen)
            if OrderedDict.__contains__(self, name):
                return OrderedDict.__getitem__(self, name)
            return super().__getitem__(name)

        def get(self, name: str, default: Any = None) -> Any:
            return self.logits if name == "logits" else super().get(name, default)

        def items(self) -> Any:
            return {name: self[name] for name in self}.items()

        def values(self) -> Any:
            return {name: self[name] for name in self}.values()

    Late.__name__ = Late.__qualname__ = base.__name__
    return Late
