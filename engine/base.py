# SPDX-License-Identifier: Apache-2.0
"""What all our engines add to DeepSpeed's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from deepspeed import comm as dist
from deepspeed.runtime.engine import ROUTE_TRAIN
from torch.optim import Optimizer

from wavemare.engine.balance import Balance, attach_balance
from wavemare.engine.checkpoint.checkpointing import CheckpointMixin
from wavemare.engine.config.resolve import WavemareConfig
from wavemare.engine.health.numbers import NumericsGuard, attach_guard, skipping
from wavemare.engine.health.watchdog.watcher import Watchdog
from wavemare.engine.observe.progress import PROGRESS
from wavemare.engine.optim.optimizers import (
    check_matrix_optimizer,
    describe_partitions,
    is_added,
    refresh_by_stage,
)
from wavemare.engine.pipe.micro_batch import naming_ids
from wavemare.engine.seams import discard_open_step, forget_grid
from wavemare.engine.sparse.attach import attach_sparse_gradients
from wavemare.engine.sparse.gradients import SparseGradients

__all__ = ["EngineMixin"]

logger = logging.getLogger("wavemare")


class EngineMixin(CheckpointMixin):
    """Checkpoints that are complete or absent, sparse collectives, shares of unlike devices.

    Args:
        args: DeepSpeed's.
        sections: The ``"wavemare"`` section; all defaults if omitted.
        kwargs: DeepSpeed's.

    Attributes:
        layout: The layout of the model, with ``digest`` and ``to_json()``; None if the
            configuration alone determines it.
        watchdog: The process's, if the configuration asks for one; None after `destroy`.
    """

    layout: Any = None
    watchdog: Watchdog | None = None
    _sparse: SparseGradients | None = None
    _balance: Balance | None = None
    _guard: NumericsGuard | None = None
    _sections = WavemareConfig()

    def __init__(self, *args: Any, sections: WavemareConfig | None = None, **kwargs: Any) -> None:
        # Set first: DeepSpeed's constructor makes the loader.
        self._sections = sections = sections or self._sections
        self.checkpoint_settings = sections.checkpoint
        super().__init__(*args, **kwargs)
        describe_partitions(self)
        if sections.pipeline.schedule == "pipemare":
            refresh_by_stage(self)
        self._balance = attach_balance(self, sections.balance)
        trains = getattr(self, "basic_optimizer", None) is not None
        if sections.sparse_collective.mode != "off" and trains:
            self._sparse = attach_sparse_gradients(
                self, sections.sparse_collective, sections.watchdog.collective_timeout_s
            )
        self._guard = attach_guard(self, sections.guard)

    def watched(self, loss: Any) -> Any:
        """Return a micro-batch's loss for its backward pass, watched if a guard is there."""
        return loss if self._guard is None else self._guard.watch(loss)

    def _take_model_step(self, *args: Any, **kwargs: Any) -> None:
        """Step as DeepSpeed's method of that name; a guard may find that the step must not be."""
        engine: Any = self
        try:
            sound = self._guard is None or self._guard.may_step()
            with nullcontext() if sound else skipping(engine):
                super()._take_model_step(*args, **kwargs)
        except RuntimeError:
            # Another rank that is lost may have left for the save that failed here as well.
            if self._writing is not None and self._writing.fails_within(2.0):
                self.finish_saving()
            raise

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        if callable(client_optimizer) and not isinstance(client_optimizer, Optimizer):
            client_optimizer = client_optimizer(model_parameters)
        check_matrix_optimizer(self, client_optimizer)
        super()._configure_optimizer(client_optimizer, model_parameters)  # type: ignore[misc]

    def zero_allow_untested_optimizer(self) -> bool:
        """Whether ZeRO takes an optimizer that DeepSpeed does not list; ours are tested with it."""
        engine: Any = self
        stock = bool(super().zero_allow_untested_optimizer())  # type: ignore[misc]
        return stock or is_added(getattr(engine, "basic_optimizer", None))

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """Tell the watchdog that a step is trained inside."""
        engine: Any = self
        PROGRESS.begin_step(engine.global_steps + 1)
        with PROGRESS.doing("train_batch"), naming_ids(engine.module):
            yield

    def buffered_allreduce_fallback(self, grads: Any = None, *args: Any, **kwargs: Any) -> None:
        """Reduce gradients as DeepSpeed's method of that name, or by the sparse collective."""
        if self._sparse is not None and grads is None:
            self._sparse.reduce()
        else:
            super().buffered_allreduce_fallback(grads, *args, **kwargs)  # type: ignore[misc]

    def deepspeed_io(
        self, dataset: Any, batch_size: int | None = None, route: str = ROUTE_TRAIN, **kwargs: Any
    ) -> Any:
        """Return a loader as DeepSpeed's method of that name, of this rank's share of samples."""
        shares = self._sections.balance
        if route == ROUTE_TRAIN and shares.shares is not None:
            balance = Balance(shares, self)
            # A pipeline brings a sampler of its own, which does not shuffle.
            shuffles = kwargs.get("data_sampler") is None
            kwargs["data_sampler"] = balance.sampler(dataset, shuffle=shuffles)
            batch_size = balance.micro_batch
        return super().deepspeed_io(dataset, batch_size, route, **kwargs)  # type: ignore[misc]

    def destroy(self) -> None:
        """Give back what the engine holds; all ranks should call it.

        Raises:
            CheckpointError: What was written in the background could not be completed.
        """
        watchdog, self.watchdog = self.watchdog, None  # DeepSpeed's destructor comes here again
        with ExitStack() as stack:  # each, though one before it fails; the last comes first
            stack.callback(super().destroy)  # type: ignore[misc]
            stack.callback(forget_grid, getattr(self, "mpu", None))
            if watchdog is not None:
                stack.callback(watchdog.release)
            if self._sparse is not None:
                stack.callback(self._sparse.close)
            stack.callback(self.finish_saving)  # while it is watched

    def extra_state(self) -> dict[str, Any]:
        """Return what this rank's next step needs beside weights, optimizer and random state."""
        state = self._sparse.extra_state() if self._sparse is not None else {}
        return {"sparse_collective": state} if state else {}

    def reset_state(self) -> None:
        """Forget what belonged to the weights that were, as `CheckpointMixin.reset_state`."""
        discard_open_step(self)
        if self._guard is not None:
            self._guard.reset()
        if self._sparse is not None:
            self._sparse.reset()

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Take over a state of `extra_state`."""
        saved = state.get("sparse_collective")
        if self._sparse is None:
            return
        if saved is not None:
            self._sparse.load_extra_state(saved)
        elif self._sparse.comm.compressor is not None and dist.get_rank() == 0:
            logger.warning(
                "sparse_collective: the checkpoint has nothing of what the compressor left out of "
                "gradients, for these ranks; it starts with nothing waiting"
            )

    @property
    def data_rank(self) -> int:
        """This process's place among those that train the same weights on other data."""
        engine: Any = self
        return int(dist.get_rank(group=engine.data_parallel_group))

    @property
    def data_world_size(self) -> int:
        """How many processes train the same weights on other data."""
        engine: Any = self
        return int(engine.dp_world_size)

    @property
    def step_lead(self) -> int:
        """How many optimizer steps more than rank 0 another rank may have done: here none."""
        return 0

    def step_metrics(self) -> dict[str, float]:
        """Return what the engine has measured of the last step, by name.

        That is this rank's share of the sparse collectives, if there are any.
        """
        return dict(self._sparse.figures) if self._sparse is not None else {}
