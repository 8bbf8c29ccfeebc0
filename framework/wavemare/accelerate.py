# SPDX-License-Identifier: Apache-2.0
"""Accelerate's ``Accelerator`` with our engines.

With ``from wavemare.accelerate import Accelerator``, ``prepare`` builds an engine by
`wavemare.initialize`, from a DeepSpeed file with a ``"wavemare"`` section. Loops of ``forward``,
``backward`` and ``step`` run data-parallel engines: ZeRO 0 to 3, the sparse collective, tensor
parallelism. Pipelines and waves train whole steps and are refused here: use `wavemare.hf.Trainer`
or ``engine.train_batch``.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager, nullcontext
from typing import Any

import accelerate
import deepspeed
import torch
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderShard,
    SkipBatchSampler,
    prepare_data_loader,
    skip_first_batches,
)
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import PartialState
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list, operations
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper
from accelerate.utils.environment import parse_flag_from_env
from accelerate.utils.operations import recursively_apply
from deepspeed.accelerator import get_accelerator
from torch import distributed as dist
from torch.utils.data import IterableDataset

from wavemare.accelerate_loop import SteppedOptimizer, Steps, note_reads, scheduler_of
from wavemare.api import initialize
from wavemare.engine.checkpoint.random_state import (
    LateLoader,
    SharedOrder,
    begin_late,
    drawn_alike,
    share_draws,
)
from wavemare.engine.config.resolve import SECTION, WavemareConfig
from wavemare.engine.launch.group import environment_world_size, gather
from wavemare.engine.parts import mark_of
from wavemare.engine.ranks import Ranks
from wavemare.errors import ConfigError
from wavemare.failure import watch_failures
from wavemare.lazy import Proxy
from wavemare.models import whole_state_dict
from wavemare.parallel.layout.grid import count_replicas

_EUCLIDEAN = 2
_PLUGINS = ("deepspeed_plugin", "deepspeed_plugins")
_USE_CPU, _USE_DEEPSPEED = "ACCELERATE_USE_CPU", "ACCELERATE_USE_DEEPSPEED"
_ACCELERATOR = "wavemare_accelerator"
"""Where accelerate's state, which all share and the Trainer pickles, holds the number of one."""
_SECTION_OF_PLUGIN = "wavemare_section"
"""Attribute of accelerate's plugin, which several accelerators may share."""
_accelerators: weakref.WeakValueDictionary[int, Accelerator] = weakref.WeakValueDictionary()
_swap_lock = threading.RLock()


class Accelerator(accelerate.Accelerator):
    """``accelerate.Accelerator`` whose DeepSpeed engines are ours.

    Processes that share a model (stages, tensor parallelism) get the same batches. What gathers or
    reduces counts them once, also ``gather``, ``gather_object`` and ``reduce`` of
    ``accelerate.utils``. Of several plugins each brings its own ``"wavemare"`` section.

    Attributes:
        section: The ``"wavemare"`` section; None without one.
        stages: Stages of the pipeline.
        weighs_losses: Whether the engine weighs the losses of data ranks.
        whole_step_key: The key that makes the engine train whole steps only; None without one.
        steps: What is known of the loop's present step.
        whole_steps: Whether the caller trains by ``engine.train_batch``, as
            `wavemare.hf.Trainer` does.
        build: Called in place of ``deepspeed.initialize``.
    """

    section: dict[str, Any] | None = None
    stages = 1
    weighs_losses = False
    whole_step_key: str | None = None
    whole_steps = False
    build: Callable[..., Any] = staticmethod(initialize)
    _planned: Ranks | None = None
    _counts_models = False
    _checks_steps = False
    steps = Steps()  # of a Trainer's, which has no loop of a script's own

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        watch_failures()
        self.steps = Steps()
        given = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        by_deepspeed = any(given.get(n) for n in _PLUGINS) or parse_flag_from_env(_USE_DEEPSPEED)
        with joined_on_cpus(given) if by_deepspeed else nullcontext():
            super().__init__(**given)
        if getattr(self.state, "deepspeed_plugin", None) is not None:
            check_joined(self.num_processes)
            self.take_section(self._given_section())

    def _given_section(self) -> dict[str, Any] | None:
        """Return the section of the selected plugin, of which other accelerators may make use."""
        plugin = self.state.deepspeed_plugin
        if SECTION in plugin.deepspeed_config:  # accelerate would fill in its "auto"
            setattr(plugin, _SECTION_OF_PLUGIN, plugin.deepspeed_config.pop(SECTION))
        return getattr(plugin, _SECTION_OF_PLUGIN, None)

    def take_section(self, section: dict[str, Any] | None) -> None:
        """Use a ``"wavemare"`` section for the models of the selected plugin.

        Raises:
            ConfigError: It is invalid, needs another training loop, or divides models over another
                number of processes than an engine of this accelerator.
        """
        ours = WavemareConfig.of({SECTION: section} if section is not None else {})
        key = self.whole_step_key = _whole_step_key(ours)
        if key is not None and not self.whole_steps:
            reason = "its engine trains whole steps, and accelerate's loop single passes"
            remedy = "Use wavemare.hf.Trainer, or wavemare.initialize and engine.train_batch"
            raise ConfigError(f"{SECTION}.{key}", section, reason, remedy)
        if ours.local_steps.elastic.replicas:
            reason = "accelerate's loop and the Trainer count the data ranks of one job"
            remedy = "Use wavemare.initialize and engine.train_batch"
            raise ConfigError(f"{SECTION}.local_steps.elastic", section, reason, remedy)
        built = getattr(self, "deepspeed_engine_wrapped", None)
        if built is not None and ours.model_ranks != self.model_ranks:
            reason = f"loaders and engines of this accelerator count {self.model_ranks} per model"
            remedy = "Build this model's engine by wavemare.initialize, or divide both alike"
            raise ConfigError(SECTION, section, reason, remedy)
        plugin = getattr(self.state, "deepspeed_plugin", None)
        if plugin is not None:
            setattr(plugin, _SECTION_OF_PLUGIN, section)
        self.section = section
        PartialState._shared_state[_ACCELERATOR] = id(self)
        _accelerators[id(self)] = self
        self._planned = None
        if ours.model_ranks > 1 and self.num_processes % ours.model_ranks == 0:
            own, count = int(self.process_index), int(self.num_processes)
            alone = ours.local_steps.mode != "off"
            replicas = count_replicas(ours, gather(socket.gethostname())) if alone else 1
            self._planned = Ranks.planned(ours, rank=own, world_size=count, count=replicas)
        self.stages = ours.pipeline.stages
        self.weighs_losses = ours.balance.is_active

    @property
    def ranks(self) -> Ranks:
        """Which processes hold one model with this one, and which read other data."""
        engine = getattr(getattr(self, "deepspeed_engine_wrapped", None), "engine", None)
        if self._planned is None:
            own, count = int(self.process_index), int(self.num_processes)
            return Ranks([own], list(range(count)), own)
        return engine.ranks if engine is not None else self._planned

    @property
    def model_ranks(self) -> int:
        """Number of processes that hold one model and get the same batches."""
        return self.ranks.model_world_size

    @property
    def data_ranks(self) -> int:
        """Number of processes, or groups that share a model, with batches of their own."""
        return self.ranks.data_world_size

    @property
    def data_rank(self) -> int:
        """The rank of this process among `data_ranks`."""
        return self.ranks.data_rank

    @property
    def num_processes(self) -> int:
        """Number of processes; while accelerate prepares a model, that of `data_ranks`."""
        if self._counts_models:
            return self.data_ranks
        return int(super().num_processes)

    def _prepare_deepspeed(self, *args: Any) -> Any:
        def ours(config_params: Any = None, **arguments: Any) -> Any:
            section = {} if self.section is None else {SECTION: self.section}
            return self.build(config={**config_params, **section}, **arguments)

        if (section := self._given_section()) is not self.section:  # another plugin is selected
            self.take_section(section)
        self.steps.has_stepped = False
        self._counts_models = self.model_ranks > 1  # in sizes of batches and lengths of schedules
        try:
            with _initializing_by(ours):
                prepared = super()._prepare_deepspeed(*args)
        finally:
            self._counts_models = False
        engine = getattr(self.deepspeed_engine_wrapped, "engine", None)
        if engine is not None and not type(engine).__module__.startswith("wavemare."):
            raise RuntimeError(
                f"accelerate {accelerate.__version__} built DeepSpeed's {type(engine).__name__}: "
                "it no longer looks deepspeed.initialize up when it prepares a model"
            )
        if engine is not None:  # the Trainer restores them, after it has drawn an epoch's order
            engine.restores_random_state = not self.whole_steps
            # Without our section all is stock's; the Trainer has no loop of a script's own.
            self._checks_steps = self.section is not None and not self.whole_steps
            engine.steps_in_backward = self._checks_steps
            if self._checks_steps:
                note_reads(engine, self.steps)
        for each in prepared:
            if self.model_ranks > 1 and type(each) is AcceleratedScheduler:
                each.__class__ = scheduler_of(self.data_ranks)
            elif type(each) is DeepSpeedOptimizerWrapper and self._checks_steps:
                each.__class__, each.steps = SteppedOptimizer, self.steps
        return prepared

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run a backward pass, in which the engine steps if gradients are synchronized.

        Raises:
            ConfigError: The engine would step where the script does not, or another engine would.
        """
        if self._checks_steps:
            trained = [m for m in self._models if getattr(m, "basic_optimizer", None) is not None]
            if len(trained) > 1:
                reason = (
                    "backward trains the first of the engines that the accelerator has prepared"
                )
                remedy = "Make an Accelerator() for each model, or call free_memory() between them"
                raise ConfigError("prepare", f"{len(trained)} engines", reason, remedy)
            if self.steps.has_stepped:
                key, count = "gradient_accumulation_steps", self.gradient_accumulation_steps
                reason = (
                    "the engine stepped in the last backward, and optimizer.step() did not come"
                )
                remedy = "Put each pass with optimizer.step() in accelerator.accumulate(model)"
                raise ConfigError(key, count, reason, f"{remedy}; or add up losses for one pass")
        super().backward(loss, **kwargs)
        self.steps.has_stepped = self._checks_steps and self.sync_gradients

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a loader of this data rank's batches; see accelerate's method of that name.

        Processes that share a model draw the same samples, in the order of the first process's
        seed, and their samplers, data sets and collators draw the same random numbers.

        Raises:
            ConfigError: An option would give stages different batches.
        """
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return data_loader
        if self.model_ranks == 1 and self.whole_step_key is None:
            return super().prepare_data_loader(data_loader, *args, **kwargs)
        given = self.dataloader_config.data_seed
        (seed,) = broadcast_object_list([torch.initial_seed() if given is None else given])
        if self.model_ranks == 1:
            prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
            return _shared(prepared, seed, self.data_rank)
        for name, value, wanted in (
            ("split_batches", self.split_batches, False),
            ("dispatch_batches", bool(self.dispatch_batches), False),
            ("even_batches", self.even_batches, True),
            ("use_stateful_dataloader", self.use_stateful_dataloader, False),
        ):
            if value != wanted:
                reason = "processes that share a model all read the same batches"
                raise ConfigError(f"accelerator_config.{name}", value, reason, "Leave it out")
        worker_init = data_loader.worker_init_fn
        if "rank" in getattr(worker_init, "keywords", {}) or {}:
            # Processes of a model would draw differently. A data set that is iterated draws the
            # order, of which each data rank takes its rows.
            ordered = isinstance(data_loader.dataset, IterableDataset)
            worker_init.keywords["rank"] = 0 if ordered else self.data_rank
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=self.data_ranks,
            process_index=self.data_rank,
            put_on_device=self.device_placement,
            rng_types=self.rng_types.copy(),
            dispatch_batches=False,
            even_batches=True,
            use_seedable_sampler=True,
            data_seed=seed,
            non_blocking=self.non_blocking,
        )
        self._dataloaders.append(prepared)
        return _shared(prepared, seed, self.data_rank)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Return the whole model's weights; see accelerate's method of that name.

        Where each rank holds a part, rank 0 gets them, and the others None; all must call it.
        """
        marked = mark_of(getattr(model, "module", model))
        by_deepspeed = getattr(model, "autotp_size", int)() > 1  # which puts its own parts together
        if marked is not None and not by_deepspeed:
            return whole_state_dict(model)
        return super().get_state_dict(model, unwrap)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Return the norm of the gradients, which the engine has clipped in ``backward``.

        Raises:
            ConfigError: The engine clips to another norm than this one. Infinity clips nothing.
        """
        engine = getattr(getattr(self, "deepspeed_engine_wrapped", None), "engine", None)
        self.steps.has_read = False
        if engine is not None and self.section is not None:
            wanted = 0.0 if math.isinf(max_norm) else float(max_norm)
            limit = float(engine.gradient_clipping())
            if norm_type != _EUCLIDEAN or not math.isclose(wanted, limit):
                kind = f" and norm_type={norm_type}" if norm_type != _EUCLIDEAN else ""
                reason = f"the engine clips to it in backward, and the script asks for {max_norm}"
                remedy = f'Write "gradient_clipping": {wanted} in the DeepSpeed file'
                if kind:
                    remedy = "Leave norm_type out"
                raise ConfigError("gradient_clipping", limit, reason + kind, remedy)
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip as accelerate's method of that name, which no DeepSpeed engine does.

        Raises:
            ConfigError: The engine clips norms alone, in ``backward``.
        """
        self.steps.has_read = False
        if self.section is not None:
            reason = "the engine has stepped in backward, and clips norms alone"
            remedy = 'Leave the call out, and write "gradient_clipping": a norm, in the file'
            raise ConfigError("clip_grad_value_", clip_value, reason, remedy)
        super().clip_grad_value_(parameters, clip_value)

    def check_trigger(self) -> bool:
        """Return whether any process has set the trigger; see accelerate's method of that name."""
        if self.model_ranks > 1 and any(gather(bool(self.flag_tensor))):
            self.set_trigger()  # sums count the processes of a model once
        return bool(super().check_trigger())

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this data rank's part of inputs; see accelerate's method of that name."""
        state: Any = PartialState()
        if self.model_ranks > 1:
            state = Proxy(state)
            state.num_processes, state.process_index = self.data_ranks, self.data_rank
        with PartialState.split_between_processes(state, inputs, apply_padding) as part:
            yield part


_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda parts: parts.sum(0),
    "mean": lambda parts: parts.sum(0) / len(parts),
    "max": lambda parts: parts.amax(0),
}


def _parts(tensor: torch.Tensor, ranks: Ranks) -> list[torch.Tensor]:
    """Return a tensor of each replica, from the processes at this one's place in them."""
    own = tensor.contiguous()
    if ranks.data_world_size == 1:
        return [own]
    if ranks.replica_group is None:  # there is no engine yet
        parts = _from_all(own, None)
        return [parts[rank] for rank in ranks.replicas]
    parts = _from_all(own, ranks.replica_group)
    if ranks.apart_group is None:
        return parts
    # Not from all processes: in a pipeline, the last stages alone may ask.
    return [part for each in _from_all(torch.stack(parts), ranks.apart_group) for part in each]


def _from_all(own: torch.Tensor, group: Any) -> list[torch.Tensor]:
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    return parts


def _gathered(ranks: Ranks, tensor: Any) -> Any:
    """Return tensors of all replicas, concatenated."""

    def of_one(own: torch.Tensor) -> torch.Tensor:
        return torch.cat(_parts(own.reshape(1) if own.ndim == 0 else own, ranks))

    return recursively_apply(of_one, tensor, error_on_other_type=True)


def _gathered_objects(ranks: Ranks, object: Any) -> Any:
    """Return what the lists of all replicas hold, in one list; as in one process, one's own."""
    if ranks.data_world_size == 1:
        return object
    found = gather(object)
    return [each for rank in ranks.replicas for each in found[rank]]


def _reduced(ranks: Ranks, tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Return tensors reduced over all replicas; the scale is XLA's alone."""
    reduce = _REDUCTIONS.get(reduction, _REDUCTIONS["sum"])  # as accelerate takes other words
    return recursively_apply(
        lambda own: reduce(torch.stack(_parts(own, ranks))).to(own.dtype),
        tensor,
        error_on_other_type=True,
    )


def _count_models(stock: Callable[..., Any], ours: Callable[..., Any], beside: object) -> None:
    """Let a function of accelerate count the processes of one model once, whoever calls it.

    Args:
        stock: The function.
        ours: The same of replicas, whose ranks it takes first.
        beside: A module that goes on with the stock function.
    """

    def counting(*args: Any, **kwargs: Any) -> Any:
        accelerator = _accelerators.get(PartialState._shared_state.get(_ACCELERATOR, 0))
        if accelerator is None or accelerator.model_ranks == 1:
            return stock(*args, **kwargs)
        return ours(accelerator.ranks, *args, **kwargs)

    _replace(stock, counting, beside)


def _replace(stock: Callable[..., Any], ours: Callable[..., Any], beside: object) -> None:
    """Put a function in the place of accelerate's, which modules may have by any name."""
    functools.update_wrapper(ours, stock)
    for module in [each for each in sys.modules.values() if each is not beside]:
        names = getattr(module, "__dict__", {})
        for name in [name for name, value in list(names.items()) if value is stock]:
            names[name] = ours


_count_models(operations.gather, _gathered, None)
_count_models(operations.gather_object, _gathered_objects, None)
# accelerate copies the tensor of one process to the others by a sum over all processes.
_count_models(operations.reduce, _reduced, operations)


def model_ranks_of(accelerator: accelerate.Accelerator) -> int:
    """Return how many processes hold one model; with accelerate's own class each holds its own."""
    return accelerator.model_ranks if isinstance(accelerator, Accelerator) else 1


def rows_that_count(loader: Any, rows: int, *, data_rank: int, data_ranks: int) -> int:
    """Return how many rows of the batch that was read last are no repetitions.

    accelerate fills up the last batches of an epoch, so that all data ranks have equal ones. Its
    own count is of the data set, whatever a sampler draws of it, and it has none where a run goes
    on within an epoch.

    Args:
        loader: Prepared by accelerate; None outside of an epoch.
        rows: Of the batch.
        data_rank: Of this process.
        data_ranks: That share the loader's batches.
    """
    if loader is None or not loader.end_of_dataloader:
        return rows
    batches: Any = getattr(loader, "batch_sampler", None)
    left = int(loader.remainder)
    while isinstance(batches, SkipBatchSampler | SharedOrder | BatchSamplerShard):
        batches = batches.order if isinstance(batches, SharedOrder) else batches.batch_sampler
    sampler, size = getattr(batches, "sampler", None), getattr(batches, "batch_size", None)
    if isinstance(sampler, Sized) and size and not batches.drop_last:
        left = len(sampler) % (size * data_ranks)
    return min(max(left - data_rank * rows, 0), rows) if left > 0 else rows


class _SharedLoader(DataLoaderShard):
    """A loader that draws the same random numbers on all processes of a model.

    Attributes:
        draw_seed: The run's seed, equal on all processes.
    """

    draw_seed = 0
    iteration: int

    def __iter__(self) -> Iterator[Any]:
        return drawn_alike(super().__iter__(), self.draw_seed, epoch=self.iteration)


def _shared(loader: Any, seed: int, data_rank: int | None = None) -> Any:
    """Let a prepared loader draw the same random numbers on all processes of a model.

    Args:
        loader: Changed; one that accelerate dispatches draws on one process, and stays as it is.
        seed: The run's, equal on all processes.
        data_rank: Of this process; None if the loader was made of a shared one.
    """
    if type(loader) is DataLoaderShard:
        # accelerate hides the class of its loaders behind a property.
        vars(object)["__class__"].__set__(loader, _SharedLoader)
        loader.draw_seed = seed
        if data_rank is not None:
            share_draws(loader.base_dataloader, data_rank)
    return loader


def _without_first(dataloader: Any, num_batches: int = 0) -> Any:
    left = skip_first_batches(dataloader, num_batches)
    if isinstance(dataloader, LateLoader):  # of a Trainer's script
        begin_late(left)
    return _shared(left, dataloader.draw_seed) if type(dataloader) is _SharedLoader else left


_replace(skip_first_batches, _without_first, sys.modules[__name__])


@contextmanager
def joined_on_cpus(given: dict[str, Any]) -> Iterator[None]:
    """Initialize accelerate's state for several processes on CPUs; inside, an accelerator is made.

    accelerate leaves DeepSpeed out with ``cpu=True`` or its variable ``ACCELERATE_USE_CPU``, and
    counts one process without them.

    Args:
        given: Arguments of the accelerator; ``cpu`` is removed.

    Raises:
        ConfigError: CPUs are asked for, and DeepSpeed has another device.
    """
    device = get_accelerator().device_name()
    told = given.pop("cpu", False) or parse_flag_from_env(_USE_CPU)
    if device != "cpu":
        if told:
            remedy = "Leave it out, or set the environment variable DS_ACCELERATOR to cpu"
            raise ConfigError("cpu", True, f"DeepSpeed's engines would train on {device}", remedy)
        yield
        return
    hidden = os.environ.pop(_USE_CPU, None)
    try:
        handlers = given.get("kwargs_handlers") or ()
        ours = [h.to_kwargs() for h in handlers if isinstance(h, InitProcessGroupKwargs)]
        if PartialState._shared_state == {}:
            PartialState(cpu=True, **(ours[0] if ours else {}))
        yield
    finally:
        if hidden is not None:
            os.environ[_USE_CPU] = hidden


def check_joined(processes: int) -> None:
    """Check that accelerate's state counts all processes.

    Raises:
        ConfigError: The state was made earlier, for one process.
    """
    if processes != environment_world_size():
        reason = (
            f"accelerate's state was made before, for 1 of {environment_world_size()} processes"
        )
        remedy = (
            "Make the Accelerator first; or begin with 'from accelerate import PartialState' and "
            "'PartialState(cpu=True)' (a Trainer: --use_cpu)"
        )
        raise ConfigError("num_processes", processes, reason, remedy)


def _whole_step_key(ours: WavemareConfig) -> str | None:
    """Return the key that makes an engine train whole steps only, or None."""
    if ours.pipeline.stages > 1:
        return "pipeline.stages"
    if ours.wavelet.mode != "off":
        return "wavelet.mode"
    return None


@contextmanager
def _initializing_by(function: Callable[..., Any]) -> Iterator[None]:
    # accelerate looks deepspeed.initialize up at each call. Ours calls DeepSpeed's, so the stock
    # function must be restored before.
    stock = deepspeed.initialize

    def initialize_once(**arguments: Any) -> Any:
        deepspeed.initialize = stock
        return function(**arguments)

    with _swap_lock:
        deepspeed.initialize = initialize_once
        try:
            yield
        finally:
            deepspeed.initialize = stock
