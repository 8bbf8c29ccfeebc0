# SPDX-License-Identifier: Apache-2.0
"""Heads that are split over the data-parallel ranks, among weights that all of them hold.

To DeepSpeed their parts are weights of experts, of which each rank has others: their gradients are
divided by the number of ranks, and neither summed nor partitioned. What it lacks is added here: a
norm that counts the whole head without ZeRO, and checkpoints that hold every rank's part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import update_wrapper
from types import MappingProxyType
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.moe.utils import is_moe_param

from wavemare.engine.checkpoint.checkpointing import CheckpointMixin
from wavemare.engine.config.shape import ZERO_WEIGHTS, is_enabled, offloads
from wavemare.errors import CheckpointError, ConfigError

__all__ = ["ColocatedHeads", "check_colocated"]


def check_colocated(config: Mapping[str, Any], zero: Mapping[str, Any]) -> None:
    """Check what a head that is split over the data-parallel ranks goes with.

    Args:
        config: DeepSpeed configuration.
        zero: Its section ``zero_optimization``.

    Raises:
        ConfigError: Naming the key that does not go with it.
    """

    def refuse(key: str, value: object, reason: str, remedy: str) -> ConfigError:
        return ConfigError(key, value, f"{reason} a head split over the data ranks", remedy)

    stage = zero.get("stage", 0)
    if stage == ZERO_WEIGHTS:
        remedy = "Use 0, 1 or 2"
        raise refuse("zero_optimization.stage", stage, "ZeRO 3 would cut", remedy)
    if offloads(zero):
        key = "zero_optimization.offload_optimizer"
        raise refuse(key, zero["offload_optimizer"], "its norms do not count", "Leave it out")
    for name in ("fp16", "bf16"):
        if stage == 0 and is_enabled(config, name):
            reason = "without ZeRO DeepSpeed's 16-bit optimizers miscount"
            raise refuse(f"{name}.enabled", True, reason, 'Set "stage" to 1 or 2')
    ours = config.get("wavemare", {})
    for name in ("sparse_collective", "wavelet"):
        mode = ours.get(name, {}).get("mode", "off")
        if mode != "off":
            raise refuse(f"wavemare.{name}.mode", mode, "it does not know", "Leave it out")
    if ours.get("balance"):
        raise refuse("wavemare.balance", ours["balance"], "its weights leave out", "Leave it out")


class ColocatedHeads:
    """Adds them to a data-parallel engine."""

    _heads: Mapping[str, torch.nn.Parameter] = MappingProxyType({})
    _has_own_experts = False

    def _configure_distributed_model(self, model: Any) -> None:
        super()._configure_distributed_model(model)  # type: ignore[misc]
        self._heads = {n: p for n, p in model.named_parameters() if is_moe_param(p)}
        # With layers of experts of its own the model knows how to save them.
        self._has_own_experts = self.has_moe_layers
        self.has_moe_layers: bool = self.has_moe_layers or bool(self._heads)

    @property
    def _colocates(self) -> bool:
        return bool(self._heads) and not self._has_own_experts

    def clip_fp32_gradients(self) -> None:
        """Clip by the whole model's norm: DeepSpeed would take the mean of the ranks' norms."""
        engine: Any = self
        if not self._colocates:
            super().clip_fp32_gradients()  # type: ignore[misc]
            return
        heads = {id(part) for part in self._heads.values()}
        trained = [p for p in engine.module.parameters() if p.grad is not None]
        squares = torch.zeros(2, device=engine.device)  # of what all have, of this rank's parts
        for parameter in trained:
            squares[int(id(parameter) in heads)] += parameter.grad.float().square().sum()
        dist.all_reduce(squares[1:], group=engine.data_parallel_group)
        norm = squares.sum().sqrt()
        scale = (engine.gradient_clipping() / (norm + 1e-6)).clamp(max=1.0)
        for parameter in trained:
            parameter.grad.mul_(scale)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> bool:
        """Save as the engine does; each rank's part of a head stands in its own file."""
        with self._as_one_model():
            return super().save_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> tuple[str | None, Any]:
        """Load as the engine does.

        Raises:
            CheckpointError: A universal checkpoint, which would hold one rank's part of a head.
        """
        engine: Any = self
        if self._colocates and engine.load_universal_checkpoint():
            reason = "a head that is split over the data ranks is not in a universal checkpoint"
            remedy = "Resume with the same plan, or export the model with save_pretrained"
            raise CheckpointError("checkpoint.load_universal", True, reason, remedy)
        with self._as_one_model():
            return super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def _as_one_model(self) -> Iterator[None]:
        """Keep DeepSpeed from saving experts one by one, by names that heads do not have."""
        experts, self.has_moe_layers = self.has_moe_layers, self._has_own_experts
        try:
            yield
        finally:
            self.has_moe_layers = experts

    def extra_state(self) -> dict[str, Any]:
        """Return what this rank's next step needs beside weights and optimizer."""
        state: dict[str, Any] = super().extra_state()  # type: ignore[misc]
        if self._colocates:
            state["heads"] = {
                name: {"part": part.detach().clone(), "optimizer": self._moments(part)}
                for name, part in self._heads.items()
            }
        return state

    def _moments(self, part: torch.nn.Parameter) -> dict[str, Any]:
        engine: Any = self
        if engine.zero_optimization():  # each rank writes its own by itself
            return {}
        return dict(engine.optimizer.state.get(part, {}))

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Take over a state of `extra_state`."""
        super().load_extra_state(state)  # type: ignore[misc]
        self._take_parts(state)
        engine: Any = self
        for name, saved in state.get("heads", {}).items():
            if saved["optimizer"]:
                engine.optimizer.state[self._heads[name]] = saved["optimizer"]

    def load_rank_weights(self, state: dict[str, Any]) -> None:
        """Take over only this rank's parts."""
        super().load_rank_weights(state)  # type: ignore[misc]
        self._take_parts(state)
        engine: Any = self
        if self._colocates and engine.zero_optimization():
            engine.optimizer.refresh_fp32_params()

    @torch.no_grad()
    def _take_parts(self, state: Mapping[str, Any]) -> None:
        """Put them in place: DeepSpeed has given all ranks those of rank 0."""
        for name, saved in state.get("heads", {}).items():
            self._heads[name].copy_(saved["part"])


# Their parameters are told as those of the methods that they call.
for _name in ("save_checkpoint", "load_checkpoint"):
    update_wrapper(getattr(ColocatedHeads, _name), getattr(CheckpointMixin, _name))
