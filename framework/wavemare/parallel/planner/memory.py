# SPDX-License-Identifier: Apache-2.0
"""What each rank of a pipeline needs of memory, without weights and without other ranks.

The model's own layers run the rank's actions on tensors that have a shape and no numbers. So any
model that can be cut is known, with adapters, 4-bit weights and checkpoints of activations.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from wavemare.errors import ModelError, PlanError, check_number, did_you_mean
from wavemare.extras import require
from wavemare.parallel.planner.model import BYTES
from wavemare.parallel.planner.predict import Variant, bytes_of_a_weight
from wavemare.pipeline.plan.plan import WEIGHT_GRADIENTS, Action, Kind, Plan
from wavemare.pipeline.plan.schedules import TRAINED, build_plan

PROCESS_BYTES = 18e6
"""What a process takes for the engine and its objects, beside tensors, imports and connections."""
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_BLOCK = 64
"""Numbers of a 4-bit weight that share a scale."""
_NESTED = 256
"""Scales of a 4-bit weight that share one themselves."""
_OPTIMIZERS = {"adamw": 2, "adam": 2, "sgd": 0}
"""Numbers that an optimizer keeps for a weight."""
_STEPS = 3  # of an asynchronous schedule, until it repeats itself


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """How a model is trained.

    Args:
        stages: Ranks of the pipeline.
        micro_batches: Of an optimizer step.
        samples: Of a micro-batch.
        sequence: Tokens of a sample.
        schedule: Of the pipeline.
        dtype: fp32 or bf16.
        lora_r: Rank of LoRA adapters; 0 trains the model itself.
        lora_targets: Names of the layers that have adapters.
        four_bit: Whether the frozen linear layers are in 4 bits.
        double_quant: Whether the scales of 4-bit weights are in 8 bits.
        int8: Whether the frozen linear layers are in torchao's int8, with a scale for each row.
        optimizer: adamw, adam or sgd.
        zero_stage: 0 or 1.
        replicas: Of each stage.
        checkpoints: Whether blocks are computed again in the backward pass.

    Raises:
        PlanError: A value is out of range, or there is no such one.
    """

    stages: int = 2
    micro_batches: int = 4
    samples: int = 1
    sequence: int = 512
    schedule: str = "1f1b"
    dtype: str = "fp32"
    lora_r: int = 0
    lora_targets: str = "all-linear"
    four_bit: bool = False
    double_quant: bool = False
    int8: bool = False
    optimizer: str = "adamw"
    zero_stage: int = 0
    replicas: int = 1
    checkpoints: bool = False

    def __post_init__(self) -> None:
        for name in ("stages", "micro_batches", "samples", "sequence", "replicas"):
            check_number(PlanError, name, getattr(self, name), 1, whole=True)
        check_number(PlanError, "lora_r", self.lora_r, 0, whole=True)
        for name, known in (
            ("schedule", TRAINED),
            ("dtype", tuple(_TYPES)),
            ("optimizer", tuple(_OPTIMIZERS)),
        ):
            value = getattr(self, name)
            if value not in known:
                raise PlanError(name, value, "there is no such one", did_you_mean(value, known))
        if self.zero_stage not in (0, 1):
            reason = "pipelines train with ZeRO 0 and 1"
            raise PlanError("zero_stage", self.zero_stage, reason, "Give 0 or 1")
        for name, bits in (("four_bit", 4), ("int8", 8)):
            if getattr(self, name) and not self.lora_r:
                reason = f"weights in {bits} bits are frozen, so that adapters have to be trained"
                raise PlanError(name, True, reason, "Give lora_r, too (--lora-r 16)")
        if self.four_bit and self.int8:
            raise PlanError("int8", True, "the weights are to be in 4 bits, too", "Give one alone")
        if self.double_quant and not self.four_bit:
            reason = "it has no effect without weights in 4 bits"
            raise PlanError("double_quant", True, reason, "Give four_bit, too (--four-bit)")

    @property
    def variant(self) -> Variant:
        """The layout, as the search of layouts describes it."""
        return Variant(
            stages=self.stages,
            tensor_parallel=1,
            data_parallel=self.replicas,
            zero_stage=self.zero_stage,
            recompute=self.checkpoints,
            schedule="1f1b" if self.schedule != "pipemare" else self.schedule,
        )


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of a rank.

    Args:
        layers: First layer of each of its stages, and the one behind the last.
        frozen: Weights that are not trained, and buffers.
        trained: Weights that are trained, with their gradients and the optimizer's state.
        num_trained: How many numbers these weights have.
        activations: The most that passes keep and need at a time, with messages.
        process: What the engine takes beside tensors.
    """

    layers: tuple[tuple[int, int], ...]
    frozen: float
    trained: float
    num_trained: int
    activations: float
    process: float = PROCESS_BYTES

    @property
    def total(self) -> float:
        """All of it, above what imports and connections take."""
        return self.frozen + self.trained + self.activations + self.process


def rank_memory(config: Any, settings: MemorySettings) -> list[RankMemory]:
    """Predict what each rank of a pipeline needs.

    Args:
        config: Of transformers.
        settings: How the model is trained.

    Raises:
        ModelError: The model cannot be cut, or has no layers for adapters.
        PlanError: The stages cannot be made of its layers.
        LaunchError: Adapters are asked for, and peft is not installed.
    """
    from wavemare.models.convert import cut_chain
    from wavemare.models.families import family_of

    plan = _plan(settings)
    model, mode = _model(config, settings), FakeTensorMode()
    # For the cuts, a quantized weight counts as the numbers that it stands for.
    of_numbers = replace(settings, four_bit=False, double_quant=False, int8=False)
    counted = _model(config, of_numbers) if settings.four_bit or settings.int8 else model
    base, counted = (m.get_base_model() if settings.lora_r else m for m in (model, counted))
    family = family_of(base)
    inputs = family.declared(None)
    cuts = cut_chain(
        counted, tuple(family.chain(counted, inputs)), inputs, "parameters", plan.rank_of
    )
    _put_on_cpu(model, mode)
    with mode:
        chain, loss = tuple(family.chain(base, inputs)), family.loss(base)
        ids = torch.zeros(settings.samples, settings.sequence, dtype=torch.int64)
        borders = _borders(base, chain, cuts, inputs, ids)
        return [
            _of_rank(rank, plan, chain, cuts, borders, (loss, ids), settings)
            for rank in range(settings.stages)
        ]


def _plan(settings: MemorySettings) -> Plan:
    steps = _STEPS if settings.schedule == "pipemare" else 1
    return build_plan(settings.schedule, settings.stages, settings.micro_batches, steps)


def _model(config: Any, settings: MemorySettings) -> Any:
    """Return the model on the meta device, with the adapters and weights that are asked for."""
    from wavemare.models.disk_names import empty_model

    if settings.sequence > (getattr(config, "max_position_embeddings", None) or settings.sequence):
        most = config.max_position_embeddings
        reason = f"the model has {most} positions"
        raise PlanError("sequence", settings.sequence, reason, f"Give at most {most}")
    model = empty_model(config).to(_TYPES[settings.dtype])
    if settings.four_bit or settings.int8:
        _quantize(model, settings)
    if settings.checkpoints:
        model.gradient_checkpointing_enable()
    if settings.lora_r:
        require("peft", "lora_r")
        import peft

        names: Any = settings.lora_targets
        names = names if names == "all-linear" else names.split(",")
        try:
            model = peft.get_peft_model(
                model, peft.LoraConfig(r=settings.lora_r, target_modules=names)
            )
        except ValueError as error:
            reason = f"peft finds no such layers ({str(error).partition('. ')[0]})"
            remedy = "Give all-linear, or names such as q_proj,v_proj"
            raise ModelError("lora_targets", settings.lora_targets, reason, remedy) from error
        model.to(_TYPES[settings.dtype])  # as engines do with all weights of a stage
    return model.train()


def _put_on_cpu(model: nn.Module, mode: FakeTensorMode) -> None:
    """Let the tensors of a model, which have no numbers, pass for those of a CPU.

    Operations then choose the kernels that they choose there.
    """
    made: dict[int, Any] = {}
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    fake: Any = FakeTensor(mode, tensor.detach(), torch.device("cpu"))
                    is_weight = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = (
                        nn.Parameter(fake, tensor.requires_grad) if is_weight else fake
                    )
                own[name] = made[id(tensor)]


def _quantize(model: Any, settings: MemorySettings) -> None:
    head = model.get_output_embeddings()
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and layer is not head:
            model.set_submodule(name, _Quantized(layer, settings))


class _Quantized(nn.Linear):
    """A linear layer that needs what one in 4 or 8 bits needs.

    Args:
        layer: Whose place it takes.
        settings: Say in what form.
    """

    def __init__(self, layer: nn.Linear, settings: MemorySettings) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.bias = layer.bias
        numbers = layer.weight.numel()
        packed = torch.empty(
            numbers // (1 if settings.int8 else 2), 1, dtype=torch.uint8, device="meta"
        )
        self.weight = nn.Parameter(packed, requires_grad=False)
        scales = layer.out_features if settings.int8 else -(-numbers // _BLOCK)
        nested = scales + 4 * -(-scales // _NESTED)
        size = nested if settings.double_quant else 4 * scales
        self.register_buffer("scales", torch.empty(size, dtype=torch.uint8, device="meta"))

    def forward(self, value: Tensor) -> Tensor:
        """Return a product of the layer's shape."""
        found: Tensor = _Product.apply(value, self.out_features)
        return found if self.bias is None else found + self.bias


class _Product(torch.autograd.Function):
    """A product with a weight that is there in its own type for the time of a pass alone."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, outputs: int) -> Tensor:
        """Map (..., inputs) to (..., outputs)."""
        ctx.shape = outputs, value.shape[-1]
        return nn.functional.linear(value, value.new_empty(ctx.shape))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Map the gradient back."""
        return gradient @ gradient.new_empty(ctx.shape), None


def _borders(
    model: Any, chain: Sequence[Any], cuts: Sequence[int], inputs: Sequence[str], ids: Tensor
) -> list[Any]:
    """Return what enters each stage."""
    from wavemare.models.activations import split_batch

    current: Any = split_batch({"input_ids": ids}, inputs, labels_required=False)[0]
    found = []
    with torch.no_grad():
        for first, end in pairwise(cuts):
            found.append(current)
            for layer in chain[first:end]:
                current = layer(current)
    return found


def _of_rank(
    rank: int,
    plan: Plan,
    chain: Sequence[Any],
    cuts: Sequence[int],
    borders: Sequence[Any],
    ending: tuple[Any, Tensor],
    settings: MemorySettings,
) -> RankMemory:
    own = [stage for stage, home in enumerate(plan.rank_of) if home == rank]
    bounds = {stage: (cuts[stage], cuts[stage + 1]) for stage in own}
    weights: dict[int, Tensor] = {}
    for first, end in bounds.values():
        for layer in chain[first:end]:
            for part in (layer, getattr(layer, "tied", layer)):
                weights |= {id(w): w for w in (*part.parameters(), *part.buffers())}
    trained = [w for w in weights.values() if w.requires_grad]
    frozen = float(sum(w.nbytes for w in weights.values() if not w.requires_grad))
    passes = _Passes(plan, {s: chain[a:b] for s, (a, b) in bounds.items()}, borders, ending)
    for weight in trained:
        weight.grad = torch.zeros_like(weight)
    activations = passes.peak(plan.ranks[rank])
    numbers = sum(w.numel() for w in trained)
    return RankMemory(
        layers=tuple(bounds.values()),
        frozen=frozen,
        trained=numbers * _bytes_of_a_trained_weight(settings),
        num_trained=numbers,
        activations=activations,
    )


def _bytes_of_a_trained_weight(settings: MemorySettings) -> float:
    """Return the bytes of a weight, its gradient and the optimizer's state on one rank."""
    adam = bytes_of_a_weight(settings.dtype, settings.variant)
    left_out = _OPTIMIZERS["adamw"] - _OPTIMIZERS[settings.optimizer]
    return adam - left_out * BYTES["fp32"] / (settings.replicas if settings.zero_stage else 1)


class _Passes:
    """Runs the passes of a rank on tensors without numbers, and watches what is there.

    Args:
        plan: All ranks'.
        layers: Of each stage of the rank.
        borders: What enters each stage of the plan.
        ending: The loss of logits and labels, and labels.
    """

    def __init__(
        self,
        plan: Plan,
        layers: Mapping[int, Sequence[Any]],
        borders: Sequence[Any],
        ending: tuple[Any, Tensor],
    ) -> None:
        self._last = plan.num_stages - 1
        self._layers, self._borders, self._ending = layers, borders, ending
        self._kept: dict[tuple[int, int], Any] = {}

    def peak(self, actions: Sequence[Action]) -> float:
        """Return the most bytes that the passes of the actions need at a time."""
        with _watching() as live:
            for action in actions:
                if action.kind is Kind.FORWARD:
                    self._kept[action.stage, action.micro_batch] = self._forward(action.stage)
                elif action.kind in WEIGHT_GRADIENTS:  # until then all is kept
                    self._backward(
                        action.stage, *self._kept.pop((action.stage, action.micro_batch))
                    )
            self._kept.clear()
            return float(live.peak)

    def _forward(self, stage: int) -> tuple[Any, Any]:
        def received(tensor: Tensor) -> Tensor:
            own = torch.empty_like(tensor)
            return own.requires_grad_() if own.is_floating_point() else own

        inputs = tree_map_only(Tensor, received, self._borders[stage])
        outputs: Any = tree_map_only(Tensor, Tensor.clone, inputs)
        for layer in self._layers[stage]:
            outputs = layer(outputs)
        if stage == self._last:
            loss, labels = self._ending
            outputs = loss(outputs, labels)
        return inputs, outputs

    def _backward(self, stage: int, inputs: Any, outputs: Any) -> None:
        graphs = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
        if graphs:
            torch.autograd.backward(graphs, [torch.empty_like(each) for each in graphs])


class _Live(TorchDispatchMode):
    """Counts the bytes of the tensors that operations inside have made, while they live.

    Attributes:
        now: Bytes at present.
        peak: The most there were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if _is_tensor(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in filter(_is_tensor, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if storage._cdata not in before:
                self._add(storage)
        return result

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


@contextmanager
def _watching() -> Iterator[_Live]:
    live = _Live()
    with live:
        yield live
