# SPDX-License-Identifier: Apache-2.0
"""A ``PipelineModule`` of which a rank may hold several stages, each a part of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from deepspeed import DualPipeVModule
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from torch import nn

from wavemare.engine.pipe.replicas import grid_of, groups_of_each
from wavemare.engine.seams import replaced
from wavemare.errors import ConfigError, ModelError
from wavemare.pipeline.plan.partition import balanced_cuts


class ChunkedPipelineModule(PipelineModule):
    """A ``PipelineModule`` cut into more stages than there are ranks.

    One stage at a time is what ``forward`` runs; see `activate`. Files of a checkpoint are named by
    the numbers of layers, as DeepSpeed's. Layers that are tied on one rank share one module.

    Attributes:
        homes: For each stage its rank.
        own_stages: The stages of this rank.

    Args:
        args: Those of ``PipelineModule``; its ``num_stages`` is the number of ranks. Where a rank
            has several stages, ``partition_method`` balances the ranks, then the stages; it may
            also be the bounds of all stages, or these of each replica.
        homes: For each stage its rank; one stage for each rank if omitted.
        kwargs: Those of ``PipelineModule``; the topology may be a `ReplicaTopology`.
    """

    homes: tuple[int, ...] = ()

    def __init__(self, *args: Any, homes: Sequence[int] | None = None, **kwargs: Any) -> None:
        self._given_homes = homes
        with grid_of(kwargs.get("topology")):
            super().__init__(*args, **kwargs)

    def _index_tied_modules(self) -> Any:
        with groups_of_each(self._topo):
            return super()._index_tied_modules()

    def _partition_layers(self, method: Any = "uniform") -> None:
        given, ranks = self._given_homes, self._topo.get_dim("pipe")
        self.homes = tuple(range(ranks) if given is None else given)
        self.num_stages = len(self.homes)
        self._cut(method)
        self.own_stages = tuple(s for s, rank in enumerate(self.homes) if rank == self.stage_id)
        self._funcs: dict[int, list[Any]] = {}
        self._checkpointable: dict[int, list[Any]] = {stage: [] for stage in self.own_stages}

    def _cut(self, method: str | Sequence[int]) -> None:
        """Find the bounds of all stages, or take those that came as ``partition_method``."""
        if not isinstance(method, str):
            own: Any = method
            if not isinstance(own[0], int):  # those of each replica
                own = own[self._topo.get_coord(self.global_rank).data]
            self.parts = list(own)
        elif self.num_stages == self._topo.get_dim("pipe"):
            super()._partition_layers(method)
        else:
            weights = self._weights(method.lower())
            self.parts = list(balanced_cuts(weights, self.num_stages, self.homes))

    def _weights(self, method: str) -> Sequence[float]:
        """Return the layers' weights in the balance, which are DeepSpeed's."""
        kind, _, pattern = method.partition(":")
        if kind == "parameters":
            return list(self._count_layer_params())
        if kind not in ("uniform", "type"):
            reason = "several stages per rank are not balanced by it"
            remedy = "Use parameters, uniform, type:REGEX, or the bounds of the stages"
            raise ConfigError("partition_method", method, reason, remedy)
        layers = range(len(self._layer_specs))
        found = layers if kind == "uniform" else self._find_layer_type(pattern)
        return [float(layer in found) for layer in layers]

    def _build(self) -> None:
        for stage in self.own_stages:
            self._set_bounds(self.parts[stage], self.parts[stage + 1])
            self.forward_funcs: list[Any] = []
            self._build_stage()
            self._funcs[stage] = self.forward_funcs
        self.activate(self.own_stages[0])

    def _build_stage(self) -> None:
        """Build the layers of one stage."""
        super()._build()

    def activate(self, stage: int) -> None:
        """Make one of this rank's stages the one that ``forward`` runs."""
        # As `_set_bounds` does; a module's attributes are slow to set one by one.
        self.__dict__.update(
            forward_funcs=self._funcs[stage],
            is_checkpointable_results=self._checkpointable[stage],
            _local_start=self.parts[stage],
            _local_stop=self.parts[stage + 1],
        )

    def each_stage(self) -> Iterator[int]:
        """Make one of this rank's stages after the other the active one; in the end the first."""
        for stage in self.own_stages:
            self.activate(stage)
            yield stage
        self.activate(self.own_stages[0])

    def local_layers(self) -> list[Any]:
        """Return the layers of all stages of this rank."""
        return [layer for stage in self.own_stages for layer in self._funcs[stage]]

    def holds(self, layer: int) -> bool:
        """Whether this rank has a layer, by its number in the model."""
        return any(self.parts[s] <= layer < self.parts[s + 1] for s in self.own_stages)

    def stage_of(self, parameter: Any) -> int | None:
        """Return this rank's stage that has a parameter; of several, None for one that none has."""
        for stage in self.own_stages:
            layers = (layer for layer in self._funcs[stage] if isinstance(layer, nn.Module))
            if len(self.own_stages) == 1 or any(
                parameter is own for layer in layers for own in layer.parameters()
            ):
                return stage
        return None

    def stage_owner(self, layer_idx: int) -> int:
        """Return the rank that has a layer."""
        return self.homes[super().stage_owner(layer_idx)]

    def _precompute_checkpointable_values(self) -> None:
        for stage in self.each_stage():
            self.is_checkpointable_results_interval: int | None = None  # computed for another stage
            super()._precompute_checkpointable_values()
            self._checkpointable[stage] = self.is_checkpointable_results

    def save_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Save the layers of all stages of this rank."""
        for _ in self.each_stage():
            super().save_state_dict(*args, **kwargs)

    def load_state_dir(self, *args: Any, **kwargs: Any) -> None:
        """Load the layers of all stages of this rank."""
        # Each stage would make tied weights equal, and ranks may have unlike numbers of stages.
        with replaced(self, {"_synchronize_tied_weights": lambda: None}):
            for _ in self.each_stage():
                super().load_state_dir(*args, **kwargs)
        self._synchronize_tied_weights()

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the layers of all stages of this rank."""
        for _ in self.each_stage():
            super().compile(*args, **kwargs)


def check_shared(layers: Iterable[Any], owner: Callable[[int], int]) -> None:
    """Refuse a trained weight of layers on several ranks, each of which would train a copy.

    Args:
        layers: Of the whole model, in order; only modules are looked at.
        owner: Gives the rank of a layer, by its number.

    Raises:
        ModelError: Layers on several ranks have one weight.
    """
    first: dict[int, int] = {}
    for number, layer in enumerate(layers):
        weights = layer.named_parameters() if isinstance(layer, nn.Module) else ()
        for name, weight in weights:
            other = first.setdefault(id(weight), number)
            if weight.requires_grad and owner(other) != owner(number):
                raise ModelError(
                    f"layers {other} and {number}",
                    getattr(layer, "weight_names", {}).get(name, name),
                    "both have this weight, and stages on several ranks would train it apart",
                    "Give each layer a weight of its own, or put both on one rank "
                    "(wavemare.pipeline.partition); in a PipelineModule, write both as "
                    "TiedLayerSpec",
                )


def tied_on_several(pipeline: Any) -> list[str]:
    """Return the keys of ``TiedLayerSpec`` whose layers are on several ranks, on all ranks alike.

    Args:
        pipeline: Any module; of others than pipelines there are none.
    """
    owners: dict[str, set[int]] = {}
    for number, spec in enumerate(getattr(pipeline, "_layer_specs", ())):
        if isinstance(spec, TiedLayerSpec):
            owners.setdefault(spec.key, set()).add(pipeline.stage_owner(number))
    return sorted(key for key, ranks in owners.items() if len(ranks) > 1)


def numbered_layers(pipeline: PipelineModule) -> Iterator[tuple[int, nn.Module]]:
    """Yield the layers of all stages of this rank that are modules, with their numbers."""
    stages: list[tuple[int, list[Any]]]
    if isinstance(pipeline, DualPipeVModule):
        starts = [start for start, _ in pipeline.phase_bounds]
        stages = list(zip(starts, pipeline.phase_funcs, strict=True))
    elif isinstance(pipeline, ChunkedPipelineModule):
        stages = [(pipeline.parts[stage], pipeline._funcs[stage]) for stage in pipeline.own_stages]
    else:
        stages = [(pipeline._local_start, pipeline.forward_funcs)]
    for start, layers in stages:
        for number, layer in enumerate(layers, start):
            spec = pipeline._layer_specs[number]
            # A tied layer may be called through a function of the caller's.
            own = pipeline.tied_modules[spec.key] if isinstance(spec, TiedLayerSpec) else layer
            if isinstance(own, nn.Module):
                yield number, own
