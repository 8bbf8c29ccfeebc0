# SPDX-License-Identifier: Apache-2.0
"""The loss of validation samples, shared among the data-parallel ranks of an engine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from wavemare.data.loader import IndexedDataset, evaluation_batches
from wavemare.engine.launch.group import gather
from wavemare.files import atomic_write_text

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from wavemare.training.setup import Setup

BEST = "best.json"
"""Of the run folder: the best evaluation, whose model was exported."""


def evaluation_loader(
    engine: Any, samples: IndexedDataset, limit: int | None = None
) -> DataLoader[Any]:
    """Return this rank's micro-batches of a validation set, equally many on every rank.

    Args:
        engine: Of `wavemare.initialize`.
        samples: The validation set.
        limit: Samples over all ranks at most, spread over the whole set; None for all.

    Raises:
        DataError: The samples are fewer than the data-parallel ranks.
    """
    return evaluation_batches(
        samples,
        engine.train_micro_batch_size_per_gpu(),
        engine.data_rank,
        engine.data_world_size,
        limit,
    )


def evaluate(engine: Any, batches: DataLoader[Any] | Sequence[Any]) -> float:
    """Return the mean loss of micro-batches, the same on all ranks.

    Args:
        engine: Of `wavemare.initialize`.
        batches: This rank's, equally many on every rank: an `evaluation_loader`, or a list.
    """
    return float(engine.eval_batch(iter(batches), num_micro_batches=len(batches)))


def evaluate_classes(engine: Any, batches: Iterable[Any], num_classes: int) -> dict[str, float]:
    """Return loss, accuracy and macro F1 of a classifier, the same on all ranks.

    Args:
        engine: Of `wavemare.initialize`.
        batches: This rank's micro-batches, equally many on every rank.
        num_classes: Number of labels.
    """
    import torch
    from torch import distributed

    from wavemare.data.classification import scores

    confusion = torch.zeros(num_classes, num_classes, dtype=torch.long, device=engine.device)
    losses = []
    for batch in batches:  # one at a time: the logits returned are the last micro-batch's only
        loss, logits = engine.eval_batch(iter([batch]), return_logits=True, num_micro_batches=1)
        losses.append(float(loss))
        if logits is not None:  # in a pipeline the last stage has them
            labels = batch["labels"].to(logits.device)
            cells = labels * num_classes + logits.argmax(-1)
            confusion += torch.bincount(cells, minlength=num_classes**2).view_as(confusion)
    distributed.all_reduce(confusion)
    return {"eval_loss": sum(losses) / len(losses), **scores(confusion)}


def read_best(setup: Setup) -> dict[str, Any]:
    """Return ``eval_loss`` and ``step`` of the best evaluation so far; all ranks call this.

    It is empty before the first evaluation, in a run that does not resume, and if the model that
    was exported then is gone.
    """
    file = setup.folder / BEST
    there = setup.resume and file.is_file() and setup.model_folder.is_dir()
    known = json.loads(file.read_text()) if there else {}
    return dict(gather(known)[0])  # hosts may have a folder each


def keep_best(setup: Setup, step: int, eval_loss: float) -> dict[str, Any]:
    """Note that the best evaluation so far is this one, and return what `read_best` will."""
    best = {"eval_loss": eval_loss, "step": step}
    if setup.rank == 0:
        atomic_write_text(setup.folder / BEST, json.dumps(best))
    return best


def count_samples(engine: Any, loader: DataLoader[Any], samples: IndexedDataset) -> dict[str, int]:
    """Return as results how many samples all ranks' loaders hold, and of how many they are."""
    own: Any = loader.dataset
    used = len(own) * int(engine.data_world_size)
    return {"eval samples": used, "held-out samples": len(samples)}
