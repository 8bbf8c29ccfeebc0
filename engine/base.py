# SPDX-License-Identifier: Apache-2.0
"""What all our engines add to DeepSpeed's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from deepspeed import comm as dist
from deepspeed.runtime.engine import ROUTE_TRAIN
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler

from wavemare.engine.balance import Balance, attach_balance
from wavemare.engine.checkpoint.checkpointing import CheckpointMixin
from wavemare.engine.config.resolve import WavemareConfig
from wavemare.engine.context import Feature
from wavemare.engine.health.numbers import NumericsGuard, attach_guard, skipping
from wavemare.engine.health.watchdog import Watchdog
from wavemare.engine.local_steps import LocalSteps
from wavemare.engine.observe.progress import PROGRESS
from wavemare.engine.optim.optimizers import (
    check_matrix_optimizer,
    describe_partitions,
    is_added,
    refresh_by_stage,
)
from wavemare.engine.pipe.micro_batch import naming_ids
from wavemare.engine.seams import discard_open_step, forget_grid, hold_grid
from wavemare.engine.sparse.attach import attach_sparse_gradients
from wavemare.engine.sparse.gradients import SparseGradients
from wavemare.errors import ConfigError


class EngineMixin(CheckpointMixin):
    """Adds features to DeepSpeed's steps, and checkpoints that are complete or absent.

    Args:
        args: DeepSpeed's.
        settings: The section ``wavemare``; all defaults if omitted.
        kwargs: DeepSpeed's.

    Attributes:
        settings: The section ``wavemare``.
        features: What the engine calls at fixed points of a step, in this order.
        guard: One of the features; None if it is off.
        sparse: One of the features; None if it is off.
        layout: The layout of the model, with ``digest`` and ``to_json()``; None if the
            configuration alone determines it.
        watchdog: The process's, if the configuration asks for one; None after `destroy`.
    """

    settings = WavemareConfig()
    features: tuple[Feature, ...] = ()
    guard: NumericsGuard | None = None
    sparse: SparseGradients | None = None
    layout: Any = None
    watchdog: Watchdog | None = None

    def __init__(self, *args: Any, settings: WavemareConfig | None = None, **kwargs: Any) -> None:
        # Set first: DeepSpeed's constructor makes the loader.
        self.settings = settings = settings or self.settings
        hold_grid(kwargs.get("mpu"), self)
        super().__init__(*args, **kwargs)
        hold_grid(self.mpu, self)  # DeepSpeed's own tensor parallelism makes one
        describe_partitions(self)
        if settings.pipeline.is_asynchronous:
            refresh_by_stage(getattr(self, "basic_optimizer", None), self.stage_id, self.num_stages)
        balance = attach_balance(self, settings.balance)
        self.guard = attach_guard(self, settings.guard)
        # The last two open links: an engine that is refused must not.
        timeout_s = settings.watchdog.collective_timeout_s
        if settings.sparse_collective.mode != "off" and self.basic_optimizer is not None:
            self.sparse = attach_sparse_gradients(self, settings.sparse_collective, timeout_s)
        replicas = None
        if self._replicas is not None and self.basic_optimizer is not None:
            replicas = LocalSteps(self, settings.local_steps, timeout_s)
        self.features = tuple(filter(None, (balance, self.guard, self.sparse, replicas)))

    def before_backward(self, loss: Tensor) -> Tensor:
        """Return a micro-batch's loss for its backward pass, as the features change it."""
        for feature in self.features:
            loss = feature.before_backward(loss)
        return loss

    def _take_model_step(self, *args: Any, **kwargs: Any) -> None:
        """Step as DeepSpeed's method of that name, unless a feature objects."""
        if self._writing is not None and self._writing.has_failed:
            self.finish_saving()
        try:
            steps = all([feature.before_step() for feature in self.features])
            with nullcontext() if steps else skipping(self):
                super()._take_model_step(*args, **kwargs)
            for feature in self.features:
                feature.after_step()
        except RuntimeError:
            # Another rank that is lost may have left for the save that failed here as well.
            if self._writing is not None and self._writing.fails_within(2.0):
                self.finish_saving()
            raise

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        if callable(client_optimizer) and not isinstance(client_optimizer, Optimizer):
            client_optimizer = client_optimizer(model_parameters)
        check_matrix_optimizer(self, client_optimizer)
        super()._configure_optimizer(client_optimizer, model_parameters)

    def zero_allow_untested_optimizer(self) -> bool:
        """Whether ZeRO takes an optimizer that DeepSpeed does not list; ours are tested with it."""
        return bool(super().zero_allow_untested_optimizer() or is_added(self.basic_optimizer))

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """Tell the watchdog that a step is trained inside."""
        PROGRESS.begin_step(self.global_steps + 1)
        with PROGRESS.doing("train_batch"), naming_ids(self.module):
            yield

    def buffered_allreduce_fallback(self, grads: Any = None, *args: Any, **kwargs: Any) -> None:
        """Reduce gradients as DeepSpeed's method of that name, or by the sparse collective."""
        if self.sparse is not None and grads is None:
            self.sparse.reduce()
        else:
            super().buffered_allreduce_fallback(grads, *args, **kwargs)

    def allreduce_and_copy(
        self, small_bucket: Any, dp_group: Any, dp_world_size: float | None = None
    ) -> None:
        """Reduce gradients as DeepSpeed's method of that name, unless that would change no bit."""
        # DeepSpeed also flattens, reduces and copies back the gradients of a rank without others.
        if (
            dist.get_world_size(dp_group) > 1
            or dp_world_size not in (None, 1)
            or self.gradient_predivide_factor() != 1.0
            or small_bucket[0].dtype != self.communication_data_type
        ):
            super().allreduce_and_copy(small_bucket, dp_group, dp_world_size)

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = ROUTE_TRAIN,
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """Return a loader as DeepSpeed's method of that name, of this rank's share of samples.

        Raises:
            ConfigError: A sampler is given where ``wavemare.balance.shares`` draws the samples.
        """
        shares = self.settings.balance
        if route == ROUTE_TRAIN and shares.shares is not None:
            if not isinstance(data_sampler, DistributedSampler | None):
                raise ConfigError(
                    "data_sampler",
                    type(data_sampler).__name__,
                    "wavemare.balance.shares draws the samples of each rank",
                    "Leave the argument out",
                )
            balance = Balance(shares, self)
            # A pipeline brings a sampler of its own, which does not shuffle.
            data_sampler = balance.sampler(dataset, shuffle=data_sampler is None)
            batch_size = balance.micro_batch
        if self.num_replicas > 1 and data_sampler is None:
            # DeepSpeed's mpu knows one replica, and would give all of them the same samples.
            data_sampler = DistributedSampler(
                dataset, self.data_world_size, self.data_rank, shuffle=route == ROUTE_TRAIN
            )
        pin_memory &= self.device.type != "cpu"  # torch would warn on each rank
        return super().deepspeed_io(
            dataset, batch_size, route, pin_memory, data_sampler, collate_fn, num_local_io_workers
        )

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the size of micro-batches as DeepSpeed's method of that name."""
        if self.settings.balance.shares is not None:
            raise ConfigError(
                "train_micro_batch_size_per_gpu",
                micro_batch_size,
                "wavemare.balance.shares divides it",
                "Start again with other shares",
            )
        super().set_train_micro_batch_size(micro_batch_size)

    def drain(self) -> None:
        """Bring all weights to one version: empty a pipeline that never does so by itself."""

    def synchronize(self) -> None:
        """Bring the weights of all ranks to the same bits; all ranks must call it.

        Replicas with local steps have their mean then. Without them it is `drain`.
        """
        self.drain()
        for feature in self.features:
            feature.synchronize()

    def destroy(self) -> None:
        """Give back what the engine holds; all ranks should call it.

        Raises:
            CheckpointError: What was written in the background could not be completed.
        """
        watchdog, self.watchdog = self.watchdog, None  # DeepSpeed's destructor comes here again
        with ExitStack() as stack:  # each, though one before it fails; the last comes first
            stack.callback(super().destroy)
            stack.callback(forget_grid, getattr(self, "mpu", None), self)
            if watchdog is not None:
                stack.callback(watchdog.release)
            for feature in self.features:
                stack.callback(feature.close)
            stack.callback(self.release_writers)
            stack.callback(self.finish_saving)  # while it is watched

    def extra_state(self) -> dict[str, Any]:
        """Return what this rank's next step needs beside weights, optimizer and random state."""
        return {f.key: state for f in self.features if (state := f.extra_state())}

    def reset_state(self) -> None:
        """Discard what belongs to the weights before a load, such as unused gradients.

        So training can continue from a checkpoint after an error, too.
        """
        for feature in self.features:
            feature.reset()
        discard_open_step(self)

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Load a state of `extra_state`; empty if the checkpoint has none."""
        for feature in self.features:
            feature.load_extra_state(state.get(feature.key))

    @property
    def _replicas(self) -> Any:
        """The ranks at this one's place in all replicas with local steps; None without."""
        return getattr(self.mpu, "replicas", None)

    @property
    def num_replicas(self) -> int:
        """How many replicas step alone; 1 without local steps."""
        return 1 if self._replicas is None else int(self._replicas.size)

    @property
    def replica(self) -> int:
        """The number of this process's replica."""
        return 0 if self._replicas is None else int(self._replicas.rank)

    @property
    def data_rank(self) -> int:
        """This process's place among those that train the same model on other data."""
        own = int(dist.get_rank(group=self.data_parallel_group))
        return self.replica * int(self.dp_world_size) + own

    @property
    def data_world_size(self) -> int:
        """How many processes train the same model on other data."""
        # Ranks may share sequences.
        return self.num_replicas * int(self.dp_world_size or self.seq_dp_world_size)

    def train_batch_size(self) -> int:
        """Samples of an optimizer step of all replicas."""
        return self.num_replicas * int(super().train_batch_size())

    @property
    def step_lead(self) -> int:
        """How many optimizer steps more than rank 0 another rank may have done."""
        local = self.settings.local_steps
        if self.num_replicas == 1:
            return 0
        return local.every // local.fragments + local.overlap - 1  # then it waits for a message

    def step_metrics(self) -> dict[str, float]:
        """Return what the features have measured of the last step on this rank, by name."""
        return {k: v for feature in self.features for k, v in feature.metrics().items()}
