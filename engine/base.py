# SPDX-License-Identifier: Apache-2.0
"""What all our engines add to DeepSpeed's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import Any

from deepspeed import comm as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.engine import ROUTE_TRAIN
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler

from wavemare.engine.balance import Balance, attach_balance
from wavemare.engine.broadcast import broadcast_weights
from wavemare.engine.checkpoint.checkpointing import CheckpointMixin
from wavemare.engine.config.resolve import SECTION, WavemareConfig
from wavemare.engine.feature import Feature
from wavemare.engine.health.numbers import NumericsGuard, attach_guard, skipping
from wavemare.engine.health.watchdog import Watchdog
from wavemare.engine.local_steps.elastic import ElasticSteps
from wavemare.engine.local_steps.steps import LocalSteps
from wavemare.engine.observe.choices import tell_warning
from wavemare.engine.observe.progress import PROGRESS
from wavemare.engine.observe.restarts import reached, tell_first_step
from wavemare.engine.optim.groups import AllGroups, dropped_groups, keep_group, sum_all_norms
from wavemare.engine.optim.loaded import LoadedWeights
from wavemare.engine.optim.norm import GradientNorm
from wavemare.engine.optim.optimizers import (
    check_matrix_optimizer,
    describe_partitions,
    is_added,
    refresh_by_stage,
)
from wavemare.engine.optim.parts import check_parts
from wavemare.engine.optim.policy import Written
from wavemare.engine.optim.trained import TrainedWeights
from wavemare.engine.parts import PassedOver
from wavemare.engine.pipe.micro_batch import naming_ids
from wavemare.engine.ranks import Ranks
from wavemare.engine.same_batches import SameBatches, attach_same_batches
from wavemare.engine.seams import discard_open_step, end_workers, forget_grid, hold_grid, replaced
from wavemare.engine.sparse.attach import attach_sparse_gradients
from wavemare.engine.sparse.gradients import SparseGradients
from wavemare.errors import CommError, ConfigError


class EngineMixin(CheckpointMixin):
    """Adds features to DeepSpeed's steps, and checkpoints that are complete or absent.

    Args:
        args: DeepSpeed's.
        settings: The section ``wavemare``; all defaults if omitted.
        kwargs: DeepSpeed's.

    Attributes:
        settings: The section ``wavemare``.
        features: What the engine calls at fixed points of a step, in this order.
        norm: Measures the gradients of each step.
        norms_by_layer: Whether the norm has the same bits wherever a pipeline's layers are; set
            before the constructor runs.
        guard: The guard against non-finite numbers, also among the features; None if it is off.
        sparse: The sparse collective, also among the features; None if it is off.
        same_batches: Compares batches among the ranks of a model, also among the features; None if
            each rank holds a model alone.
        layout: The layout of the model, with ``digest`` and ``to_json()``; None if the
            configuration alone determines it.
        watchdog: The process's, if the configuration asks for one; None after `destroy`.
        passed_over: What stages do not call of the caller's model; None without.
    """

    settings = WavemareConfig()
    features: tuple[Feature, ...] = ()
    norm: GradientNorm
    norms_by_layer = False
    guard: NumericsGuard | None = None
    sparse: SparseGradients | None = None
    same_batches: SameBatches | None = None
    layout: Any = None
    watchdog: Watchdog | None = None
    passed_over: PassedOver | None = None
    has_begun = False
    """Whether the present step has done more than to read its data."""
    _dropped: Sequence[dict[str, Any] | None] = ()
    """Parameter groups of a stage that DeepSpeed has dropped, as `AllGroups` takes them."""
    _own_batches: Iterator[Any] | None = None
    """The iterator over ``training_data`` that the engine has made for itself."""
    broken = ""
    """Which step failed midway, so that the engine refuses the next one; empty if none did."""
    _trained: TrainedWeights | None = None

    def __init__(self, *args: Any, settings: WavemareConfig | None = None, **kwargs: Any) -> None:
        reached("engine")
        # Set first: DeepSpeed's constructor makes the loader.
        self.settings = settings = settings or self.settings
        hold_grid(kwargs.get("mpu"), self)
        super().__init__(*args, **kwargs)
        hold_grid(self.mpu, self)  # DeepSpeed's own tensor parallelism makes one
        self.describe_optimizer()
        parts = self.zero_optimization_partition_weights() or self._replicas is not None
        self.loaded_weights = LoadedWeights(None if parts else self)
        if self.optimizer is not None:
            self._trained = TrainedWeights(self)
        balance = attach_balance(self, settings.balance)
        self.norm = GradientNorm(self)
        self.guard = attach_guard(self, settings.guard)
        # The last two open links: an engine that is refused must not.
        timeout_s = settings.watchdog.collective_timeout_s
        if settings.sparse_collective.mode != "off" and self.basic_optimizer is not None:
            self.sparse = attach_sparse_gradients(self, settings.sparse_collective, timeout_s)
        replicas = None
        if self._replicas is not None and self.basic_optimizer is not None:
            limit_s = settings.watchdog.timeout_s if self.is_elastic else timeout_s
            kind = ElasticSteps if self.is_elastic else LocalSteps
            replicas = kind(self, settings.local_steps, limit_s)
        self.same_batches = attach_same_batches(self)
        # The guard is the last: it looks at the gradients that the step takes.
        features = (self.same_batches, balance, self.sparse, replicas, self.guard)
        self.features = tuple(filter(None, features))

    def _broadcast_model(self) -> None:
        """Give all ranks the weights of the first, where they differ."""
        broadcast_weights(self, super()._broadcast_model)

    def leave_out(self, data_iter: Any, samples: int) -> None:
        """Go on in the data after what other replicas have read meanwhile; None is no data."""
        if samples and hasattr(data_iter, "consumed_samples"):
            data_iter.consumed_samples += samples
        elif samples and data_iter is not None:
            steps = samples // self.train_batch_size()
            for _ in range(steps * self.gradient_accumulation_steps()):
                next(data_iter)

    def over_replicas(self, mean: Tensor) -> Tensor:
        """Return the mean over the replicas of an evaluation, for which a rank may wait."""
        if self.num_replicas == 1 or self.is_elastic:
            return mean
        dist.all_reduce(mean, group=self._replicas.group)
        return mean / self.num_replicas

    def join_replicas(self) -> int:
        """Meet the replicas of other jobs (``wavemare.local_steps.elastic``), and catch up.

        ``train_batch`` does so by itself. A loop of its own calls it before it reads the data of a
        step; all ranks must call it.

        Returns:
            How many samples of all replicas the data are to leave out, because the others have
            read on meanwhile. 0 without such replicas.
        """
        return sum(feature.join() for feature in self.features)

    def describe_optimizer(self) -> None:
        """Tell an optimizer of matrices what it steps, and on which stage."""
        describe_partitions(self)
        if self.settings.pipeline.is_asynchronous:
            refresh_by_stage(getattr(self, "basic_optimizer", None), self.stage_id, self.num_stages)

    @property
    def can_replace_optimizer(self) -> bool:
        """Whether a load may go on with another optimizer than this one, the checkpoint's."""
        return False

    def goes_on_as(self, written: Written) -> bool:
        """Whether the engine already does what `replace_optimizer` would have it do."""
        return True

    def replace_optimizer(self, written: Written) -> None:
        """Go on as a checkpoint was written; all ranks call it.

        Raises:
            NotImplementedError: The engine cannot.
        """
        raise NotImplementedError

    def before_backward(self, loss: Tensor) -> Tensor:
        """Return a micro-batch's loss for its backward pass, as the features change it."""
        for feature in self.features:
            loss = feature.before_backward(loss)
        return loss

    def _take_model_step(self, *args: Any, **kwargs: Any) -> None:
        """Step as DeepSpeed's method of that name, unless a feature objects."""
        if self._writing is not None and self._writing.has_failed:
            self.finish_saving()
        self.norm.begin_step()
        self.check_trained()
        try:
            steps = all([feature.before_step() for feature in self.features])
            with self.norm.handed(), nullcontext() if steps else skipping(self):
                self.loaded_weights.take_changes()
                super()._take_model_step(*args, **kwargs)
            self.norm.end_step(made=steps)
            for feature in self.features:
                feature.after_step()
            self.loaded_weights.note()
            tell_first_step(self.global_steps)
        except RuntimeError:
            # Another rank that is lost may have left for the save that failed here as well.
            if self._writing is not None and self._writing.fails_within(2.0):
                self.finish_saving()
            raise

    def clip_fp32_gradients(self) -> None:
        """Clip as DeepSpeed's method of that name, by the norm that is measured once."""
        self.norm.clip(self.gradient_clipping())

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's gradients before clipping, over all stages.

        With local steps it is that of this replica. In a pipeline that does not add it up before
        the step, it waits until all stages have made the step. None before the first step.
        """
        return self.norm.value

    @property
    def norm_grid(self) -> Any:
        """The ranks over which squares of gradients are added up, as an ``mpu``; may be None."""
        return self.mpu

    def settle(self) -> None:
        """Wait until it is known that each stage has made all steps so far; all ranks must call it.

        Raises:
            NumericsError: A stage has left a step out, as numbers were not finite.
        """
        if self.guard is not None:
            self.guard.settle()
        if self.same_batches is not None:
            self.same_batches.compare_soon()

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        if callable(client_optimizer) and not isinstance(client_optimizer, Optimizer):
            client_optimizer = client_optimizer(model_parameters)
        check_matrix_optimizer(self, client_optimizer)
        groups = getattr(client_optimizer, "param_groups", model_parameters)
        groups = list(groups) if isinstance(groups, list) else None  # DeepSpeed changes the list
        if not self.pipeline_parallelism:
            self._check_groups(groups)
        super()._configure_optimizer(client_optimizer, model_parameters)
        if SECTION in self.config:
            check_parts(self)
            keep_group(self.optimizer, self.basic_optimizer)
        if not self.pipeline_parallelism:
            return
        self._dropped = dropped_groups(groups, self.basic_optimizer)
        if self._dropped and self.optimizer is self.basic_optimizer:
            groups = AllGroups(self.basic_optimizer, self._dropped).param_groups
            self.basic_optimizer.param_groups[:], self._dropped = groups, ()
        elif self._dropped:
            self._check_groups(groups)
            sum_all_norms(self.optimizer, self._dropped)

    def _configure_lr_scheduler(self) -> None:
        if not self._dropped:
            super()._configure_lr_scheduler()
            return
        basic, optimizer = (
            AllGroups(own, self._dropped) for own in (self.basic_optimizer, self.optimizer)
        )
        with replaced(self, {"basic_optimizer": basic, "optimizer": optimizer}):
            super()._configure_lr_scheduler()

    def _check_groups(self, groups: Any) -> None:
        """Refuse empty parameter groups that a scheduler counts: DeepSpeed drops them."""
        empty = sum(isinstance(one, dict) and not one["params"] for one in groups or ())
        if empty and hasattr(self.client_lr_scheduler, "get_last_lr"):
            raise ConfigError(
                "optimizer",
                f"{len(groups)} parameter groups",
                f"{empty} of them hold no weights, and rates of the scheduler belong to them",
                "Leave these groups out, or give a function from an optimizer to a scheduler",
            )

    def zero_allow_untested_optimizer(self) -> bool:
        """Whether ZeRO takes an optimizer that DeepSpeed does not list; ours are tested with it."""
        return bool(super().zero_allow_untested_optimizer() or is_added(self.basic_optimizer))

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """Train a step inside, which the watchdog hears of.

        Raises:
            CommError: A step before it began and did not end.
            ModelError: The caller's model was changed in a way that does nothing.
        """
        self.check_whole()
        self.check_passed_over()
        self.check_trained()
        step, self.has_begun = self.global_steps + 1, False
        PROGRESS.begin_step(step)
        try:
            with PROGRESS.doing("train_batch"), naming_ids(self.module):
                yield
            tell_first_step(step)
        except StopIteration:  # the data had ended before it
            raise
        except BaseException as error:
            if self.has_begun:
                told = f"optimizer step {step} began on this rank and did not end"
                self.broken = self.broken or f"{told} ({type(error).__name__})"
            raise

    def check_whole(self) -> None:
        """Refuse to go on after a step that began and did not end: ranks may be at unlike steps.

        Raises:
            CommError: There was one, and no checkpoint has been loaded since.
        """
        if self.broken:
            remedy = "Load a checkpoint on all ranks, or start all processes again"
            raise CommError("optimizer step", self.global_steps + 1, self.broken, remedy)

    def check_trained(self) -> None:
        """Refuse adapters that no optimizer has; see `TrainedWeights`."""
        if self._trained is not None:
            self._trained.check()

    def check_passed_over(self) -> None:
        """Refuse changes of the caller's model that stages would not see; see `PassedOver`."""
        if self.passed_over is not None:
            self.passed_over.check()

    # --- passes, as DeepSpeed's accumulation of gradients sees them -------------------------------

    def call_module(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, without DeepSpeed's hooks of outputs: backward passes do their work."""
        with autocast_if_enabled(self):
            return self.module(*args, **kwargs)

    def backward_from(self, loss: Tensor) -> None:
        """Run the backward pass of a micro-batch's loss."""
        loss = self.before_backward(loss) / self.gradient_accumulation_steps()
        if isinstance(self.optimizer, ZeROOptimizer):
            loss = self.optimizer.scale_if_loss(loss)
        elif self.torch_autocast_z0_gradscaler:
            loss = self.torch_autocast_z0_gradscaler.scale(loss)
        else:
            loss = self.with_fp16_scale(loss)
        self.accumulate(loss.backward)

    @property
    def fp16_scale(self) -> float:
        """The loss scale of fp16 without ZeRO, 1 for all others.

        DeepSpeed 0.19.8 divides the gradients by it, and multiplies no loss.
        """
        is_fp16 = isinstance(self.optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer))
        # DeepSpeed steps bf16 by these optimizers, too, and then without a scale.
        return float(self.optimizer.loss_scale or 1.0) if is_fp16 else 1.0

    def with_fp16_scale(self, loss: Tensor) -> Tensor:
        """Return the loss, () of any type, times `fp16_scale`: (), fp32 if that is not 1."""
        scale = self.fp16_scale
        return loss if scale == 1.0 else loss.float() * scale

    def accumulate(self, backward: Callable[[], None]) -> None:
        """Run a backward pass, which adds to the gradients of the step."""
        if isinstance(self.optimizer, ZeROOptimizer):
            self.optimizer.clear_backward_seen_flag()
        own = self.__dict__  # a module's attributes are slow to set
        own["_unmanaged_backward_count"] += 1  # read if the configuration says so
        own["_running_engine_backward"] = True  # DeepSpeed's hooks leave the end of the pass to us
        try:
            self._backward_prologue()
            backward()
            self._backward_epilogue()
        finally:
            own["_running_engine_backward"] = False

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
        # By name, as callers do: what wraps DeepSpeed's method looks for names.
        return super().deepspeed_io(
            dataset,
            batch_size=batch_size,
            route=route,
            pin_memory=pin_memory,
            data_sampler=data_sampler,
            collate_fn=collate_fn,
            num_local_io_workers=num_local_io_workers,
        )

    def warn_of_own_data(self) -> None:
        """Say once after a load that ``training_data`` do not go on where the run was saved."""
        samples, self.loaded_samples = self.loaded_samples, 0
        if samples:
            tell_warning(
                f"training_data do not go on at the checkpoint's sample {samples}: a load leaves "
                "the engine's own loader where it is, in a new process at the start. For an exact "
                "resume give train_batch() a wavemare.data.loader.ResumableLoader"
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

        Raises:
            NumericsError: See `settle`.
        """
        self.drain()
        self.settle()
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
            stack.callback(self.loaded_weights.close)
            if self._trained is not None:
                stack.callback(self._trained.close)
            stack.callback(end_workers, self._own_batches)
            if hasattr(self, "norm"):
                stack.callback(self.norm.close)
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
        self.norm.reset()
        for feature in self.features:
            feature.reset()
        self.broken = ""
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
    def is_elastic(self) -> bool:
        """Whether each replica is a job of its own."""
        return self.num_replicas > 1 and self._replicas.group is None

    @property
    def are_replicas_equal(self) -> bool:
        """Whether all replicas have the same weights."""
        return all(feature.is_common for feature in self.features)

    @property
    def replica(self) -> int:
        """The number of this process's replica."""
        return 0 if self._replicas is None else int(self._replicas.rank)

    @cached_property
    def ranks(self) -> Ranks:
        """Which processes hold one model with this one, and which read other data."""
        return Ranks.of(self)

    @property
    def data_rank(self) -> int:
        """This process's place among those that train the same model on other data."""
        return self.ranks.data_rank

    @property
    def data_world_size(self) -> int:
        """How many processes train the same model on other data."""
        return self.ranks.data_world_size

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples of an optimizer step of all replicas; all ranks must call it.

        Raises:
            ConfigError: It is no multiple of the replicas.
        """
        own, rest = divmod(train_batch_size, self.num_replicas)
        if rest:
            reason = f"it is not a multiple of the {self.num_replicas} replicas"
            raise ConfigError("train_batch_size", train_batch_size, reason, "Give a multiple")
        super().set_train_batch_size(own)

    def train_batch_size(self) -> int:
        """Samples of an optimizer step of all replicas."""
        return self.num_replicas * int(super().train_batch_size())

    @property
    def stage_lead(self) -> int:
        """How many optimizer steps more than the first stage another one may have done."""
        return 0

    @property
    def step_lead(self) -> int:
        """How many optimizer steps more than rank 0 another rank may have done."""
        local, lead = self.settings.local_steps, self.stage_lead
        if self.num_replicas == 1 or self.is_elastic:  # whose ranks step together
            return lead
        return lead + local.every // local.fragments + local.overlap - 1  # then it waits

    def step_metrics(self) -> dict[str, float]:
        """Return what the features have measured of the last step on this rank, by name."""
        return {k: v for feature in self.features for k, v in feature.metrics().items()}
