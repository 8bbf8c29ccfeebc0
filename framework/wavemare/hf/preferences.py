# SPDX-License-Identifier: Apache-2.0
"""A loss of pairs of answers, such as DPO's, with any engine; and what a reference says of them.

Rafailov et al., "Direct Preference Optimization", 2023: the reward of an answer is beta times the
log of the ratio of its probabilities under the model and under the reference, and the loss is the
negative log of the sigmoid of the margin between the rewards. The recipe ``llama/dpo`` has both:
the log-probabilities, and the loss of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from wavemare.data.preferences import PairSamples
from wavemare.engine.launch.group import gather
from wavemare.models import TransformerPipeline
from wavemare.models.families import whole_logits
from wavemare.models.layers import AuxiliaryLoss

FIGURES = tuple(f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies"))
"""What is measured with the loss, by TRL's names."""
_AT_ONCE = 256
"""Micro-batches of one evaluation at most: the reference reads all data."""


LogProbs = Callable[[Tensor, Tensor], Tensor]
"""From logits, (rows, sequence, vocabulary), and labels, (rows, sequence), that are -100 where no
token of the answer stands, to the log-probability of each row's answer, (rows,)."""
PairLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From the log-probabilities of both answers by the model and by the reference, each (pairs, 2), to
the mean loss, a scalar, and the rewards, (pairs, 2)."""


class PreferenceLoss:
    """A loss of pairs of an engine's micro-batches, in place of the loss of their labels.

    Args:
        engine: Of `wavemare.initialize`; its loss is replaced.
        log_probs: Of answers.
        loss: Of pairs, by these log-probabilities.
        inputs: What of a batch the model takes, by name.

    Attributes:
        engine: The same.
        main: The loss of labels that a pipeline had.
    """

    def __init__(
        self,
        engine: Any,
        log_probs: LogProbs,
        loss: PairLoss,
        inputs: Sequence[str] = ("input_ids",),
    ) -> None:
        self.engine, self.main = engine, None
        self._log_probs, self._loss, self._inputs = log_probs, loss, tuple(inputs)
        # FIGURES of each micro-batch, of training and of evaluation
        self._measured: dict[bool, list[Tensor]] = {True: [], False: []}
        self._found: list[Tensor] | None = None  # log-probabilities, in place of losses
        module = engine.module
        if not isinstance(module, TransformerPipeline):
            engine.loss_fn = self.of_model
        elif module.loss_fn is not None:
            head = self.main = module.loss_fn
            own = replace(head, main=self) if isinstance(head, AuxiliaryLoss) else self
            module.loss_fn = own

    def of_model(self, call: Any, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss of a whole model's micro-batch, with the routers' auxiliary loss.

        Args:
            call: Calls the model.
            batch: Of `batches`.
        """
        answers = batch.pop("labels"), batch.pop("reference")
        output = call(**batch, use_cache=False)
        loss = self(output.logits, answers)
        if getattr(output, "aux_loss", None) is None:
            return loss
        return loss + self.engine.module.router_aux_loss_coef * output.aux_loss

    def __call__(self, logits: Tensor, answers: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean loss of pairs, or zero while log-probabilities are looked for.

        Args:
            logits: (2 * pairs, sequence, vocabulary or this rank's part of it).
            answers: Labels (2 * pairs, sequence), and the reference's log-probabilities (pairs, 2).
        """
        labels, reference = answers
        found = self._log_probs(whole_logits(self.main, logits), labels).view(-1, 2)
        if self._found is not None:
            self._found.append(found)
            return found.new_zeros(())
        loss, rewards = self._loss(found, reference)
        with torch.no_grad():
            chosen, rejected = rewards.unbind(-1)
            margins = chosen - rejected
            figures = (chosen, rejected, margins, (margins > 0).float())
            measured = torch.stack([figure.mean() for figure in figures])
        self._measured[torch.is_grad_enabled()].append(measured)
        return loss

    def batches(self, batches: Iterable[dict[str, Tensor]]) -> Iterator[Any]:
        """Yield the engine's micro-batches of those that `PairSamples` were put together to."""
        module = self.engine.module
        is_pipeline = isinstance(module, TransformerPipeline)
        for batch in batches:
            rows = {name: batch[name].flatten(0, 1) for name in (*self._inputs, "labels")}
            if is_pipeline:
                inputs, labels = module.split_batch(rows)
                yield inputs, (labels, batch["reference"])
            else:
                yield {**rows, "reference": batch["reference"]}

    def take_rewards(self, *, training: bool = True) -> dict[str, float]:
        """Return the means of `FIGURES` since the last call, equal on all ranks, which all call.

        Args:
            training: Of training, or of evaluation, with ``eval_`` before their names.
        """
        measured = self._measured[training]
        own = torch.stack(measured).mean(0).tolist() if measured else None
        measured.clear()
        known = [figures for figures in gather(own) if figures is not None]
        names = FIGURES if training else [f"eval_{name}" for name in FIGURES]
        return dict(zip(names, np.mean(known, axis=0).tolist(), strict=True)) if known else {}

    def log_probs_of(self, samples: PairSamples) -> NDArray[np.float32]:
        """Return the log-probabilities of both answers by the model as it is; all ranks call this.

        Args:
            samples: The same on all ranks, which share the work.

        Returns:
            [pairs, 2], equal on all ranks.
        """
        engine, count = self.engine, len(samples)
        rank, ranks = engine.ranks.replicas.index(engine.ranks.rank), len(engine.ranks.replicas)
        micro = engine.train_micro_batch_size_per_gpu()
        rounds = -(-count // (ranks * micro))
        order = np.arange(rounds * ranks * micro).reshape(rounds, ranks, micro)
        own = Subset(samples, (order[:, rank].ravel() % count).tolist())  # some again, to fill up
        loader = DataLoader(own, batch_size=micro, generator=torch.Generator())
        batches, self._found = self.batches(loader), []
        try:
            for done in range(0, rounds, _AT_ONCE):
                engine.eval_batch(batches, num_micro_batches=min(_AT_ONCE, rounds - done))
            mine = torch.cat(self._found).cpu().numpy() if self._found else None
        finally:
            self._found = None
        result = np.empty((order.size, 2), np.float32)
        for place, found in gather((rank, mine)):
            if found is not None:  # of a last stage
                result[order[:, place].ravel()] = found
        return result[:count]
