# SPDX-License-Identifier: Apache-2.0
"""A rank of ``benchmarks local-steps``: rounds of training steps, then losses over steps."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import wavemare
from benchmarks.curve import first_at
from benchmarks.device_like import Part, SleepingOptimizer, put_to_sleep
from benchmarks.local_steps.request import (
    ACROSS,
    BASELINE,
    BOUND,
    EACH_STEP,
    FRAGMENTS,
    PIPELINE_BASELINE,
    TORCHFT,
    WARMED,
    LocalStepsRequest,
)
from benchmarks.local_steps.stages import put_layers_to_sleep, replica_pipeline, stock_pipeline
from benchmarks.ranks import build_gpt, interleaved, ratio_row
from benchmarks.request import GptRequest
from benchmarks.sparse.step import EngineSystem, StepSample, StepSystem, TorchSystem, run_round
from wavemare.engine.config.sections import OuterConfig
from wavemare.engine.launch.group import gather
from wavemare.observe import Screen
from wavemare.parallel.planner.local_steps import SlowLink

Batch = dict[str, Tensor]
_RATE = 1e-3
_RISE = 0.05  # of the steps; then the rate stays
_DENSE_WARMUP = 3  # steps, of systems that exchange in each
_EVAL_BATCHES = 16
_NEVER = 1_000_000_000
_BUCKETS = (1_000_000, 5_000_000, 50_000_000)
_PATIENCE = timedelta(minutes=10)


class System(NamedTuple):
    """One system on one rank.

    Args:
        model: The GPT itself.
        optimizer: Whose rate is set from outside.
        run: Does the steps.
        lead: Steps before timed ones, so that a message travels at their beginning as at their end.
        drain: Waits for what travels, so that it does not slow the next system.
    """

    model: nn.Module
    optimizer: Any
    run: StepSystem
    lead: int = 0
    drain: Callable[[], Any] = lambda: None


def measure(request: LocalStepsRequest) -> dict[str, Any]:
    """Build all systems, run all rounds and return the result."""
    screen, data = _start(request)
    names = [*_measured(request), BOUND]
    bucket, tuned = _tune(request, data) if BASELINE in names else (0, {})
    systems = {}
    for name in names:
        screen.note(f"building {name}")
        systems[name] = _build(name, request, bucket=bucket)
    samples: dict[str, list[StepSample]] = {name: [] for name in systems}
    for timed, name in interleaved(request, names, screen.note):
        system = systems[name]
        for batch in islice(data, system.lead):
            system.run.step(batch)
        steps = request.steps(name) if timed or name not in EACH_STEP else _DENSE_WARMUP
        sample = run_round(request.mbit, system.run, list(islice(data, steps)))
        system.drain()
        if timed:
            samples[name].append(sample)
    parameters = sum(p.numel() for p in systems[BOUND].model.parameters())
    for system in systems.values():
        system.run.close()
    return {**build_result(request, samples, parameters), "bucket_s": tuned}


def _start(request: LocalStepsRequest) -> tuple[Screen, Iterator[Batch]]:
    torch.set_num_threads(1)
    rank, rows = dist.get_rank(), request.batch
    if request.stages > 1:  # a batch has the samples of a step of all pipelines
        rank, rows = 0, rows * request.step_micro_batches * request.ranks // request.stages
    return Screen(rank=dist.get_rank()), batches(request, rank, seed=request.seed, rows=rows)


def _measured(request: LocalStepsRequest) -> list[str]:
    # In this order: stock engines come first, since DeepSpeed keeps the grid of one with replicas.
    return [n for n in request.known if n in request.chosen and request.obstacle(n) is None]


def _tune(request: LocalStepsRequest, data: Iterator[Batch]) -> tuple[int, dict[int, float]]:
    """Return the baseline's fastest size of buckets, and the seconds of a step with each."""
    seconds = {}
    for bucket in _BUCKETS:
        run = _build(BASELINE, request, bucket=bucket).run
        rounds = [run_round(request.mbit, run, [next(data)]) for _ in range(3)]
        seconds[bucket] = min(sample.seconds for sample in rounds)
        run.close()
    return min(seconds, key=seconds.__getitem__), seconds


def batches(
    request: GptRequest, rank: int, *, seed: int, held_out: bool = False, rows: int | None = None
) -> Iterator[Batch]:
    """Yield parts of a text, DeepSpeed's own source by bytes; a tenth of it is held out.

    Args:
        request: The sizes.
        rank: Each has other parts.
        seed: Of the choice.
        held_out: Whether to take parts of that tenth.
        rows: Of a batch; ``--batch`` if omitted.
    """
    files = sorted(Path(deepspeed.__file__).with_name("runtime").rglob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    cut = len(text) * 9 // 10
    text = text[cut:] if held_out else text[:cut]
    generator = np.random.default_rng([seed, int(held_out), rank])
    while True:
        starts = generator.integers(len(text) - request.sequence, size=(rows or request.batch, 1))
        tokens = torch.from_numpy(text[starts + np.arange(request.sequence)].astype(np.int64))
        yield {"input_ids": tokens, "labels": tokens}


def build_result(
    request: LocalStepsRequest, samples: Mapping[str, Sequence[StepSample]], parameters: int
) -> dict[str, Any]:
    """Return the result without command and machine."""
    seconds = {name: [s.seconds for s in rounds] for name, rounds in samples.items()}
    compute_s = median(seconds[BOUND])
    hosts, size = request.ranks // request.ranks_per_host, request.ranks_per_host
    link = SlowLink(
        parameters=parameters,
        replicas=hosts,
        ranks=size,
        mbit=request.mbit,
        step_s=compute_s,
        micro_batches=request.step_micro_batches,
    )
    dense = replace(link, zero=request.baseline == BASELINE).dense
    rows = []
    for name, rounds in samples.items():
        steps = _predicted(name, link, request.every)
        rows.append(
            {
                "system": name,
                "ranks": request.ranks,
                "ranks_per_host": size,
                "stages": request.stages,
                "micro_batches": request.step_micro_batches,
                "mbit": request.mbit,
                "compute": request.compute,
                **ratio_row(seconds[name], seconds.get(request.baseline)),
                "model": steps and dense / steps,
                "model_s": steps and steps * compute_s,
                "bytes": median(s.link_bytes or 0 for s in rounds),
            }
        )
    obstacles = {name: request.obstacle(name) for name in request.chosen}
    skipped = [{"system": name, "reason": why} for name, why in obstacles.items() if why]
    return {
        "baseline": request.baseline,
        "request": request.model_dump(),
        "parameters": parameters,
        "compute_s": compute_s,
        "r": link.messages(),
        "rows": rows,
        "skipped": skipped,
    }


def _predicted(name: str, link: SlowLink, every: int) -> float | None:
    """Return how many steps' computation the model predicts for a step; None if it does not."""
    if name in ("ddp", PIPELINE_BASELINE):
        return replace(link, zero=False).dense
    if name in EACH_STEP:
        return link.dense if name == BASELINE else None
    if name == BOUND:
        return 1.0
    streams = name.endswith("-streaming")
    return link.local(every, *((FRAGMENTS, every // FRAGMENTS) if streams else ()))


def measure_losses(request: LocalStepsRequest) -> dict[str, Any]:
    """Train each system by itself on the same data; return the curves, [[step, loss], ...]."""
    curves: dict[str, list[list[float]]] = {}
    for name in _measured(request):
        screen, data = _start(request)
        screen.note(f"losses of {name}")
        rise = max(1, round(_RISE * request.quality))
        system = _build(name, request, warmup=request.warmup * request.every)
        curves[name] = curve = []
        for step in range(1, (1 if name == BASELINE else 2) * request.quality + 1):
            for group in system.optimizer.param_groups:
                group["lr"] = _RATE * min(1.0, step / rise)
            system.run.step(next(data))
            # All systems that exchange at the same steps do so at these.
            if step % request.every == 0 or step == request.quality:
                curve.append([step, _evaluate(request, system.model)])
                if step >= request.quality and first_at(curve, curves[BASELINE][-1][1]):
                    break
        system.run.close()
    return {"curves": curves}


def _evaluate(request: LocalStepsRequest, model: nn.Module) -> float:
    """Return the loss of the mean of all ranks' weights, and leave each rank its own."""
    source = batches(request, dist.get_rank(), seed=request.seed, held_out=True)
    held_out = islice(source, _EVAL_BATCHES)
    with torch.no_grad():
        own = [parameter.clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data.div_(dist.get_world_size())
        loss = torch.stack([model(**batch).loss for batch in held_out]).mean()
        for parameter, kept in zip(model.parameters(), own, strict=True):
            parameter.data.copy_(kept)
    dist.all_reduce(loss)
    return float(loss) / dist.get_world_size()


def add_losses(
    request: LocalStepsRequest, result: dict[str, Any], curves: Mapping[str, Any]
) -> None:
    """Add to the rows each system's loss, and its steps and time to the baseline's loss.

    A step of a warm-up takes as long as one of the faster dense system.
    """
    goal = curves[BASELINE][-1][1]
    dense_s = min(r["median_s"] for r in result["rows"] if r["system"] in (BASELINE, "ddp"))
    for row in result["rows"]:
        if (curve := curves.get(row["system"])) is not None:
            loss, needed = dict(curve)[request.quality], first_at(curve, goal)
            row |= {"eval_loss": loss, "loss_gap": loss / goal - 1, "steps_to_loss": needed}
            warmup = request.warmup * request.every if row["system"] in WARMED else 0
            first = min(warmup, needed or 0)
            time_s = needed and first * dense_s + (needed - first) * row["median_s"]
            row |= {"time_to_loss_s": time_s, "curve": curve}


def _build(name: str, request: LocalStepsRequest, *, warmup: int = 0, bucket: int = 0) -> System:
    """Build a system that first averages gradients for a warm-up; all ranks must call it."""
    model = build_gpt(request, seed=request.seed)
    if request.stages > 1:
        return _build_pipeline(name, request, model)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.0)
    if request.compute == "sleep":
        net = model.transformer
        parts = [Part(net.wte, "input_ids"), *map(Part, (net.wpe, *net.h, net.ln_f, model.lm_head))]
        put_to_sleep(model, parts, request.waits)
        optimizer = SleepingOptimizer(model.parameters())
    if name in TORCHFT:
        return System(model, optimizer, _Torchft(model, optimizer, request, name))
    if name in ("ddp", "ddp-powersgd-4", "post-local-sgd"):
        # On gloo, PowerSGD's messages of several buckets start in another order on each rank.
        cap_mb = 10_000 if name == "ddp-powersgd-4" else None
        wrapped = DistributedDataParallel(model, bucket_cap_mb=cap_mb)
        if name == "ddp-powersgd-4":  # with error feedback it cannot start earlier
            state = power.PowerSGDState(None, 4, start_powerSGD_iter=max(warmup, 2))
            wrapped.register_comm_hook(state, power.powerSGD_hook)
        if name == "post-local-sgd":
            own, _ = dist.new_subgroups(request.ranks_per_host)
            local = post_local.PostLocalSGDState(None, own, warmup)
            wrapped.register_comm_hook(local, post_local.post_localSGD_hook)
            averager = PeriodicModelAverager(request.every, warmup)
            optimizer = PostLocalSGDOptimizer(optimizer, averager)
        return System(model, optimizer, TorchSystem(wrapped, optimizer))
    # ZeRO 1 of a replica of one rank would cost time and save nothing.
    stage = int(name == BASELINE or (name != "wavemare-sparse-auto" and request.ranks_per_host > 1))
    config = _config(request, stage)
    options: dict[str, Any] = {"model": model, "optimizer": optimizer, "config": config}
    if name == BASELINE:
        bucket = bucket or _BUCKETS[-1]
        config["zero_optimization"] |= {"overlap_comm": True, "reduce_bucket_size": bucket}
        config["zero_optimization"] |= {"allgather_bucket_size": bucket}
        return System(model, optimizer, EngineSystem(deepspeed.initialize(**options)[0]))
    if name == "wavemare-sparse-auto":
        config["wavemare"] = {"sparse_collective": {"mode": "auto", "transport": "torch"}}
        return System(model, optimizer, EngineSystem(wavemare.initialize(**options)[0]))
    section, lead = _section(name, request, warmup)
    config["wavemare"] = {"local_steps": section}
    engine = wavemare.initialize(**options)[0]
    return System(model, optimizer, EngineSystem(engine), lead, _drain(engine))


def _build_pipeline(name: str, request: LocalStepsRequest, model: Any) -> System:
    """Build a system whose pipelines have a stage on each rank of a host."""
    make: Any = partial(torch.optim.AdamW, lr=_RATE, weight_decay=0.0)
    if request.compute == "sleep":
        put_layers_to_sleep(model, request.waits)
        make = SleepingOptimizer
    config = _config(request, 0)  # in a replica, no other rank has the same weights
    if name in (PIPELINE_BASELINE, ACROSS):
        run = stock_pipeline(model, request, config, make, across=name == ACROSS)
        return System(model, run.optimizer, run)
    section, lead = _section(name, request, 0)
    run, engine = replica_pipeline(model, request, config, make, section)
    return System(model, run.optimizer, run, lead, _drain(engine))


def _config(request: LocalStepsRequest, stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": request.batch,
        "gradient_accumulation_steps": request.step_micro_batches,
        "gradient_clipping": 0.0,  # by default DeepSpeed clips, and the others do not
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": request.compute == "sleep",
        "steps_per_print": None,
    }


def _section(name: str, request: LocalStepsRequest, warmup: int) -> tuple[dict[str, Any], int]:
    """Return the section ``local_steps`` of a system, and its lead."""
    section: dict[str, Any] = {"mode": "diloco", "replica": "host"}
    section |= {"every": _NEVER if name == BOUND else request.every, "warmup_steps": warmup}
    lead = request.every // FRAGMENTS if name.endswith("-streaming") else 0
    return section | ({"fragments": FRAGMENTS, "overlap": lead} if lead else {}), lead


def _drain(engine: Any) -> Callable[[], Any]:
    """Return what waits until no message of an engine travels: a checkpoint needs that, too."""
    (feature,) = (f for f in engine.features if f.key == "local_steps")
    return feature.extra_state


class _Torchft(TorchSystem):
    """DiLoCo of torchft, with its own managers and a server on rank 0."""

    def __init__(self, model: Any, optimizer: Any, request: LocalStepsRequest, name: str) -> None:
        os.environ.setdefault("RUST_LOG", "error")
        from torchft import Manager, ProcessGroupGloo
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo

        super().__init__(model, optimizer)
        host, rank, count = socket.gethostname(), dist.get_rank(), request.ranks
        self._server = None if rank else LighthouseServer(bind="0.0.0.0:0", min_replicas=count)
        port = gather(self._server and self._server.address().rpartition(":")[2])[0]
        self._store: Any = dist.TCPStore(host, 0, wait_for_workers=False, is_master=True)  # type: ignore[attr-defined]
        options: dict[str, Any] = {"timeout": _PATIENCE, "quorum_timeout": _PATIENCE}
        options |= {"min_replica_size": count, "use_async_quorum": False}
        options |= {"load_state_dict": None, "state_dict": None, "rank": 0, "world_size": 1}
        options |= {"store_addr": host, "store_port": self._store.port, "hostname": host}
        options |= {"lighthouse_addr": f"http://{gather(host)[0]}:{port}"}
        options |= {"replica_id": f"replica{rank}", "init_sync": False}  # all have the same weights
        self._manager = Manager(pg=ProcessGroupGloo(timeout=_PATIENCE), **options)
        settings = OuterConfig()  # the same as ours
        fragments, delay = [model], 0
        if name.endswith("-streaming"):
            net = model.transformer
            parts = [net.wte, *net.h, net.wpe, net.ln_f]
            fragments = [nn.ModuleList(parts[n::FRAGMENTS]) for n in range(FRAGMENTS)]
            delay = request.every // FRAGMENTS - 1  # the longest that torchft accepts
        self._method = DiLoCo(
            self._manager,
            fragments,
            optimizer,
            [
                torch.optim.SGD(f.parameters(), settings.lr, settings.momentum, nesterov=True)
                for f in fragments
            ],
            request.every,
            use_bucketization=True,
            fragment_sync_delay=delay,
        )
        self._method.__enter__()

    def close(self) -> None:
        self._method.__exit__(None, None, None)
        dist.barrier()  # a server that is gone would be an error of the others
        self._manager.shutdown()
        if self._server is not None:
            self._server.shutdown()
