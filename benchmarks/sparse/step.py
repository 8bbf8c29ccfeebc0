# SPDX-License-Identifier: Apache-2.0
"""A rank of ``benchmarks sparse --step``: whole training steps of models with large tables.

The gradient of a table is zero except in the rows that a batch looks up.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import wavemare
from benchmarks.device_like import SleepingOptimizer
from benchmarks.ranks import SEED, interleaved, ratio_row
from benchmarks.sparse.peers.hybrid import HybridModel
from benchmarks.sparse.request import (
    STEP_BASELINE,
    STEP_BOUND,
    STEP_PEERS,
    TOPK_SHARE,
    SparseRequest,
)
from benchmarks.sparse.workloads import Model, batch_of_step, zipf_ids
from wavemare.errors import CommError
from wavemare.observe import Screen

_FIRST_WORD = 5
"""Below are special tokens, as in most BERT vocabularies."""
_CLASSES = 4
_LEARNING_RATE = 1e-3
_LINK_COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")
_CALLS = "sparse_calls_"
_SPARSE = ("deepspeed-sparse", "torch-ddp-sparse", "wavemare-ddp-sparse")
"""Systems whose tables give sparse gradients, as a user of them would set."""
_UNCHECKED = (STEP_BOUND, "wavemare-topk")
"""Systems whose optimizers see other gradients than the mean over the ranks; with ZeRO 1 they see
slices of it."""
_TOLERANCE = 1e-5


class StepSample(NamedTuple):
    """One round of one system.

    Args:
        seconds: Per optimizer step, of the slowest rank.
        loss: Of the last step, mean over the ranks.
        link_bytes: Sent by rank 0's link per step, headers included; None without a link.
        figures: Of rank 0's collectives in the last step, by name.
    """

    seconds: float
    loss: float
    link_bytes: float | None
    figures: Mapping[str, float]


def measure_step(request: SparseRequest) -> dict[str, Any]:
    """Build all systems, run all rounds and return the result."""
    screen = Screen(rank=dist.get_rank())
    systems = {}
    for name in request.chosen:
        screen.note(f"building {name}")
        systems[name] = _build_system(name, request)
    if request.compute == "sleep":
        _check_gradients(request, systems)
    samples: dict[str, list[StepSample]] = {name: [] for name in systems}
    turns = dict.fromkeys(systems, 0)
    for timed, name in interleaved(request, list(systems), screen.note):
        first = turns[name] * request.steps_per_round
        turns[name] += 1
        steps = range(first, first + request.steps_per_round)
        batches = [_batch(request, step) for step in steps]
        sample = run_round(request.mbit, systems[name], batches)
        if timed:
            samples[name].append(sample)
    for system in systems.values():
        system.close()
    return build_step_result(request, samples)


def _batch(request: SparseRequest, step: int) -> dict[str, Tensor]:
    if request.compute == "sleep":
        return batch_of_step(request.model, step, dist.get_rank())
    return words_of_step(request, step, dist.get_rank())


def _check_gradients(request: SparseRequest, systems: Mapping[str, StepSystem]) -> None:
    """Compare the gradients that each optimizer sees with a dense mean over the ranks.

    Raises:
        CommError: They differ by more than rounding.
    """
    batch = _batch(request, 0)
    model, _ = _build_model(request)
    model(**batch).loss.backward()
    expected = [weight.grad for weight in model.parameters() if weight.grad is not None]
    for gradient in expected:
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())
    for name, system in systems.items():
        optimizer = system.optimizer
        if name in _UNCHECKED or not isinstance(optimizer, SleepingOptimizer):
            system.step(batch)
            continue
        optimizer.kept = []
        system.step(batch)
        (found,), optimizer.kept = optimizer.kept, None
        gaps = [float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)]
        most = max(float(gradient.abs().max()) for gradient in expected)
        if max(gaps) > _TOLERANCE * most:
            reason = f"its gradients are off by up to {max(gaps):g}"
            raise CommError("system", name, reason, "Report this: its measurements mean nothing")


def words_of_step(request: SparseRequest, step: int, rank: int) -> dict[str, Tensor]:
    """Return the batch of a rank in a step: words as frequent as in a language (Zipf's law)."""
    generator = np.random.default_rng([SEED, step, rank])
    shape = request.batch, request.sequence
    ids = zipf_ids(generator, request.vocabulary - _FIRST_WORD, shape) + _FIRST_WORD
    labels = torch.from_numpy(generator.integers(_CLASSES, size=request.batch))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def run_round(
    mbit: float | None, system: StepSystem, batches: Sequence[dict[str, Tensor]]
) -> StepSample:
    """Do a step with each batch, from a barrier to the end of the slowest rank.

    Bytes are counted on links of so many Mbit/s; None for no links.
    """
    dist.barrier()
    sent, started = _link_bytes(mbit), time.perf_counter()
    loss = torch.zeros(())
    for batch in batches:
        loss = system.step(batch)
    seconds = torch.tensor((time.perf_counter() - started) / len(batches), dtype=torch.float64)
    # Messages of the last step may still wait for the link.
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    sent_after = _link_bytes(mbit)
    through_link = (
        None if sent is None or sent_after is None else (sent_after - sent) / len(batches)
    )
    dist.all_reduce(loss)
    return StepSample(
        float(seconds), float(loss) / dist.get_world_size(), through_link, dict(system.figures)
    )


def _link_bytes(mbit: float | None) -> int | None:
    return None if mbit is None else int(_LINK_COUNTER.read_text())


def build_step_result(
    request: SparseRequest, samples: Mapping[str, Sequence[StepSample]]
) -> dict[str, Any]:
    """Return the result without command and machine."""
    seconds = {name: [s.seconds for s in rounds] for name, rounds in samples.items()}
    medians = {name: median(values) for name, values in seconds.items()}
    rows = []
    for name, rounds in samples.items():
        figures = rounds[-1].figures
        own, dense = _communication(name, medians), _communication(STEP_BASELINE, medians)
        calls = [key.removeprefix(_CALLS) for key in figures if key.startswith(_CALLS)]
        link = [s.link_bytes for s in rounds if s.link_bytes is not None]
        up = figures.get("sparse_bytes_up")
        rows.append(
            {
                "system": name,
                "ranks": request.ranks,
                "mbit": request.mbit,
                "compute": request.compute,
                "workload": request.workload,
                **ratio_row(seconds[name], seconds.get(STEP_BASELINE)),
                "communication_s": own,
                # Without any time beyond the bound there is no ratio.
                "communication_ratio": dense / own if dense and own else None,
                "bytes_up": None if up is None else int(up),
                "link_bytes_up": median(link) if link else None,
                "density": figures.get("sparse_density"),
                "union": figures.get("sparse_union"),
                "executor": "+".join(sorted(calls)) or None,
                "loss": rounds[-1].loss,
            }
        )
    whole = {"baseline": STEP_BASELINE, "mbit": request.mbit, "request": request.model_dump()}
    return {**whole, "rows": rows}


def _communication(name: str, medians: Mapping[str, float]) -> float | None:
    """Return a step's seconds beyond one without messages; None if these are unknown."""
    if name == STEP_BOUND or name not in medians or STEP_BOUND not in medians:
        return None
    return max(0.0, medians[name] - medians[STEP_BOUND])


class StepSystem(ABC):
    """One system on one rank.

    Attributes:
        figures: Of the collectives of the last step, by name; empty for stock systems.
        optimizer: That of the model, as it was given to the system.
    """

    figures: Mapping[str, float] = {}
    optimizer: torch.optim.Optimizer

    @abstractmethod
    def step(self, batch: dict[str, Tensor]) -> Tensor:
        """Do an optimizer step; return this rank's loss."""

    def close(self) -> None:
        """Close its collectives."""
        return None


class TorchSystem(StepSystem):
    """Plain torch, or DistributedDataParallel."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self.optimizer = optimizer

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        """Do an optimizer step; return this rank's loss."""
        loss: Tensor = self._model(**batch).loss
        loss.backward()
        self._reduce()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _reduce(self) -> None:
        """Average the gradients, where the model has not done it."""


class _WavemareDdp(TorchSystem):
    """DistributedDataParallel with our hook."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, block: int) -> None:
        from wavemare.comm import register_ddp_hook

        wrapped = DistributedDataParallel(model)
        self._comm = register_ddp_hook(wrapped, block=block, transport="mpi")
        super().__init__(wrapped, optimizer)

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = super().step(batch)
        self.figures = self._comm.totals.take()
        return loss

    def close(self) -> None:
        self._comm.close()


class _Hybrid(TorchSystem):
    """A system of a paper for the tables, and DistributedDataParallel for the rest."""

    def __init__(self, hybrid: HybridModel, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(hybrid.wrapped, optimizer)
        self._hybrid = hybrid

    def _reduce(self) -> None:
        self._hybrid.wait()

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        before = self._hybrid.bytes_up
        loss = super().step(batch)
        self.figures = {"sparse_bytes_up": self._hybrid.bytes_up - before}
        return loss

    def close(self) -> None:
        self._hybrid.close()


class EngineSystem(StepSystem):
    """DeepSpeed's engine, or ours.

    Args:
        engine: Complete.
        optimizer: Of the model; by default the one that the engine has made.
    """

    def __init__(self, engine: Any, optimizer: Any = None) -> None:
        self._engine = engine
        self.optimizer = optimizer or engine.optimizer

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        """Do an optimizer step; return this rank's loss."""
        loss: Tensor = self._engine(**batch).loss
        self._engine.backward(loss)
        self._engine.step()
        if hasattr(self._engine, "step_metrics"):
            self.figures = self._engine.step_metrics()
        return loss.detach()

    def close(self) -> None:
        """Destroy the engine."""
        self._engine.destroy()


def _build_system(name: str, request: SparseRequest) -> StepSystem:
    """Build a system; all ranks must call it together."""
    model, tables = _build_model(request)
    sleeps = request.compute == "sleep"
    optimizer: torch.optim.Optimizer
    partitions = "-zero1" in name
    if sleeps and partitions:  # which weights are gathered depends on the optimizer
        optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
    elif sleeps:
        optimizer = SleepingOptimizer(model.parameters())
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    if name in _SPARSE:
        for table in tables:
            table.sparse = True
        if not sleeps:
            optimizer.register_step_pre_hook(_make_dense)
    if name == STEP_BOUND:
        return TorchSystem(model, optimizer)
    if name.startswith("torch-ddp"):
        return TorchSystem(DistributedDataParallel(model), optimizer)
    if name in STEP_PEERS:
        return _Hybrid(HybridModel(name, model, tables, request.ranks), optimizer)
    if name.startswith("wavemare-ddp"):
        return _WavemareDdp(model, optimizer, request.step_block)
    initialize: Any = deepspeed.initialize
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": request.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # by default DeepSpeed clips, and the others do not
        "zero_optimization": {"stage": int(partitions)},
        "zero_allow_untested_optimizer": sleeps,
        "steps_per_print": None,
    }
    if name.startswith("wavemare"):
        initialize = wavemare.initialize
        config["wavemare"] = {"sparse_collective": _section(name, request)}
    return EngineSystem(initialize(model=model, optimizer=optimizer, config=config)[0], optimizer)


def _build_model(request: SparseRequest) -> tuple[Any, Sequence[nn.Embedding]]:
    """Return a model and its large tables."""
    if request.compute == "sleep":
        model: Any = Model(request.model, request.waits, dist.get_rank())
        return model, list(model.tables)
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(SEED)
    # Without dropout, equal gradients give equal losses.
    config = BertConfig(
        vocab_size=request.vocabulary,
        hidden_size=request.hidden,
        num_hidden_layers=request.layers,
        num_attention_heads=request.heads,
        intermediate_size=4 * request.hidden,
        max_position_embeddings=request.sequence,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config.num_labels = _CLASSES
    model = BertForSequenceClassification(config)
    return model, [model.get_input_embeddings()]


def _section(name: str, request: SparseRequest) -> dict[str, Any]:
    mode = "pushpull" if name == "wavemare-pushpull" else "auto"
    transport = "torch" if name.endswith("-gloo") else "mpi"
    section: dict[str, Any] = {"mode": mode, "block": request.step_block, "transport": transport}
    if name.endswith("-zero1-all"):
        section["updated_weights"] = "all"
    if name == "wavemare-topk":
        section["compressor"] = {"type": "block_topk", "ratio": TOPK_SHARE}
    return section


def _make_dense(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Make sparsely reduced gradients dense for AdamW, so that all systems train alike."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
