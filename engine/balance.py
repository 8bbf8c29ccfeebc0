# SPDX-License-Identifier: Apache-2.0
"""Unequal work for devices of unequal speed: samples of each rank, and the weight of its loss.

Gradients are averaged over the data ranks with equal weight. So the mean loss of a rank with
``b_r`` of the ``B`` samples of all ``D`` ranks counts ``b_r D / B`` times (the Whale design's
"uneven sizes"): the average is then the gradient of the mean over all ``B`` samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm as dist
from torch import Tensor, nn
from torch.utils.data import Sampler

from wavemare.engine.config.sections import BalanceConfig
from wavemare.engine.feature import Feature
from wavemare.engine.labels import count_labels, shifts_labels
from wavemare.errors import DataError

if TYPE_CHECKING:
    from wavemare.engine.base import EngineMixin


class Balance(Feature):
    """The weight of this rank's loss.

    Args:
        config: The section; has passed `check_shares`.
        engine: Of DeepSpeed's, built.

    Attributes:
        micro_batch: Samples of a micro-batch of this rank.
        counts_tokens: Whether all labels weigh the same, not all samples.
    """

    def __init__(self, config: BalanceConfig, engine: EngineMixin) -> None:
        self._group = engine.data_parallel_group
        self._ranks = ranks = engine.dp_world_size
        self._rank = dist.get_rank(group=self._group)
        average = engine.train_micro_batch_size_per_gpu()
        self.shares = list(config.shares or [average] * ranks)
        self.micro_batch = self.shares[self._rank]
        self._share = self.micro_batch / average
        self.counts_tokens = config.mean == "tokens"
        self._labels: Tensor | None = None
        self._shifts = False

    def watch(self, module: nn.Module) -> None:
        """Remember the labels that a model is called with, for means over tokens."""
        if not self.counts_tokens:
            return

        def note(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._labels = named.get("labels")

        self._shifts = shifts_labels(module)
        module.register_forward_pre_hook(note, with_kwargs=True)

    def before_backward(self, loss: Tensor) -> Tensor:
        """Return this rank's loss of the last forward pass as the average over ranks needs it.

        Args:
            loss: Mean over this rank's micro-batch; scalar.

        Raises:
            DataError: A mean over tokens is wanted of a batch without ``labels=``.
        """
        if self._labels is None and self.counts_tokens:
            reason = "the model was called without labels=, whose tokens are counted"
            remedy = 'Pass labels by name, or set wavemare.balance.mean to "samples"'
            raise DataError("labels", None, reason, remedy)
        return self.of_labels(loss, self._labels, self._shifts)

    def of_labels(self, loss: Tensor, labels: Any, shifts: bool) -> Tensor:
        """Return a micro-batch's loss as the average over ranks needs it."""
        if not self.counts_tokens:
            return loss * self._share
        own = count_labels(labels, shifts)
        total = own.clone()
        dist.all_reduce(total, group=self._group)
        return _zero_without_tokens(loss, own) * (own * self._ranks / total.clamp(min=1))

    def sampler(self, dataset: Sized, *, shuffle: bool) -> ShareSampler:
        """Return the sampler of this rank's part of a dataset."""
        return ShareSampler(
            dataset,
            first=sum(self.shares[: self._rank]),
            count=self.shares[self._rank],
            stride=sum(self.shares),
            shuffle=shuffle,
        )


def _zero_without_tokens(loss: Tensor, count: Tensor) -> Tensor:
    """Return a mean over tokens; over none it is not a number, and counts nothing."""
    return torch.where(count > 0, loss, torch.zeros_like(loss))


class WeightedLoss:
    """A pipeline's loss function, with weights while the pipeline trains.

    Args:
        balance: The weights of this rank.
        loss_fn: The pipeline's own.
        module: The pipeline, whose mode counts.

    Attributes:
        main: The pipeline's own.
    """

    def __init__(self, balance: Balance, loss_fn: Callable[..., Tensor], module: nn.Module) -> None:
        self._balance, self.main, self._module = balance, loss_fn, module
        self._shifts = bool(getattr(loss_fn, "shifts_labels", False))

    def __call__(self, outputs: Any, labels: Any) -> Tensor:
        """Return the loss; in training weighted, by a collective if tokens count."""
        loss = self.main(outputs, labels)
        trains = self._module.training
        return self._balance.of_labels(loss, labels, self._shifts) if trains else loss

    def alone(self, outputs: Any, labels: Any) -> Tensor:
        """Return the loss without its weight, for a pass that the other ranks do not make."""
        loss: Tensor = getattr(self.main, "alone", self.main)(outputs, labels)
        if self._balance.counts_tokens:
            return _zero_without_tokens(loss, count_labels(labels, self._shifts))
        return loss


class ShareSampler(Sampler[int]):
    """A rank's indices: its contiguous part of each micro-batch of all ranks.

    All ranks together read the order that torch's ``DistributedSampler`` gives equal shares; the
    samples at the end that do not fill a micro-batch of all ranks are left out.

    Args:
        dataset: Whose length counts.
        first: Samples of a micro-batch that earlier ranks take.
        count: Those that this rank takes.
        stride: Those of all ranks.
        shuffle: Whether indices are permuted, alike on all ranks and in all epochs.
    """

    def __init__(
        self, dataset: Sized, *, first: int, count: int, stride: int, shuffle: bool
    ) -> None:
        self._size = len(dataset)
        if self._size < stride:
            reason = f"it does not fill one micro-batch of all ranks, of {stride} samples"
            raise DataError("training_data", self._size, reason, "Give more data, or smaller sizes")
        self._first, self._count, self._stride = first, count, stride
        self._shuffle = shuffle

    def __len__(self) -> int:
        return self._size // self._stride * self._count

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(0)
        order = (
            torch.randperm(self._size, generator=generator).tolist()
            if self._shuffle
            else range(self._size)
        )
        for start in range(0, self._size // self._stride * self._stride, self._stride):
            begin = start + self._first
            yield from order[begin : begin + self._count]


def attach_balance(engine: EngineMixin, config: BalanceConfig) -> Balance | None:
    """Weigh an engine's losses, if its ranks have unequal work or tokens are counted.

    Returns:
        The feature that weighs losses; None if there is nothing to weigh, or the pipeline's loss
        function does it.
    """
    if not config.is_active:
        return None
    balance = Balance(config, engine)
    module = engine.module
    if not engine.pipeline_parallelism:
        balance.watch(module)
        return balance
    if module.loss_fn is not None:
        weighted = WeightedLoss(balance, module.loss_fn, module)
        module._modules.pop("loss_fn", None)  # a loss that is a module would refuse a function
        module.loss_fn = weighted
    return None
