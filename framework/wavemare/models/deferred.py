# SPDX-License-Identifier: Apache-2.0
"""Models whose weights are read late: each rank reads those of its own stage, and its own parts.

Such a model is on the meta device, and each of its parameters knows which weight of a source it
will be. Stages, tensor parallelism and divided experts cut it as they cut any model. In the end
`read_weights` reads what is left of it on the rank, one weight at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wavemare.errors import ModelError
from wavemare.models import quantized
from wavemare.models.source import Stored, WeightSource, Zeros, cast

_MARK = "deferred"
_LEFT = {_MARK, "requires_grad"}  # the second is left there by accelerate


@dataclass(frozen=True)
class Deferred:
    """What a parameter on the meta device will be.

    Args:
        source: Where it is read from.
        name: Of the weight.
        dim: The dimension of which the parameter is a part.
        pieces: The first and last element of each of its pieces, one after the other; None for the
            whole weight. Rows of the parameter beyond them are zero.
        then: What happens to the parameter once it has been read.
        version: Of the parameter, by which autograd counts changes in place.
    """

    source: WeightSource
    name: str
    dim: int = 0
    pieces: tuple[tuple[int, int], ...] | None = None
    then: list[Callable[[Any], Any]] = field(default_factory=list)
    version: int = 0

    def check_unchanged(self, parameter: Any) -> None:
        """Check that nobody has set values of the parameter, which has none.

        Raises:
            ModelError: It was changed in place.
        """
        if parameter._version != self.version:
            reason = "it was changed in place, and has no values until each rank reads its part"
            remedy = "Load the model with from_pretrained, or change the files"
            raise ModelError("weight", self.name, reason, remedy)

    def read_into(self, target: Tensor) -> None:
        """Read the weight, or its part, into a tensor of the parameter's shape and type.

        Raises:
            ModelError: A number of it is out of the type's range.
        """
        if self.pieces is None:
            target.copy_(cast(self.name, self.source.read(self.name), target.dtype))
            return
        start, before = 0, (slice(None),) * self.dim
        for first, last in self.pieces:
            if first < last:
                piece = self.source.read(self.name, (*before, slice(first, last)))
                piece = cast(self.name, piece, target.dtype)
                target.narrow(self.dim, start, last - first).copy_(piece)
            start += last - first
        target.narrow(self.dim, start, target.shape[self.dim] - start).zero_()

    def read(self, parameter: Any) -> nn.Parameter:
        """Return what stands in a parameter's place, of its type."""
        if not quantized.is_quantized(parameter):
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
            self.read_into(values)
            return nn.Parameter(values, parameter.requires_grad)
        # Numbers of the whole weight share statistics.
        whole = self.source.read(self.name).to(parameter.dtype)
        found = quantized.quantized_like(parameter, whole)
        return found if self.pieces is None else quantized.part_of(found, self.dim, self.pieces)


def deferred(parameter: Any) -> Deferred | None:
    """Return what a parameter will be read as; None if it has its values."""
    return vars(parameter).get(_MARK)


def is_deferred(model: nn.Module) -> bool:
    """Whether some of a model's weights have not been read yet."""
    return any(_MARK in vars(parameter) for parameter in model.parameters())


def lacks_weights(model: nn.Module) -> bool:
    """Whether weights of a model are neither here nor to be read: on the meta device, or cut."""
    return any(
        (parameter.is_meta and _MARK not in vars(parameter)) or hasattr(parameter, "ds_id")
        for parameter in model.parameters()
    )


def defer(model: Any, source: WeightSource, dtype: torch.dtype | None = None) -> Any:
    """Let a model on the meta device get its weights from a source, in the end.

    Buffers that the source has are read at once.

    Args:
        model: Of transformers, with its ties; its names are those of the source.
        source: The weights.
        dtype: Of the weights that are floating-point; the source's if omitted.

    Returns:
        The model.

    Raises:
        ModelError: The source lacks a weight, or has it in another shape.
    """
    stored = source.stored
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in stored:
            names.setdefault(id(parameter), name)
    for own, parameter in model.named_parameters():
        weight = stored.get(names.get(id(parameter), own))
        if weight is None or weight.shape != tuple(parameter.shape):
            reason = "the source has no weight of this name"
            if weight is not None:
                shapes = list(weight.shape), list(parameter.shape)
                reason = f"its shape is {shapes[0]} where the model has {shapes[1]}"
            remedy = "Give the configuration that the weights were trained with"
            raise ModelError("weight", own, reason, remedy)
        kind = weight.dtype if dtype is None or not weight.dtype.is_floating_point else dtype
        parameter.data = parameter.data.to(kind)
        mark = Deferred(source, names[id(parameter)], version=parameter._version)
        vars(parameter)[_MARK] = mark
    kept = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in stored and name in kept:
            buffer.copy_(source.read(name))
    return model


def part_of(
    whole: Any, dim: int, pieces: Sequence[tuple[int, int]], size: int | None = None
) -> nn.Parameter:
    """Return a deferred parameter that will be a part of a deferred one.

    Args:
        whole: It stays as it is.
        dim: The dimension that is cut.
        pieces: See `Deferred`.
        size: Of the dimension, with padding; by default that of the pieces.
    """
    shape = list(whole.shape)
    shape[dim] = sum(last - first for first, last in pieces) if size is None else size
    part: Any = torch.empty(shape, dtype=whole.dtype, device="meta")
    part = quantized.unread(whole, part) or nn.Parameter(part, whole.requires_grad)
    mark = replace(_mark_of_whole(whole), dim=dim, pieces=tuple(pieces), then=[])
    vars(part)[_MARK] = replace(mark, version=part._version)
    return part


def keep_rows(parameter: Any, first: int, last: int) -> None:
    """Cut a deferred parameter to some of its rows, in place."""
    mark = _mark_of_whole(parameter)
    parameter.data = parameter.data[first:last]
    vars(parameter)[_MARK] = replace(mark, dim=0, pieces=((first, last),))


def copy_of(parameter: Any) -> Any:
    """Return a copy of a parameter with its hooks; of a deferred one, a deferred one."""
    copied = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    mark = deferred(parameter)
    if mark is not None:
        mark.check_unchanged(parameter)
        vars(copied)[_MARK] = replace(mark, then=[], version=copied._version)
    hooks, after = hooks_of(parameter)

    def hook(own: Any) -> None:
        for each in hooks:
            own.register_hook(each)
        for each in after:
            own.register_post_accumulate_grad_hook(each)

    when_read(copied, hook)
    return copied


def hooks_of(parameter: Any) -> tuple[list[Any], list[Any]]:
    """Return the hooks of a parameter's gradient, and those after it has accumulated."""
    # torch has no public way to list them.
    before, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return list((before or {}).values()), list((after or {}).values())


def when_read(parameter: Any, action: Callable[[Any], Any]) -> Any:
    """Do something with a parameter, at once or when it has been read.

    Returns:
        What the action has returned; None if it is still to be done.
    """
    mark = deferred(parameter)
    if mark is None:
        return action(parameter)
    mark.then.append(action)
    return None


def become(parameter: Any, other: Tensor) -> None:
    """Let a parameter be what another one is; it stays the same object, and keeps its hooks."""
    torch.utils.swap_tensors(parameter, other)
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(parameter, name)
        if hooks:  # listed still, and no longer run: torch takes a dictionary when it is set
            setattr(parameter, name, None)
            setattr(parameter, name, hooks)


def read_weights(model: nn.Module) -> None:
    """Read all deferred weights of a model or a layer, one at a time; parameters stay the same.

    Raises:
        CheckpointError: A file is damaged.
        ModelError: A number is out of the range of its parameter's type, or a weight was changed.
    """
    for parameter in model.parameters():
        mark = deferred(parameter)
        if mark is None:
            continue
        mark.check_unchanged(parameter)
        read = mark.read(parameter)
        own = vars(read).keys()
        kept = {k: v for k, v in vars(parameter).items() if k not in _LEFT and k not in own}
        vars(read).update(kept)
        become(parameter, read)
        for action in mark.then:
            action(parameter)


def unread_model(
    config: Any,
    source: WeightSource,
    dtype: torch.dtype | None = None,
    kind: Any = None,
    quantization_config: Any = None,
) -> Any:
    """Return the model of a configuration, whose weights are read from a source in the end.

    Args:
        config: Of transformers.
        source: The weights by their names in memory.
        dtype: See `defer`.
        kind: The class; by default the first of the configuration's ``architectures``, or the
            causal language model.
        quantization_config: See `from_folder`.

    Raises:
        ModelError: See `defer`.
    """
    from wavemare.models.disk_names import empty_model

    model = empty_model(config, kind, buffers=True)
    if quantization_config is not None:
        quantized.convert(model, quantization_config)
    return defer(model, source, dtype)


def zero_model(make: Callable[[], Any]) -> Any:
    """Return a new model of zeros, whose weights a checkpoint will replace.

    Each rank makes those of its stage, and its own parts, and no random numbers are drawn.

    Args:
        make: Makes the model, of transformers.
    """
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = make()
    model.tie_weights()
    named = model.named_parameters(remove_duplicate=False)
    return defer(model, Zeros({name: Stored(tuple(p.shape), p.dtype) for name, p in named}))


def from_folder(
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    kind: Any = None,
    quantization_config: Any = None,
) -> Any:
    """Return the model of a Hugging Face folder, whose weights are read late.

    `wavemare.initialize` reads them: each rank those of its stage, and its own parts of layers and
    experts that are divided. So no rank has to hold the whole model. That a pipeline or a split
    model computes the same is not proved beforehand, for want of a whole model.

    Args:
        folder: With ``config.json`` and safetensors.
        dtype: Of the weights; the folder's if omitted.
        kind: The model's class; by default the one that ``config.json`` names.
        quantization_config: A ``BitsAndBytesConfig`` of 4 bits, or a ``TorchAoConfig`` of
            ``Int8WeightOnlyConfig()``. Each rank quantizes the weights of its stage, one after the
            other, as it reads them.

    Raises:
        ModelError: It is no folder of a model, its weights are quantized in the files, or are to be
            in another form than these.
        CheckpointError: A file is missing or damaged.
    """
    import transformers

    from wavemare.models.folder import HfFolder

    quantized.check_unquantized(folder)
    source = HfFolder(folder, kind)
    model = unread_model(source.config, source, dtype, kind, quantization_config)
    if (Path(folder) / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    model.name_or_path = str(folder)
    return model


def _mark_of_whole(parameter: Any) -> Deferred:
    mark = deferred(parameter)
    assert mark is not None, "the parameter has its values"
    if mark.pieces is not None:
        reason = "it has been cut before it was read"
        raise ModelError("weight", mark.name, reason, "Divide layers or experts, not both")
    mark.check_unchanged(parameter)
    return mark
