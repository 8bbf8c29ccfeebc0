# SPDX-License-Identifier: Apache-2.0
"""The norm of a step's gradients: measured once, for the guard, for clipping and for reports."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.pipe import TiedLayerSpec
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils import groups
from torch import Tensor

from wavemare.engine.experts import counts_once, expert_group, is_divided
from wavemare.engine.health.pending import PendingSums
from wavemare.engine.launch.group import gather
from wavemare.engine.optim.adapter import adapt
from wavemare.engine.optim.gradients import gradient_values, is_tied_copy, squared_norm
from wavemare.engine.optim.whole import OptimizerAdapter
from wavemare.engine.seams import replaced

if TYPE_CHECKING:
    from wavemare.engine.base import EngineMixin

_EPSILON = 1e-6  # DeepSpeed's own, in the denominator of the clipping coefficient
_BLOCK = 1 << 20
"""Elements that are squared in fp64 at a time."""


def scales_losses(engine: EngineMixin) -> bool:
    """Return whether losses are scaled, for fp16 or autocast to it, at any stage of ZeRO.

    Gradients overflow in a healthy run then, and the scaler skips such steps by itself.
    """
    autocasts = engine.torch_autocast_enabled()
    return engine.fp16_enabled() or (autocasts and engine.torch_autocast_dtype() == torch.float16)


@dataclass
class _Step:
    """What is known of the gradients of a step.

    Args:
        norm: The number that clips, and that of all stages if they are added up: (), fp32. None
            where it is not known before DeepSpeed's step.
        squared: Squared norm of this rank's stage, or of its share of the gradients: (), fp64.
        is_agreed: Whether all ranks that make the step together have the same number.
        overrides: The attributes by which DeepSpeed's optimizer takes the norm in its step.
    """

    norm: Tensor | None = None
    squared: Tensor | None = None
    is_agreed: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict)


class GradientNorm:
    """Measures the 2-norm of the reduced gradients of each optimizer step, once.

    It is the number that the guard looks at, that clips, and that `value` reports. Where stock
    DeepSpeed clips by the right norm, it is DeepSpeed's to the last bit. The stages of a pipeline
    add up their squared norms before the step only where the sum clips, or where DeepSpeed's
    optimizer adds them up at any rate (ZeRO 1, bf16). Otherwise they do so while they go on, and
    no stage waits.

    With fp16, and with an optimizer on the host, only DeepSpeed measures, within its own step.

    Args:
        engine: Complete, but for its features. All ranks must construct this object.
    """

    def __init__(self, engine: EngineMixin) -> None:
        self._engine = engine
        self._step: _Step | None = None
        self._last = _Step()
        self._taken: float | None = None
        self._scale = 1.0
        self._reports_sums = True
        self._layerwise: LayerwiseNorm | None = None
        self._steps: deque[int] = deque()  # those of the pending sums
        self._sum: float | None = None
        self._left_out: int | None = None
        later = engine.optimizer is not None and self._adds_up_later()
        self._sums = PendingSums.of_pipelines(engine.grid) if later else None

    # --- a step -----------------------------------------------------------------------------------

    def take(self, squared: float) -> None:
        """Use this squared norm for the next step, whose gradients are then not measured.

        Args:
            squared: What the guard decides by. The engine itself sets ``_global_grad_norm``, which
                `value` then returns.
        """
        self._taken = squared

    def begin_step(self) -> None:
        """Forget a step that has failed; the next question measures the gradients."""
        self._step = None
        self._scale = self._engine.fp16_scale

    @property
    def is_total(self) -> bool:
        """Whether the present step's norm is that of all stages, before they step."""
        return self._sums is None and self._present.norm is not None

    @property
    def is_agreed(self) -> bool:
        """Whether all ranks that make the present step together have measured the same number."""
        return self._present.is_agreed

    def is_finite(self) -> Tensor:
        """Return whether the present step's norm is finite: (), bool."""
        step = self._present
        if step.squared is None and step.norm is None:  # only DeepSpeed measures
            step.squared = squared_norm(adapt(self._engine).gradients(), self._engine.device)
        measured = step.norm if step.squared is None else step.squared
        assert measured is not None
        return measured.isfinite()

    def handed(self) -> AbstractContextManager[None]:
        """Return the context in which DeepSpeed's optimizer steps with the norm that is known."""
        overrides = self._present.overrides
        return replaced(self._engine.optimizer, overrides) if overrides else nullcontext()

    @torch.no_grad()
    def clip(self, limit: float) -> None:
        """Clip the gradients of an optimizer that steps the model's own parameters."""
        step = self._present
        if step.norm is None:  # a loss scaler has divided the gradients only now
            step.norm = self._of_parameters(clips=True)
        norm = step.norm + _EPSILON
        # A number is divided as in torch, a tensor as in DeepSpeed: the last bits differ.
        bound = limit if self._goes_by_layer else torch.full_like(norm, limit)
        coefficient = bound / norm
        gradients = adapt(self._engine).gradients()
        if gradients:
            torch._foreach_mul_(gradients, coefficient.clamp(max=1.0))

    def end_step(self, *, made: bool) -> None:
        """Begin to add up the stages' squared norms; nothing waits for it.

        Args:
            made: Whether this stage has made the step.
        """
        self._last, self._step = self._present, None
        if not made and self._last.norm is None:
            self._last.norm = torch.tensor(math.inf)
        elif isinstance(self._engine.optimizer, FP16_UnfusedOptimizer):  # whose norm is multiplied
            self._last.norm = torch.tensor(float(self._engine._global_grad_norm) / self._scale)
        self._reports_sums, self._taken = self._taken is None, None
        if self._sums is not None:
            squared = self._last.squared
            self._sums.start([float(not made), 0.0 if squared is None else float(squared)])
            self._steps.append(self._engine.global_steps)
            # By now each stage has made the steps before, however far it may be ahead.
            self._read_sums(keep=1 + self._engine.stage_lead)

    # --- what is known later ----------------------------------------------------------------------

    @property
    def value(self) -> float | None:
        """The norm of the last step before clipping, over all stages; None before the first.

        It waits for the other stages where they add it up while they go on.
        """
        if self._sums is not None and self._reports_sums:
            self._read_sums()
            return self._sum
        norm = self._last.norm if self._last.norm is not None else self._engine._global_grad_norm
        return None if norm is None else float(norm)

    @property
    def stages(self) -> Any:
        """Process group of the stages that learn of each other's steps later; None without."""
        return None if self._sums is None else self._sums.group

    def first_left_out(self, until: float = math.inf) -> int | None:
        """Wait for the sums of steps, and return the first step that a stage has left out.

        All stages return the same number; None if each stage has made all of the steps.

        Args:
            until: Number of the last of these steps; the last one made if omitted.
        """
        self._read_sums(keep=sum(step > until for step in self._steps))
        found = self._left_out
        return found if found is not None and found <= until else None

    def reset(self) -> None:
        """Discard the steps before: other weights have been loaded. All ranks must call it."""
        if self._sums is not None:
            # A rank that has left a step has started fewer sums than the others.
            self._sums.catch_up(max(gather(self._sums.count)), 2)
            self._steps.extend([self._engine.global_steps] * (len(self._sums) - len(self._steps)))
        self._read_sums()
        self._step = self._taken = self._left_out = self._sum = None
        self._last = _Step()

    def close(self) -> None:
        """Release the process group of the sums."""
        if self._sums is not None:
            self._steps.clear()
            self._sums.close()

    # --- how it is measured -----------------------------------------------------------------------

    @property
    def _present(self) -> _Step:
        """What is known of the present step; on all ranks the first question measures it."""
        if self._step is None:
            with torch.no_grad():
                self._step = self._measure()
        return self._step

    def _read_sums(self, keep: int = 0) -> None:
        for left_out, squared in self._sums.wait(keep) if self._sums is not None else ():
            step, self._sum = self._steps.popleft(), math.sqrt(squared)
            if left_out and self._left_out is None:
                self._left_out = step

    def _adds_up_later(self) -> bool:
        """Whether the norm of all stages is known only after their steps."""
        engine = self._engine
        if not engine.pipeline_parallelism or engine.num_stages == 1 or scales_losses(engine):
            return False
        if engine.settings.pipeline.is_asynchronous:
            return True
        if _is_cut_apart(engine):
            return False
        # Without our section the number that clips is DeepSpeed's, which is the first stage's.
        sums = self._divides_experts or (self._clips and self._is_ours)
        return self._is_plain and not sums

    @property
    def _clips(self) -> bool:
        return (self._engine.gradient_clipping() or 0.0) > 0

    @property
    def _is_ours(self) -> bool:
        return "wavemare" in self._engine.config

    @property
    def _is_plain(self) -> bool:
        """Whether the optimizer steps the model's own parameters."""
        return self._engine.optimizer is self._engine.basic_optimizer

    @property
    def _divides_experts(self) -> bool:
        return self._engine.settings.expert_parallel.size > 1

    def _measure(self) -> _Step:
        adapter = adapt(self._engine)
        if self._taken is not None:
            return _Step(squared=torch.tensor(self._taken, dtype=torch.float64))
        if scales_losses(self._engine):
            return self._before_unscaling()
        if adapter.measures_alone:
            return _Step()
        if self._sums is not None:
            return self._of_stage(adapter)
        by_layer = self._goes_by_layer
        if self._is_plain and not by_layer:
            return _Step(self._of_parameters(clips=self._clips), is_agreed=True)
        norm = self._of_layers() if by_layer else adapter.step_norm()
        overrides = adapter.norm_overrides(norm)
        return _Step(norm, is_agreed=adapter.partitions_gradients, overrides=overrides)

    @property
    def _goes_by_layer(self) -> bool:
        engine = self._engine
        if not engine.pipeline_parallelism:
            return False
        # Without clipping nothing needs all stages, unless DeepSpeed's optimizer adds them up.
        asked = engine.norms_by_layer and (self._clips or not self._is_plain)
        # Ranks of one stage have other layers there: only the sum of all is the same.
        return asked or self._divides_experts or _is_cut_apart(engine)

    def _of_layers(self) -> Tensor:
        if self._layerwise is None:
            self._layerwise = LayerwiseNorm(self._engine)
        return self._layerwise()

    def _before_unscaling(self) -> _Step:
        """Return what is known of gradients that are multiplied by a loss scale."""
        scaler = self._engine.torch_autocast_z0_gradscaler
        if scaler is None or self._clips:  # `clip` comes after the division
            return _Step()
        return _Step(self._of_parameters() / scaler.get_scale())

    def _of_stage(self, adapter: OptimizerAdapter) -> _Step:
        grid = self._engine.grid
        group = (
            grid.get_slice_parallel_group() if grid.get_slice_parallel_world_size() > 1 else None
        )
        squared = adapter.norm_squared(group, grid.get_slice_parallel_rank())
        as_stock = self._clips and not self._is_ours
        return _Step(self._of_parameters(clips=True) if as_stock else None, squared)

    def _of_parameters(self, *, clips: bool = False) -> Tensor:
        """Return the norm by DeepSpeed's formula: (), fp32.

        Args:
            clips: Whether it has to be that of DeepSpeed's ``clip_grad_norm_`` to the last bit.
        """
        engine, mpu = self._engine, self._engine.norm_grid
        counts = self._counting()
        trained = [p for p in engine.module.parameters() if p.requires_grad and counts(p)]
        shared = [p for p in trained if self._is_ours and is_moe_param(p) and not is_divided(p)]
        others = {id(p) for p in shared}
        gradients = gradient_values(p for p in trained if id(p) not in others)
        if clips and gradients:  # one by one: the kernel for many on a GPU rounds otherwise
            norms = torch.stack([each.detach().float().norm(2) for each in gradients])
            total = norms.pow(2).sum()
        else:
            total = squared_norm(gradients, engine.device).float()
        total = total.to(engine.device) + _of_shared(shared, engine.device)
        group = mpu.get_model_parallel_group() if hasattr(mpu, "get_model_parallel_group") else None
        if group is not None and dist.get_world_size(group) > 1:
            dist.all_reduce(total, group=group)
        # The mean, as experts of DeepSpeed's differ by rank; all ranks learn what one has seen.
        norm = total.pow(0.5) / float(dist.get_world_size(engine.data_parallel_group))
        dist.all_reduce(norm, group=engine.data_parallel_group)
        return norm

    def _counting(self) -> Callable[[Tensor], bool]:
        """Return which weights count on this rank, so that each counts once over all ranks."""
        engine, mpu = self._engine, self._engine.norm_grid
        if engine.pipeline_parallelism and self._is_ours:
            first = engine.grid.get_slice_parallel_rank() == 0
            return lambda p: not is_tied_copy(p) and (first or is_model_parallel_parameter(p))
        rank = mpu.get_model_parallel_rank() if hasattr(mpu, "get_model_parallel_rank") else 0
        return lambda p: counts_once(p, rank, engine.mp_world_size)


def _is_cut_apart(engine: EngineMixin) -> bool:
    """Whether the replicas of a pipeline are cut at layers of their own."""
    return getattr(engine.module, "shared_segments", None) is not None


def _of_shared(experts: list[Any], device: Any) -> Tensor:
    """Return the squares of gradients of DeepSpeed's own experts, over the ranks that share them.

    Stock DeepSpeed takes the mean over ranks of norms that each count the rank's own experts.
    """
    total = torch.zeros((), device=device)
    for name in sorted({expert.group_name for expert in experts}):
        own = gradient_values(expert for expert in experts if expert.group_name == name)
        squares = squared_norm(own, device).float()
        dist.all_reduce(squares, group=groups._get_expert_parallel_group(name))
        total += squares
    return total


class LayerwiseNorm:
    """Adds squares in fp64: of each layer on its rank, then of all layers in their order.

    So the norm has the same bits wherever layers are. Tied copies count once, and so do the weights
    beside experts that data ranks share. Where ZeRO cuts a layer, the cut changes the last bits of
    fp64, which the rounding to fp32 drops.

    Ranks that split a layer or share experts add up their parts, and the first of them counts what
    all of them have.

    Args:
        engine: A pipeline engine, complete.
    """

    def __init__(self, engine: EngineMixin) -> None:
        self._adapter, self._device = adapt(engine), engine.device
        grid, experts = engine.grid, expert_group(engine.module.parameters())
        rank, slices = grid.get_slice_parallel_rank(), grid.get_slice_parallel_world_size()
        self._groups = [grid.get_slice_parallel_group()] if slices > 1 else []
        if self._adapter.partitions_gradients:  # data ranks are added up, whatever they hold
            self._groups.append(engine.data_parallel_group)
        elif experts is not None:  # among these are the ranks that split layers
            rank, self._groups = dist.get_rank(experts), [experts]
        self._groups.append(grid.get_pipe_parallel_group())
        layers = list(enumerate(engine.module._layer_specs))
        self._num_layers = len(layers)
        tied = {s.key: n for n, s in reversed(layers) if isinstance(s, TiedLayerSpec)}
        self._layer_of = {}
        for name, parameter in engine.module.named_parameters():
            if is_tied_copy(parameter) or not counts_once(parameter, rank, slices):
                continue
            number, key, *_ = name.split(".")
            layer = tied[key] if number == "tied_modules" else len(layers) - 1  # that of a loss
            self._layer_of[id(parameter)] = int(number) if number.isdecimal() else layer

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """Return the norm of this step's gradients: scalar, fp32. All ranks must call it."""
        layers: list[list[Tensor]] = [[] for _ in range(self._num_layers)]
        for parameter, gradient in self._adapter.gradients_by_parameter():
            layer = self._layer_of.get(id(parameter))
            if gradient is not None and layer is not None:
                values = gradient.coalesce().values() if gradient.is_sparse else gradient
                layers[layer] += values.reshape(-1).split(_BLOCK)
        squares = torch.zeros(self._num_layers, dtype=torch.float64, device=self._device)
        for layer, blocks in enumerate(layers):
            if blocks:
                norms = torch._foreach_norm(blocks, 2, torch.float64)
                squares[layer] = torch.stack(norms).square().sum()
        for group in self._groups:
            dist.all_reduce(squares, group=group)
        return squares.sum().sqrt().float()
