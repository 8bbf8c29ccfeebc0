# SPDX-License-Identifier: Apache-2.0
"""The systems of ``wavemare bench local-steps``, each ready to train a step."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import wavemare
from wavemare.bench.local_steps.request import (
    BASELINE,
    BOUND,
    FRAGMENTS,
    TORCHFT,
    LocalStepsRequest,
)
from wavemare.bench.ranks import build_gpt, gather
from wavemare.bench.sparse.step import EngineSystem, StepSystem, TorchSystem, run_round
from wavemare.engine.config.sections import OuterConfig

_NEVER = 1_000_000_000
_BUCKETS = (1_000_000, 5_000_000, 50_000_000)
_TRIALS = 2
_RANK = 4
_LEAST_START = 2  # of PowerSGD with error feedback
_PATIENCE = timedelta(minutes=10)
_OUTER = OuterConfig()  # the defaults of wavemare, for torchft too


class System(StepSystem):
    """One system on one rank.

    Args:
        model: The GPT itself.
        optimizer: Whose rate is set from outside.
        inner: Does the steps.
        lead: Steps before timed ones, so that a message travels at their beginning as at their end.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, inner: StepSystem, lead: int = 0
    ) -> None:
        self.model, self.optimizer, self.lead = model, optimizer, lead
        self.tuned: dict[str, Any] = {}
        self._inner = inner

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        """Do an optimizer step; return this rank's loss."""
        loss = self._inner.step(batch)
        self.figures = self._inner.figures
        return loss

    def drain(self) -> None:
        """Wait for messages that travel, so that they do not slow the next system."""
        if isinstance(self._inner, _Engine):
            self._inner.drain()

    def close(self) -> None:
        """Close its collectives."""
        self._inner.close()


class _Engine(EngineSystem):
    """With local steps or without."""

    def drain(self) -> None:
        for feature in getattr(self._engine, "features", ()):
            if feature.key == "local_steps":
                feature.extra_state()  # waits, and applies nothing


class _Torchft(TorchSystem):
    """DiLoCo of torchft, with its own managers and a server on rank 0."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, request: LocalStepsRequest
    ) -> None:
        os.environ.setdefault("RUST_LOG", "error")
        from torchft import Manager, ProcessGroupGloo
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo

        super().__init__(model, optimizer)
        host = socket.gethostname() if request.mbit else "127.0.0.1"
        self._server = None
        if dist.get_rank() == 0:
            self._server = LighthouseServer(bind="0.0.0.0:0", min_replicas=request.ranks)
        ports = gather(self._server and (host, self._server.address().rpartition(":")[2]))
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=_PATIENCE),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=request.ranks,
            use_async_quorum=False,
            timeout=_PATIENCE,
            quorum_timeout=_PATIENCE,
            rank=0,
            world_size=1,
            store_addr=host,
            store_port=self._store.port,
            lighthouse_addr="http://{}:{}".format(*ports[0]),
            hostname=host,
            replica_id=f"replica{dist.get_rank()}",
            init_sync=False,  # all have the same weights
        )
        outer = torch.optim.SGD(
            model.parameters(), lr=_OUTER.lr, momentum=_OUTER.momentum, nesterov=True
        )
        self._method = DiLoCo(
            self._manager, [model], optimizer, outer, request.every, use_bucketization=True
        )
        self._method.__enter__()

    def close(self) -> None:
        self._method.__exit__(None, None, None)
        dist.barrier()  # a server that is gone would be an error of the others
        self._manager.shutdown()
        if self._server is not None:
            self._server.shutdown()


def build_system(
    name: str,
    request: LocalStepsRequest,
    batch: Callable[[], dict[str, Tensor]],
    *,
    warmup: int = 0,
    tunes: bool = False,
) -> System:
    """Build a system; all ranks must call it together.

    Args:
        name: One of the request's systems, or the bound.
        request: The options.
        batch: Gives micro-batches for trials.
        warmup: Steps in which all ranks average gradients before they step alone.
        tunes: Whether the baseline tries sizes of its buckets.
    """
    if name == BASELINE and tunes:
        return _tuned(request, batch)
    return _build(name, request, warmup, _BUCKETS[-1])


def _tuned(request: LocalStepsRequest, batch: Callable[[], dict[str, Tensor]]) -> System:
    """Return the baseline with the fastest of some sizes of buckets."""
    seconds: dict[int, float] = {}
    for bucket in _BUCKETS:
        system = _build(BASELINE, request, 0, bucket)
        system.step(batch())
        rounds = [run_round(request, system, [batch()]) for _ in range(_TRIALS)]
        seconds[bucket] = min(sample.seconds for sample in rounds)
        system.close()
    system = _build(BASELINE, request, 0, min(seconds, key=seconds.__getitem__))
    system.tuned = {"bucket_s": seconds}
    return system


def _build(name: str, request: LocalStepsRequest, warmup: int, bucket: int) -> System:
    model = build_gpt(request, seed=request.seed)
    optimizer: Any = torch.optim.AdamW(
        model.parameters(), lr=request.learning_rate, weight_decay=0.0
    )
    if name == TORCHFT:
        return System(model, optimizer, _Torchft(model, optimizer, request))
    if name in ("ddp", "ddp-powersgd-4", "post-local-sgd"):
        wrapped = DistributedDataParallel(model)
        if name == "ddp-powersgd-4":
            start = max(warmup, _LEAST_START)
            state = power.PowerSGDState(None, _RANK, start_powerSGD_iter=start)
            wrapped.register_comm_hook(state, power.powerSGD_hook)
        if name == "post-local-sgd":
            own, _ = dist.new_subgroups(request.ranks_per_host)
            local = post_local.PostLocalSGDState(None, own, warmup)
            wrapped.register_comm_hook(local, post_local.post_localSGD_hook)
            averager = PeriodicModelAverager(request.every, warmup)
            optimizer = PostLocalSGDOptimizer(optimizer, averager)
        return System(model, optimizer, TorchSystem(wrapped, optimizer))
    stage: dict[str, Any] = {"stage": 0 if name == "wavemare-sparse-auto" else 1}
    if name == BASELINE:
        stage |= {"overlap_comm": True, "contiguous_gradients": True}
        stage |= {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": request.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # by default DeepSpeed clips, and the others do not
        "zero_optimization": stage,
        "steps_per_print": None,
    }
    initialize: Any = deepspeed.initialize if name == BASELINE else wavemare.initialize
    lead = 0
    if name == "wavemare-sparse-auto":
        config["wavemare"] = {"sparse_collective": {"mode": "auto", "transport": "torch"}}
    elif name != BASELINE:
        every = _NEVER if name == BOUND else request.every
        local = {"mode": "diloco", "every": every, "replica": request.ranks_per_host}
        local["warmup_steps"] = warmup
        if name.endswith("-streaming"):
            lead = every // FRAGMENTS
            local |= {"fragments": FRAGMENTS, "overlap": lead}
        config["wavemare"] = {"local_steps": local}
    engine = initialize(model=model, optimizer=optimizer, config=config)[0]
    return System(model, optimizer, _Engine(engine), lead)
