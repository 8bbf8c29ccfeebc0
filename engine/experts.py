# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's engines need to know of experts, and of those that `split_experts` divides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from weakref import WeakSet

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.moe.utils import configure_moe_param_groups
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils import groups, set_z3_leaf_module
from torch import Tensor, nn

from wavemare.engine.config.shape import ZERO_WEIGHTS
from wavemare.engine.seams import replaced

_LISTS = (nn.ModuleList, nn.ModuleDict)
_complete: WeakSet[nn.Module] = WeakSet()
"""Blocks whose experts all have gradients."""


def is_divided(parameter: Any) -> bool:
    """Whether a weight is of experts that data ranks share."""
    return hasattr(parameter, "expert_group")


def expert_group(parameters: Iterable[Any]) -> Any:
    """Return the group of ranks that share experts among these weights; None if there are none."""
    return next((p.expert_group for p in parameters if is_divided(p)), None)


def same_experts(parameter: Any) -> Any:
    """Return the group of ranks that hold the same experts as this one's, of a divided weight."""
    return groups._get_expert_data_parallel_group(parameter.group_name)


def counts_once(parameter: Any, rank: int, tensor_ranks: int) -> bool:
    """Whether a weight counts on a rank where squares are added up over ranks that share a model.

    Args:
        parameter: The weight.
        rank: Place among those ranks: those that share experts, or those that split layers.
        tensor_ranks: How many ranks split layers. The first so many hold one whole of these.
    """
    if is_divided(parameter) or rank == 0:
        return True
    return rank < tensor_ranks and bool(is_model_parallel_parameter(parameter))


def forget_expert_groups(size: int, stages: int) -> None:
    """Let DeepSpeed make its groups of experts anew, if those of an earlier engine do not fit.

    It keeps them by the number of ranks that share experts alone.

    Args:
        size: That number.
        stages: Of the pipeline; each has groups of its own.
    """
    name, ranks = f"ep_size_{size}", groups._EXPERT_DATA_PARALLEL_GROUP_RANKS
    if len(ranks.get(name, ())) != dist.get_world_size() // (stages * size):
        groups._EXPERT_DATA_PARALLEL_GROUP.pop(name, None)


def blocks_of_experts(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that choose, for each token, which of a list of experts they call."""
    for module in model.modules():
        lists = (c for n, c in module.named_children() if "expert" in n and isinstance(c, _LISTS))
        # DeepSpeed's own modules call all of theirs.
        if any(lists) and not type(module).__module__.startswith("deepspeed."):
            yield module


class _WithZeros(torch.autograd.Function):
    """Passes a value on, and gives weights gradients of zero beside those that they may have.

    Its backward pass comes after those of all that reads the value. So the gradients of the weights
    are complete together, in one order on all ranks.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *(torch.zeros_like(weight) for weight in ctx.saved_tensors)


def _complete_gradients(block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Give all weights of a block a gradient, by way of the first tensor that it reads."""
    weights = [weight for weight in block.parameters() if weight.requires_grad]
    given = {**dict(enumerate(args)), **kwargs}
    floats = (k for k, v in given.items() if isinstance(v, Tensor) and v.is_floating_point())
    place = next(floats, None)
    if place is not None and weights and torch.is_grad_enabled():
        given[place] = _WithZeros.apply(given[place], *weights)
    return tuple(given.pop(number) for number in range(len(args))), given


def let_ranks_choose(model: nn.Module, zero_stage: int) -> None:
    """Let ranks call different experts of a list under ZeRO.

    ZeRO 1 and 2 sum gradients as they come: all ranks need those of the same weights, in one order.
    ZeRO 3 gathers weights where they are used, and so has to gather all of a block at once.
    """
    for block in blocks_of_experts(model) if zero_stage else ():
        if zero_stage == ZERO_WEIGHTS:
            set_z3_leaf_module(block, True)
        elif block not in _complete:
            block.register_forward_pre_hook(_complete_gradients, with_kwargs=True)
            _complete.add(block)


class ExpertsMixin(deepspeed.DeepSpeedEngine):
    """Has DeepSpeed gather, reduce, clip and save experts."""

    _expert_grid: _ExpertGrid | None = None

    def _configure_distributed_model(self, model: Any) -> None:
        """Prepare a model as DeepSpeed's method of that name, and tell DeepSpeed of our experts.

        It looks for modules of its own class alone. A stage may have none.
        """
        let_ranks_choose(model, self.zero_optimization_stage())
        super()._configure_distributed_model(model)
        if self.settings.expert_parallel.size > 1:
            self._expert_grid = _ExpertGrid(f"ep_size_{self.settings.expert_parallel.size}")
            trained = (p for p in self.module.parameters() if p.requires_grad)
            self.has_moe_layers = any(map(is_divided, trained))

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        if self._expert_grid is not None:
            given = [p for p in model_parameters if getattr(p, "requires_grad", True)]
            if given and isinstance(given[0], Mapping):
                given = [{"name": str(number), **group} for number, group in enumerate(given)]
            model_parameters = configure_moe_param_groups(given)
        super()._configure_optimizer(client_optimizer, model_parameters)

    @property
    def norm_grid(self) -> Any:
        """The ranks over which squares of gradients are added up, as an ``mpu``; may be None."""
        return self.mpu if self._expert_grid is None else self._expert_grid

    def _configure_checkpointing(self) -> None:
        super()._configure_checkpointing()
        if self._expert_grid is not None:
            self.save_non_zero_checkpoint = self._expert_grid.is_first_replica

    def _get_ckpt_name(
        self, path: str, tag: str, mp_placeholder: str | None = None, *args: Any, **kwargs: Any
    ) -> str:
        """Return a file of weights as DeepSpeed's method of that name: a rank's experts have one.

        Of all files a rank reads those of its share: the ranks that split layers have one, too.
        """
        if self._expert_grid is not None:
            share = self._expert_grid.get_model_parallel_rank()
            share //= self.settings.tensor_parallel.size
            stage = mp_placeholder or f"{self.checkpoint_mp_rank:02d}"
            mp_placeholder = f"{stage}-expert_{share:02d}"
        return str(super()._get_ckpt_name(path, tag, mp_placeholder, *args, **kwargs))

    def without_expert_files(self) -> AbstractContextManager[None]:
        """Return the context in which DeepSpeed saves and loads a model as one without experts.

        It would look for experts of its own class, to write a file of each.
        """
        return replaced(self, {} if self._expert_grid is None else {"has_moe_layers": False})


class _ExpertGrid:
    """The ranks that share experts, as an ``mpu`` over which a norm is added up.

    Args:
        name: Of DeepSpeed's groups.

    Attributes:
        is_first_replica: Whether no rank before this one has the same experts.
    """

    def __init__(self, name: str) -> None:
        self.get_model_parallel_group = partial(groups._get_expert_parallel_group, name)
        self.get_model_parallel_rank = partial(groups._get_expert_parallel_rank, name)
        self.is_first_replica = groups._get_expert_data_parallel_rank(name) == 0
