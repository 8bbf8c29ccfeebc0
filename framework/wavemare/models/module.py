# SPDX-License-Identifier: Apache-2.0
"""A transformers model as a DeepSpeed ``PipelineModule``."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint
from torch import Tensor, nn
from torch import distributed as dist

from wavemare.engine.experts import expert_group, is_divided
from wavemare.engine.pipe.chunks import ChunkedPipelineModule, check_shared
from wavemare.engine.pipe.own_cuts import SharedSegments
from wavemare.engine.seams import replaced
from wavemare.models.activations import split_batch
from wavemare.models.deferred import read_weights
from wavemare.models.families import ACCEPTED, Loss
from wavemare.models.layers import AuxiliaryLoss, PipelineLayer, TiedHead, spec_of
from wavemare.models.quantized import whole_shape


@dataclass(frozen=True)
class Conversion:
    """A model taken apart.

    Args:
        family: Name of the family.
        inputs: Names of the tensors that enter the first layer.
        chain: All layers, from ``input_ids`` to logits.
        loss: The head's loss.
        names: For each key of the model's state dict the key under which a layer holds it.
        skeleton: The model without its weights (on the meta device), for saving; on rank 0.
        config: The model's configuration.
        untied: For each weight that was given a copy of its own, the name of the weight it was
            tied to; names of the model's state dict.
    """

    family: str
    inputs: tuple[str, ...]
    chain: tuple[PipelineLayer, ...]
    loss: Loss
    names: Mapping[str, str]
    skeleton: Any
    config: Any
    untied: Mapping[str, str]


class TransformerPipeline(ChunkedPipelineModule):
    """The stage of a transformers model that this process trains, or its stages.

    Layers of other stages are not referenced: their memory is freed when the caller drops the
    model.

    Args:
        conversion: The model taken apart.
        cuts: Bounds of the stages, one more than there are stages; or those of each replica.
        homes: For each stage its rank in the pipeline; one stage for each rank if None.
        topology: Of a split model, with the axes ``pipe``, ``data`` and ``model``; else None.
        loss_fn: Loss of (logits, labels); the head's own if None.
        activation_checkpoint_interval: Layers per activation checkpoint; 0 keeps all activations.
        dynamic_shape: Whether batches differ in shape.

    Attributes:
        family: Name of the model's family.
        config: The model's configuration.
        inputs: Names of the tensors that enter the first layer, ``input_ids`` first.
        untied: For each untied weight the name of the one it was tied to, as in the model's state
            dict; empty unless something was untied.
        shared_segments: Who has which layers, where replicas are cut apart; else None.
        sends_router_sums: Whether sums for an auxiliary loss travel, and follow the logits.
        expert_ranks: Over how many consecutive data ranks experts are divided; 1 if over none, or
            over the ranks of one split model alone.
        passed_over: Modules of the caller's model that no stage calls.
        num_parameters: Number of parameters of all stages. One that is tied, or on several ranks
            of an axis ``model``, counts once.
    """

    sends_whole = True
    """Whether messages between stages hold whole tensors, rather than each rank of the axis
    ``model`` its part of them, as DeepSpeed would have it."""

    def __init__(
        self,
        conversion: Conversion,
        cuts: Sequence[int] | Sequence[Sequence[int]],
        *,
        homes: Sequence[int] | None = None,
        topology: Any = None,
        loss_fn: Callable[..., Tensor] | None = None,
        activation_checkpoint_interval: int = 0,
        dynamic_shape: bool = False,
    ) -> None:
        own = conversion.loss
        if isinstance(own, AuxiliaryLoss) and loss_fn is not None:
            loss_fn = replace(own, main=loss_fn)
        # DeepSpeed prints its topology and seeds.
        with redirect_stdout(io.StringIO()):
            super().__init__(
                layers=[spec_of(layer, conversion.chain) for layer in conversion.chain],
                homes=homes,
                num_stages=None if topology else len(set(homes or range(len(cuts) - 1))),
                topology=topology,
                loss_fn=loss_fn or own,
                partition_method=tuple(cuts),
                activation_checkpoint_interval=activation_checkpoint_interval,
                dynamic_shape=dynamic_shape,
            )
        apart = not isinstance(cuts[0], int)
        bounds_of_replicas: Any = cuts if apart else [self.parts]
        for bounds in bounds_of_replicas:  # all, so that ranks fail alike
            owner = self.stage_owner if not apart else partial(bisect_right, bounds[1:])
            check_shared(conversion.chain, owner)
        self.shared_segments = SharedSegments(bounds_of_replicas, self.mpu()) if apart else None
        self.sends_router_sums = isinstance(own, AuxiliaryLoss)
        group = expert_group(p for layer in conversion.chain for p in layer.parameters())
        slices = self.mpu().get_slice_parallel_world_size()
        self.expert_ranks = 1 if group is None else dist.get_world_size(group) // slices
        self._expert_rank = 0 if group is None else dist.get_rank(group) // slices
        self.family = conversion.family
        self.config = conversion.config
        self.inputs = conversion.inputs
        self.untied = dict(conversion.untied)
        self.num_parameters = _count(conversion.chain)
        self.passed_over: WeakSet[nn.Module] = WeakSet()
        self._names = dict(conversion.names)
        self._skeleton = (conversion.skeleton,)  # in a tuple, so that it is no submodule
        self._own_for_clipping()
        for index, spec in enumerate(self._layer_specs):
            if not self.holds(index):
                spec.layer = None

    def split_batch(
        self, batch: Mapping[str, Tensor], *, labels_required: bool = True
    ) -> tuple[Tensor | tuple[Tensor, ...], Tensor | tuple[()]]:
        """Turn a Hugging Face batch into this pipeline's (inputs, labels).

        See :func:`wavemare.models.activations.split_batch`.

        Raises:
            ModelError: An entry is missing, not declared or of a wrong shape.
        """
        accepted = ACCEPTED[self.family]
        return split_batch(batch, self.inputs, labels_required=labels_required, accepted=accepted)

    def weight_names(self) -> dict[str, str]:
        """For each key of the model's state dict, the key under which a stage holds it."""
        return dict(self._names)

    def local_weights(self) -> dict[str, Tensor]:
        """Return the weights that this stage owns, by their names in the model's state dict.

        Tied weights are owned by their first stage: there they belong to the embedding, elsewhere
        to no layer but only to DeepSpeed's tied modules. The tensors are the live ones.
        """
        return {name: value for layer in self._own() for name, value in layer.weights().items()}

    def unnamed_weights(self) -> list[str]:
        """Return the weights of this stage that the model does not know, by their names in it.

        They came after ``initialize``, as those of ``torch.nn.utils.prune`` do.
        """
        return [name for layer in self._own() for name in layer.unnamed()]

    def _own(self) -> list[PipelineLayer]:
        return [layer for layer in self.local_layers() if isinstance(layer, PipelineLayer)]

    def untied_parameters(self) -> dict[str, nn.Parameter]:
        """Return the copies that this stage holds, by the names of the weights they were tied to.

        An optimizer that was made for the model's own parameters does not know them.
        """
        return {
            self.untied[name]: parameter
            for layer in self.local_layers()
            if isinstance(layer, PipelineLayer)
            for own, parameter in layer.named_parameters()
            if (name := layer.weight_names[own]) in self.untied
        }

    @property
    def skeleton(self) -> Any:
        """The model without weights, on rank 0; else None."""
        return self._skeleton[0]

    def _build_stage(self) -> None:
        super()._build_stage()
        # DeepSpeed uses the tied embedding in the head's place; ours may have a bias of its own,
        # which has to be among the parameters and in the checkpoints.
        for index in range(self._local_start, self._local_stop):
            layer = self._layer_specs[index].layer
            if isinstance(layer, TiedHead):
                read_weights(layer)  # its bias
                self.forward_funcs[index - self._local_start] = layer
                self.add_module(str(index), layer)
                for parameter in layer.parameters():
                    parameter.ds_pipe_replicated = False  # type: ignore[attr-defined]

    def save_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Save the layers of this rank; each share of divided experts has files of its own."""
        grid, ranks = self._grid, self.expert_ranks
        place = {
            "data_parallel_id": grid.data_parallel_id // ranks,
            "data_parallel_size": grid.data_parallel_size // ranks,
        }
        if self.shared_segments is not None:  # DeepSpeed shares a stage's layers among replicas
            if grid.data_parallel_id:
                return
            place["data_parallel_size"] = 1
        with replaced(grid, place):
            super().save_state_dict(*args, **kwargs)

    def ckpt_layer_path(self, *args: Any) -> str:
        """Return the file of a layer as DeepSpeed's method of that name."""
        path = str(super().ckpt_layer_path(*args))
        share = f"-expert_{self._expert_rank:02d}-model_states" if self.expert_ranks > 1 else ""
        return path.replace("-model_states", share or "-model_states")

    def ckpt_layer_path_list(self, *args: Any) -> list[str]:
        """Return the files of a layer as DeepSpeed's method of that name: a rank reads its own."""
        paths = super().ckpt_layer_path_list(*args)
        own = f"-expert_{self._expert_rank:02d}-" if self.expert_ranks > 1 else ""
        return [path for path in paths if own in Path(path).name]

    @torch.no_grad()
    def _synchronize_tied_weights(self) -> None:
        # Recorded by autograd, the broadcast would warn at each backward pass.
        super()._synchronize_tied_weights()

    def _own_for_clipping(self) -> None:
        # DeepSpeed's clipping counts a parameter on other ranks than the first only if it is marked
        # so. Of a tied weight, whose gradients are equal on all its stages, the first one counts;
        # of one that the ranks of a split model all hold, that of the first rank. Of divided
        # experts no two of these ranks hold the same ones.
        first = self.mpu().get_slice_parallel_rank() == 0
        for parameter in self.parameters():
            marked: Any = parameter
            split = getattr(parameter, "tensor_model_parallel", False)
            replicated = getattr(parameter, "ds_pipe_replicated", False)
            marked.model_parallel = not replicated and (split or first or is_divided(parameter))
            if split:
                marked.tensor_model_parallel = not replicated

    def _is_checkpointable(self, funcs: Sequence[nn.Module]) -> bool:
        """Checkpoint groups that hold a block.

        The reentrant function loses the gradient of a group whose input is token ids.
        """
        layers = [func for func in funcs if isinstance(func, PipelineLayer)]
        reentrant = self.activation_checkpoint_func is not non_reentrant_checkpoint
        if reentrant and any(layer.takes_integers for layer in layers):
            return False
        return any(layer.is_block for layer in layers)


def _count(chain: Sequence[PipelineLayer]) -> int:
    weights = {id(weight): weight for layer in chain for weight in layer.parameters()}
    return sum(
        getattr(weight, "whole_numel", whole_shape(weight).numel()) for weight in weights.values()
    )
