# SPDX-License-Identifier: Apache-2.0
"""Tied weights: a head that multiplies by the word embedding, and how the two are parted."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from wavemare.models.layers import PipelineLayer, TiedHead

__all__ = ["TiedWeight", "give_own_weights", "tied_weights", "warn_of_untying"]

_MEGABYTE = 1e6

_logger = logging.getLogger("wavemare")


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

    What counts is whether the two are one parameter, not what the configuration says. Names of a
    single layer's parameter, such as those of the bias of BERT's head, are not listed.

    Args:
        model: A transformers model.

    Returns:
        The weight of its head if it is that of its word embedding, else nothing.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None or weight is not embedding.weight:
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
