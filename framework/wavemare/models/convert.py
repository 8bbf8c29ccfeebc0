# SPDX-License-Identifier: Apache-2.0
"""``to_pipeline``: from a transformers model to a DeepSpeed pipeline."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor
from transformers import PreTrainedModel

from wavemare.engine.pipe.replicas import ReplicaTopology
from wavemare.errors import ConfigError, LaunchError, ModelError
from wavemare.models.adapted import AdaptedPipeline
from wavemare.models.adapters import (
    PREFIX,
    base_of,
    is_adapted,
    make_ready,
    whole_without_weights,
)
from wavemare.models.deferred import is_deferred, lacks_weights, read_weights
from wavemare.models.families import SUPPORTED, family_of, split_chain, split_loss
from wavemare.models.layers import PipelineLayer, TiedHead, name_weights, with_auxiliary_loss
from wavemare.models.module import Conversion, TransformerPipeline
from wavemare.models.proof import has_own_forward, prove
from wavemare.models.quantized import has_quantized, whole_shape
from wavemare.models.timing import layer_times
from wavemare.parallel.tensor.partition import check_equal_weights, is_split, split_embedding
from wavemare.pipeline.plan.partition import (
    PARTITION_KEY,
    STAGES_KEY,
    balanced_cuts,
    check_partition,
    cuts_of_replicas,
    explicit_cuts,
)

_MEGABYTE = 1e6
_logger = logging.getLogger("wavemare")


def to_pipeline(
    model: PreTrainedModel,
    *,
    num_stages: int,
    partition: str | Sequence[int] | Sequence[Sequence[int]] = "parameters",
    inputs: Sequence[str] | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    activation_checkpoint_interval: int = 0,
    verify: bool = True,
    dynamic_shape: bool = False,
    untie: bool = False,
    homes: Sequence[int] | None = None,
    replicas: int = 1,
) -> TransformerPipeline:
    """Turn a transformers model into a pipeline; every process calls this with the same model.

    A model that `split_model` has split over consecutive ranks becomes a pipeline of its parts:
    the axes of the processes are then ``pipe``, ``data`` and ``model``.

    The pipeline's layers are the model's own submodules. ``torch.distributed`` must have been
    initialized (``deepspeed.init_distributed()``).

    Args:
        model: GPT-2 with its language-modelling head, BERT for masked language modelling or
            sequence classification, or a causal language model with a ``base_model_pp_plan``; or
            one of these in a ``PeftModel`` of LoRA.
        num_stages: Number of stages; must divide the number of processes.
        partition: ``parameters``, ``compute`` (the same without the word embedding, whose rows are
            looked up), ``time``, ``uniform``, the first layer of each stage, or these layers of
            each replica.
        inputs: Batch entries that travel with the hidden states, ``input_ids`` first; the family's
            default if omitted.
        loss_fn: Loss of (logits, labels); the head's own if omitted.
        activation_checkpoint_interval: Layers per activation checkpoint; 0 keeps all activations.
        verify: Whether to compare the layers' results with the model's on a small batch; not done
            where its weights are still to be read (`wavemare.models.deferred`).
        dynamic_shape: Whether batches differ in shape.
        untie: Whether a head that is tied to the embedding gets a copy of the weight, trained by
            itself; rank 0 then warns of it. ``model`` stays tied.
        homes: For each stage its rank, where ranks have several: the model is then cut into as many
            stages, and ``num_stages`` is the number of ranks. One for each if omitted.
        replicas: Of ``wavemare.local_steps``, each of consecutive ranks, in which pipelines end.

    Returns:
        The stage of this process, or its stages.

    Raises:
        ModelError: The model cannot be converted, its layers do not compute what it computes, or
            stages would share a weight.
        ConfigError: Stages, partition or inputs do not fit the model or the processes.
        LaunchError: ``torch.distributed`` is not initialized.
    """
    _check_launch()
    model_ranks = _model_ranks(model)
    _check_stages(num_stages, model_ranks, replicas)
    conversion = take_apart(model, inputs, untie=untie)
    if verify and not is_deferred(base_of(model)):
        prove(base_of(model), conversion.chain, conversion.inputs, conversion.loss)
    passed_over = _passed_over(model, conversion.chain)
    _check_hooks(model, passed_over)
    if conversion.untied and dist.get_rank() == 0:
        warn_of_untying(tied_weights(model))
    places = homes or range(num_stages)
    data_ranks = dist.get_world_size() // (replicas * num_stages * len(model_ranks))
    cuts = _cuts_of(model, conversion, partition, places, data_ranks)
    kind = partial(AdaptedPipeline, adapters=model.peft_config) if is_adapted(model) else None
    late = is_deferred(model)
    module = (kind or TransformerPipeline)(
        conversion,
        cuts,
        homes=homes,
        topology=_topology(num_stages, model_ranks, replicas),
        loss_fn=loss_fn,
        activation_checkpoint_interval=activation_checkpoint_interval,
        dynamic_shape=dynamic_shape,
    )
    module.passed_over.update(passed_over.values())
    if late and len(model_ranks) > 1:
        check_equal_weights(module, split_embedding(model).group)
    return module


def _passed_over(
    model: torch.nn.Module, chain: Sequence[PipelineLayer]
) -> dict[str, torch.nn.Module]:
    """Return the modules that no layer calls, by their names: the model itself, a tied head."""
    called = {module for layer in chain for module in layer.modules()}
    return {name: module for name, module in model.named_modules() if module not in called}


def _check_hooks(model: torch.nn.Module, passed_over: Mapping[str, torch.nn.Module]) -> None:
    """Refuse hooks on gradients of modules that no layer calls; warn of others and of own forwards.

    What a hook changes in a forward pass, the proof has shown.

    Raises:
        ModelError: A module has such a hook.
    """
    for name, module in passed_over.items():
        # torch has no public way to list them.
        if module._backward_hooks or module._backward_pre_hooks:
            reason = "stages call the modules inside it, and it would not run"
            remedy = "Register it on those modules, or train with one stage"
            raise ModelError(name or type(model).__name__, "a backward hook", reason, remedy)
        if (module._forward_hooks or module._forward_pre_hooks) and dist.get_rank() == 0:
            told = name or type(model).__name__
            _logger.warning("a forward hook of %s does not run: stages call modules inside", told)
        if has_own_forward(module) and dist.get_rank() == 0:
            _logger.warning(
                "%s.forward is not called: stages call modules inside it, and the loss is that of "
                "transformers. In small batches it gave the same logits and loss, but another "
                "weight of a rare label, for example, would not show there. If its loss differs, "
                "train with one stage, or give the loss as model.loss_function.",
                name or type(module).__name__,
            )


def _cuts_of(
    model: Any, conversion: Conversion, partition: Any, homes: Sequence[int], data_ranks: int
) -> Any:
    """Return the bounds of all stages; those of each replica, if they are cut apart.

    Raises:
        ConfigError: The partition does not fit; or replicas are cut apart, and ranks have several
            stages.
    """
    if isinstance(partition, str) or not partition or isinstance(partition[0], int):
        return cut_chain(model, conversion.chain, conversion.inputs, partition, homes)
    cuts = cuts_of_replicas(partition, len(conversion.chain), len(homes), data_ranks)
    if list(homes) != list(range(len(homes))):
        reason = "replicas of other cuts have one stage on each rank, and this schedule has several"
        remedy = 'Give one list for all replicas, or the schedule "1f1b" or "zb-h1"'
        raise ConfigError(PARTITION_KEY, list(partition), reason, remedy)
    return cuts


def _check_launch() -> None:
    if not dist.is_initialized() or "LOCAL_RANK" not in os.environ:
        raise LaunchError(
            "torch.distributed",
            None,
            "it is not initialized, and a pipeline spans several processes",
            "Start with a launcher and call deepspeed.init_distributed() first",
        )


def _model_ranks(model: Any) -> list[int]:
    """Return the ranks over which a model is split, this one alone if it is not."""
    if not is_split(model):
        return [dist.get_rank()]
    return torch.distributed.get_process_group_ranks(split_embedding(model).group)


def _topology(stages: int, model_ranks: list[int], replicas: int) -> Any:
    """Return the topology of a split model's pipeline, or of replicas; None for DeepSpeed's own.

    Consecutive ranks share each layer.
    """
    tensor = len(model_ranks)
    data = dist.get_world_size() // (replicas * stages * tensor)
    if replicas > 1:
        topology: Any = ReplicaTopology(replicas, stages, data, tensor)
    else:
        topology = PipeModelDataParallelTopology(stages, tensor, data) if tensor > 1 else None
    if tensor > 1 and model_ranks not in topology.get_axis_comm_lists("model"):
        reason = "the ranks that share the model's layers are not consecutive"
        raise ConfigError("model", model_ranks, reason, "Split it over consecutive ranks")
    return topology


def _check_stages(stages: int, model_ranks: list[int], replicas: int) -> None:
    processes = dist.get_world_size() // replicas
    places = processes // len(model_ranks)
    if stages < 1 or places % stages:
        shared = f", each stage on {len(model_ranks)} ranks" if len(model_ranks) > 1 else ""
        raise ConfigError(
            STAGES_KEY,
            stages,
            f"{processes} processes cannot form pipelines of that many stages{shared}",
            f"Use a divisor of {places}",
        )


def take_apart(model: Any, inputs: Sequence[str] | None, *, untie: bool = False) -> Conversion:
    """Return a model's layers and their declared inputs, not cut into stages yet.

    Raises:
        ModelError: The model is none that can be converted.
        ConfigError: It does not take these inputs.
    """
    base = base_of(model)
    if not isinstance(base, PreTrainedModel):
        reason = "it is not a transformers model"
        remedy = f"Use {SUPPORTED}; docs/own-model.md cuts other models"
        raise ModelError("model", type(model).__name__, reason, remedy)
    family = family_of(base)
    make_ready(model)
    if lacks_weights(model):
        raise ModelError(
            "model",
            type(model).__name__,
            "its weights are on the meta device, so there is nothing to train",
            "Load it with from_pretrained or wavemare.models.from_folder, or build it on a device",
        )
    declared = family.declared(inputs)
    chain, config, loss = tuple(family.chain(base, declared)), base.config, family.loss(base)
    if is_split(model):
        chain, loss = split_chain(chain), split_loss(model, loss)
    prefix = PREFIX if is_adapted(model) else ""
    replaced = {f"{prefix}{name}": spare for name, spare in family.spares(base).items()}
    tied = tied_weights(model) if untie else ()
    if tied:
        chain, copies = give_own_weights(chain, tied)
        replaced |= copies
        config = copy.deepcopy(config)
        config.tie_word_embeddings = False
    loss = with_auxiliary_loss(base, chain, loss)
    return Conversion(
        family=family.name,
        inputs=declared,
        chain=chain,
        loss=loss,
        names=name_weights(model, chain, replaced),
        skeleton=_without_weights(model, config) if dist.get_rank() == 0 else None,
        config=config,
        untied={weight.name: weight.source for weight in tied},
    )


def _without_weights(model: PreTrainedModel, config: Any) -> PreTrainedModel:
    if is_split(model) or has_quantized(model):
        return whole_without_weights(model, config)
    # A copy rather than a new instance: it keeps what loading left in the object, such as the
    # generation configuration and the renaming of weights to be undone when saving.
    memo: dict[int, Any] = {
        id(weight): torch.nn.Parameter(weight.to("meta"), weight.requires_grad)
        for weight in model.parameters()
    }
    computed = (v for m in model.modules() for v in vars(m).values() if isinstance(v, Tensor))
    memo |= {id(v): v.detach().to("meta") for v in (*model.buffers(), *computed)}
    # Not the process group that is bound to divided experts.
    memo |= {id(m.__dict__.get("forward")): None for m in model.modules()}
    memo[id(model.config)] = copy.deepcopy(config)
    return copy.deepcopy(model, memo)


def cut_chain(
    model: Any,
    chain: Sequence[PipelineLayer],
    inputs: Sequence[str],
    partition: str | Sequence[int],
    homes: Sequence[int],
) -> tuple[int, ...]:
    """Return the first layer of each stage, and one behind the last.

    Args:
        model: The model, for ``time``.
        chain: Its layers.
        inputs: Names of the tensors that enter the first layer.
        partition: See `to_pipeline`.
        homes: For each stage its rank.

    Raises:
        ConfigError: There is no such partition, or it does not fit the layers.
    """
    stages = len(homes)
    if not isinstance(partition, str):
        return explicit_cuts(partition, len(chain), stages)
    check_partition(partition)
    if partition == "uniform":
        weights = [1.0] * len(chain)
    elif partition == "parameters":
        weights = [parameter_cost(layer) for layer in chain]
    elif partition == "compute":
        weights = [0.0 if layer.takes_integers else parameter_cost(layer) for layer in chain]
    else:
        read_weights(model)
        weights = layer_times(model, chain, inputs)
    return balanced_cuts(weights, stages, homes)


def parameter_cost(layer: PipelineLayer) -> float:
    """Return what a layer costs by its parameters: 3 for each, or 2 for one that is frozen.

    They are for the forward pass, the gradient of the input, and that of the weight. A frozen
    embedding costs nothing: it only looks up rows.
    """
    # A tied head has no weights of its own, but multiplies by those of the embedding.
    parts = [layer, layer.tied] if isinstance(layer, TiedHead) else [layer]
    frozen = 0 if layer.takes_integers else 2
    weights = [weight for part in parts for weight in part.parameters()]
    sizes = [(whole_shape(w).numel(), 3 if w.requires_grad else frozen) for w in weights]
    return float(sum(size * cost for size, cost in sizes))


@dataclass(frozen=True)
class TiedWeight:
    """A weight that the first and the last layer of a model share.

    Args:
        name: Its name in the head, as in the model's state dict.
        source: Its name in the word embedding.
        num_parameters: Number of elements.
        num_bytes: Size in bytes, in the model's own type.
    """

    name: str
    source: str
    num_parameters: int
    num_bytes: int


def tied_weights(model: Any) -> tuple[TiedWeight, ...]:
    """Return the weights that a transformers model shares across its layers.

    What counts is whether the two are one parameter, not what the configuration says. One that is
    frozen is not listed: copies of it stay equal by themselves. Names of a
    single layer's parameter, such as those of the bias of BERT's head, are not listed.

    Args:
        model: A transformers model.

    Returns:
        The weight of its head if it is that of its word embedding, else nothing.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None or weight is not embedding.weight or not weight.requires_grad:
        return ()
    names = {id(module): name for name, module in model.named_modules()}
    return (
        TiedWeight(
            name=f"{names[id(head)]}.weight",
            source=f"{names[id(embedding)]}.weight",
            num_parameters=weight.numel(),
            num_bytes=weight.nbytes,
        ),
    )


def give_own_weights(
    chain: Sequence[PipelineLayer], tied: Sequence[TiedWeight]
) -> tuple[tuple[PipelineLayer, ...], dict[str, Tensor]]:
    """Replace the tied head of a chain by one with a copy of the weight.

    Args:
        chain: The layers of a model.
        tied: What :func:`tied_weights` said of it.

    Returns:
        The layers, and the copies by their names in the model's state dict.
    """
    *others, head = chain
    assert isinstance(head, TiedHead), "the chain is not tied as its model is"
    own = head.untied()
    return (*others, own), {weight.name: own.get_parameter("module.weight") for weight in tied}


def warn_of_untying(tied: Sequence[TiedWeight]) -> None:
    """Tell what was untied, why, what it costs, and how to keep it tied."""
    for weight in tied:
        _logger.warning(
            "%s is no longer tied to %s: a weight on two stages has to be made equal at each step, "
            "for which stages that run asynchronously would have to wait. Both start from the same "
            "values and are trained separately; this costs %d more parameters (%.2f MB of "
            'weights, and their gradients and optimizer state). To keep them tied, set "schedule": '
            '"1f1b" in "wavemare": {"pipeline": ...}.',
            weight.name,
            weight.source,
            weight.num_parameters,
            weight.num_bytes / _MEGABYTE,
        )
