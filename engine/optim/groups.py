# SPDX-License-Identifier: Apache-2.0
"""Parameter groups of the whole model on a stage that has no weights of some of them.

DeepSpeed drops these groups. Schedulers and callbacks would then count other groups on each stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor
from torch.optim import Optimizer

from wavemare.engine.seams import replaced


class AllGroups(Optimizer):
    """A view of an optimizer for schedulers, with the groups that DeepSpeed has dropped.

    The other groups are the optimizer's own, so that a scheduler sets their rates.

    Args:
        optimizer: Of torch, or a wrapper of DeepSpeed.
        dropped: By place: the group that was dropped, or None for the next one of the optimizer.
    """

    _opt_called = True  # torch's schedulers would warn that this view has made no step

    def __init__(self, optimizer: Any, dropped: Sequence[dict[str, Any] | None]) -> None:
        self._optimizer = optimizer
        self._dropped = dropped
        self.defaults = getattr(optimizer, "defaults", {})
        self.state = optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """All groups, in the order of the whole model's."""
        kept = iter(self._optimizer.param_groups)
        return [next(kept) if group is None else group for group in self._dropped]


def dropped_groups(given: Any, basic: Any) -> list[dict[str, Any] | None]:
    """Return which groups DeepSpeed has dropped, as `AllGroups` takes them; empty if none.

    Args:
        given: The groups before it did; other values have none.
        basic: The optimizer that has the others.
    """
    if not isinstance(given, Sequence) or not all(isinstance(one, Mapping) for one in given):
        return []
    defaults = getattr(basic, "defaults", {})
    found = [None if one["params"] else {**defaults, **one, "params": []} for one in given]
    own = len(getattr(basic, "param_groups", ()))
    return found if found.count(None) == own < len(found) else []


def sum_all_norms(optimizer: Any, dropped: Sequence[dict[str, Any] | None]) -> None:
    """Let ZeRO's norm take part in the sums of groups that other stages alone have.

    DeepSpeed adds the norms up over the stages, group by group, and would wait for this one.

    Args:
        optimizer: Of an engine; only one of ZeRO 1 or 2 changes.
        dropped: As `AllGroups` takes them.
    """
    if not isinstance(optimizer, DeepSpeedZeroOptimizer):
        return
    stock, more = optimizer.scaled_global_norm, sum(group is not None for group in dropped)

    def norm(*args: Any, **kwargs: Any) -> Tensor:
        own = len(optimizer.bit16_groups)
        none: list[list[Any]] = [[] for _ in range(more)]
        lists = ("bit16_groups", "params_in_partition")
        values: dict[str, Any] = {name: [*getattr(optimizer, name), *none] for name in lists}
        empty = dict(enumerate(none, own))
        values["averaged_gradients"] = {**optimizer.averaged_gradients, **empty}
        with replaced(optimizer, values):
            return stock(*args, **kwargs)

    optimizer.scaled_global_norm = norm


def is_made_anew(wrapper: Any, basic: Any) -> bool:
    """Whether ZeRO steps another optimizer than the one that it was given.

    DeepSpeed makes torch's Adagrad anew, whose states come with it: in one group, with the rate and
    the decay of its defaults, and unknown to a schedule of rates.

    Args:
        wrapper: Of ZeRO, or another optimizer.
        basic: What the engine was given.
    """
    made = getattr(wrapper, "optimizer", basic)
    return made is not basic and type(made) is type(basic)


def keep_group(wrapper: Any, basic: Any) -> None:
    """Let ZeRO step the optimizer of one group that it was given, if it has made it anew."""
    if is_made_anew(wrapper, basic):
        basic.state.clear()  # of the model's weights, in place of which there is a flat one now
        basic.state.update(wrapper.optimizer.state)
        wrapper.optimizer = basic
