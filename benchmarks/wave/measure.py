# SPDX-License-Identifier: Apache-2.0
"""A rank of ``benchmarks wave``: compare gradients and memory, then measure times."""

from __future__ import annotations

import ctypes
import platform
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.cluster.limits import ask
from benchmarks.device_like import sleeping
from benchmarks.ranks import SEED, bench_device, build_gpt, interleaved, ratio_row
from benchmarks.request import Waits
from benchmarks.traces import save_traces
from benchmarks.wave.request import BASELINE, DOMINO, IN_PHASE, SYSTEMS, TICK_TOCK, WaveRequest
from benchmarks.wave.saved_bytes import SavedBytes
from wavemare.engine.launch.group import gather
from wavemare.engine.pipe.split_backward import SplitBackward
from wavemare.engine.waves.passes import Pass, PassRunner
from wavemare.errors import CommError
from wavemare.observe import Screen
from wavemare.parallel.experts import split_experts
from wavemare.parallel.tensor.layers import ParallelLinear
from wavemare.parallel.tensor.split import split_model
from wavemare.pipeline.clock.simulate import Costs, Event
from wavemare.pipeline.plan.plan import COLLECTIVES, COMPUTE, Action, Kind
from wavemare.pipeline.wave.gain import costs_of_segments, decide, predict

HALVES = "halves"
"""Accumulation of halved micro-batches: not a system, it measures the cost of halving."""
# Sums of halves are rounded in another order.
_TOLERANCE = 1e-4

_Batch = dict[str, Tensor]


class Systems:
    """Runs optimizer steps of each system, without the optimizer; all ranks must call together.

    Args:
        request: The options.
        group: Over which the model is split; by default all ranks.
        dtype: Of the weights.

    Attributes:
        sums_per_micro_batch: Collectives of whole activations: two of each layer in each direction,
            and of layers split by tensors the embedding's, and the head's input gradient's.
    """

    def __init__(
        self, request: WaveRequest, *, group: Any = None, dtype: torch.dtype = torch.float32
    ) -> None:
        self.device = bench_device()
        experts = request.parallel == "experts"
        model = _build(request) if experts or request.llama else build_gpt(request, ties=True)
        split = split_experts if experts else split_model
        self.model = split(model.to(self.device, dtype), group or dist.group.WORLD)
        if request.compute == "sleep":
            _put_to_sleep(self.model, request.waits)
        self.sums_per_micro_batch = 4 * request.layers + (0 if experts else 2)
        self._runner = PassRunner(self.device)
        self._splitter = SplitBackward(self.model)
        self._saved_tensors: Callable[[], AbstractContextManager[Any]] = nullcontext
        whole = _build_batches(request, self.device)
        halves = [_batch(part) for batch in whole for part in batch["input_ids"].chunk(2)]
        self._steps = {
            BASELINE: partial(self._accumulation, whole),
            IN_PHASE: partial(self._in_phase, whole),
            DOMINO: partial(self._domino, halves),
            TICK_TOCK: partial(self._tick_tock, whole),
            HALVES: partial(self._accumulation, halves),
        }

    def clear(self) -> None:
        """Drop the gradients."""
        self.model.zero_grad()

    def step(
        self,
        name: str,
        recorder: StepRecorder | None = None,
        saved_tensors: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Compute the gradients of a step, and add them to the present ones.

        Args:
            name: Of the system.
            recorder: Learns of the passes.
            saved_tensors: Context of each forward pass.
        """
        self._runner.recorder, self._saved_tensors = recorder, saved_tensors
        self._steps[name]()

    def _accumulation(self, batches: list[_Batch]) -> None:
        for number in range(len(batches)):
            loss = self._runner.alone(self._forward(batches, number))
            self._runner.alone(self._backward(number, loss))

    def _in_phase(self, batches: list[_Batch]) -> None:
        for number in range(0, len(batches), 2):
            if number + 1 == len(batches):
                self._accumulation(batches[number:])
                return
            pair = number, number + 1
            losses = self._runner.pair(*(self._forward(batches, each) for each in pair))
            self._runner.pair(*map(self._backward, pair, losses))

    def _domino(self, halves: list[_Batch]) -> None:
        """Run pairs of halves; a layer sums its input's gradient, then computes its weight's."""

        def compute_weight_gradients() -> None:
            if "pair" in self._splitter.kept_bytes:
                self._splitter.backward_weight("pair")

        self._runner.while_waiting = compute_weight_gradients
        try:
            with self._splitter.step():
                for number in range(0, len(halves), 2):
                    pair = number, number + 1
                    losses = self._runner.pair(*(self._forward(halves, each) for each in pair))
                    with self._splitter.input_pass("pair"):
                        self._runner.pair(*map(self._backward, pair, losses))
                    compute_weight_gradients()
        finally:
            self._runner.while_waiting = None

    def _tick_tock(self, batches: list[_Batch]) -> None:
        loss = self._runner.alone(self._forward(batches, 0))
        for number in range(1, len(batches)):
            backward = self._backward(number - 1, loss)
            _, loss = self._runner.pair(backward, self._forward(batches, number))
        self._runner.alone(self._backward(len(batches) - 1, loss))

    def _forward(self, batches: list[_Batch], number: int) -> Pass:
        def forward() -> Tensor:
            with self._saved_tensors():
                return self.model(**batches[number]).loss / len(batches)

        return Pass(Kind.FORWARD, number, forward)

    def _backward(self, number: int, loss: Tensor) -> Pass:
        return Pass(Kind.BACKWARD, number, loss.backward)

    def gradients(self) -> list[Tensor]:
        """Return copies of the gradients, in the order of the model's weights."""
        return [
            weight.grad.clone() for weight in self.model.parameters() if weight.grad is not None
        ]


def check_gradients(name: str, own: list[Tensor], expected: list[Tensor]) -> bool:
    """Compare a system's gradients with accumulation's.

    Returns:
        Whether they are equal bit for bit.

    Raises:
        CommError: They differ by more than rounding, or tick-tock's at all.
    """
    equal = all(map(torch.equal, own, expected))
    gaps = [
        float((a - b).norm() / b.norm().clamp(min=1e-30))
        for a, b in zip(own, expected, strict=True)
    ]
    if max(gaps) > _TOLERANCE or (name == TICK_TOCK and not equal):
        reason = f"its gradients are off by {max(gaps):g} of their norm"
        raise CommError("system", name, reason, "Report this: its measurements mean nothing")
    return equal


def _build(request: WaveRequest) -> Any:
    """Return a Llama, or a Mixtral with two experts for each rank."""
    import transformers

    experts = {"num_local_experts": 2 * request.ranks, "num_experts_per_tok": 2}
    transformers.set_seed(SEED)
    config = transformers.AutoConfig.for_model(
        "llama" if request.llama else "mixtral",
        num_hidden_layers=request.layers,
        hidden_size=request.hidden,
        intermediate_size=request.hidden * (3 if request.llama else 1),
        num_attention_heads=request.heads,
        num_key_value_heads=request.heads,
        vocab_size=request.vocabulary,
        max_position_embeddings=request.sequence,
        **({} if request.llama else experts),
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def _put_to_sleep(model: nn.Module, waits: Waits) -> None:
    """Let layers that are split sleep in their passes, by their numbers of weights."""
    layers = [layer for layer in model.modules() if isinstance(layer, ParallelLinear)]
    total = sum(layer.weight.numel() for layer in layers)
    for layer in layers:
        own: Any = layer
        share = waits.share(layer.weight.numel() / total)
        own.local_product = sleeping(layer.local_product, layer.weight, share)


def _build_batches(request: WaveRequest, device: torch.device) -> list[_Batch]:
    generator = torch.Generator().manual_seed(SEED)
    shape = (request.micro_batches, request.batch, request.sequence)
    tokens = torch.randint(0, request.vocabulary, shape, generator=generator).to(device)
    return [_batch(part) for part in tokens]


def _batch(tokens: Tensor) -> _Batch:
    return {"input_ids": tokens, "labels": tokens}


class StepRecorder:
    """Records the passes of a step, and the waits for collectives between them.

    Attributes:
        events: In order; events of collectives are the waits for them.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []

    def now(self) -> float:
        """Return the time."""
        return time.perf_counter()

    def note(self, action: Action, start_s: float, end_s: float) -> None:
        """Add an event."""
        self.events.append(Event(action, start_s, end_s))

    @property
    def compute_s(self) -> float:
        """Seconds in passes."""
        return sum(e.end_s - e.start_s for e in self.events if e.action.kind in COMPUTE)

    @property
    def waiting_s(self) -> float:
        """Seconds in which only collectives ran."""
        return sum(e.end_s - e.start_s for e in self.events if e.action.kind in COLLECTIVES)


def median_seconds(events: Iterable[Event]) -> dict[tuple[Kind, int], float]:
    """Return the median times of the parts of passes, and of the waits, by kind and place."""
    seconds: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for action, start_s, end_s in events:
        seconds[action.kind, action.stage].append(end_s - start_s)
    return {place: median(seconds[place]) for place in sorted(seconds)}


# Of an Ethernet frame of 1514 bytes TCP carries 1448, and links count whole frames.
_FRAMING = 1514 / 1448
_LEAST_WIRE = 0.25
_SLICE_NS = 100_000
# sched_setattr(2) has no function in the C library. Its structure: size, policy, flags, nice,
# priority, runtime (the slice of ordinary threads since Linux 6.12), deadline, period.
_SYSCALL = {"x86_64": 314, "aarch64": 274}
_STRUCTURE = "=IIQiIQQQ"
_TRIALS = 2
_CLOSE = 0.02


class Sample(NamedTuple):
    """One step of one system.

    Args:
        seconds: Of the slowest rank.
        compute_s: In passes, mean over the ranks.
        waiting_s: In waiting for collectives, mean over the ranks.
    """

    seconds: float
    compute_s: float
    waiting_s: float


@dataclass(frozen=True)
class Setting:
    """The measurements over links of one speed.

    Args:
        exposed: Wanted percentage of exposed collectives in accumulation.
        mbit: Speed of the links; None for no limit.
        samples: All rounds of each system.
        costs: Of accumulation's passes and collectives.
    """

    exposed: int
    mbit: float | None
    samples: Mapping[str, Sequence[Sample]]
    costs: Costs


def _waiting_s(samples: Sequence[Sample]) -> float:
    return median(sample.waiting_s for sample in samples)


def exposed_share(samples: Sequence[Sample]) -> float:
    """Return the median share of the time in which only collectives run."""
    return median(sample.waiting_s / sample.seconds for sample in samples)


def measure(request: WaveRequest) -> dict[str, Any]:
    """Check gradients, count memory, and measure all systems at all shares.

    Raises:
        CommError: Gradients differ from accumulation's.
    """
    torch.set_num_threads(1)
    screen = Screen(rank=dist.get_rank())
    systems = Systems(request)
    screen.note("comparing gradients and memory")
    bitwise, peaks = _examine(systems)
    bench = _Bench(request, systems)
    split_loss = bench.median_compute(HALVES) / bench.compute_s - 1
    mbit = {percent: bench.find_speed(percent / 100) for percent in request.exposed}
    for percent, speed in mbit.items():
        if speed is not None:
            screen.note(f"{percent} % exposed: links of {speed:.0f} Mbit/s")
    samples: dict[int, dict[str, list[Sample]]] = {
        percent: {name: [] for name in SYSTEMS} for percent in mbit
    }
    events: dict[int, list[Event]] = {percent: [] for percent in mbit}
    last: dict[tuple[str, str], list[Event]] = {}
    turns = [(percent, name) for percent in mbit for name in SYSTEMS]
    for timed, (percent, name) in interleaved(request, turns, screen.note):
        bench.shape(mbit[percent])
        sample, noted = bench.step(name)
        last[f"{percent}-percent", f"{name}, {percent} % exposed"] = noted
        if timed:
            samples[percent][name].append(sample)
            events[percent] += noted if name == BASELINE else []
    if request.trace is not None:
        traces = {key: gather(noted) for key, noted in last.items()}
        if dist.get_rank() == 0:
            save_traces(request.trace, traces)
    settings = []
    for percent, speed in mbit.items():
        costs, num_segments = bench.costs(events[percent])
        settings.append(Setting(percent, speed, samples[percent], costs))
    return build_result(
        request,
        settings,
        num_segments=num_segments,
        split_loss=split_loss,
        peaks=peaks,
        bitwise=bitwise,
    )


def build_result(
    request: WaveRequest,
    settings: Sequence[Setting],
    *,
    num_segments: int,
    split_loss: float,
    peaks: Mapping[str, int],
    bitwise: Mapping[str, bool],
) -> dict[str, Any]:
    """Return the result without command and machine.

    Args:
        request: The options.
        settings: The measurements.
        num_segments: Of the model, with the head.
        split_loss: How much longer two halves of a micro-batch take than the whole.
        peaks: For each system, the most bytes that autograd kept.
        bitwise: Whether each system's gradients are accumulation's, bit for bit.
    """
    rows: list[dict[str, Any]] = []
    auto = []
    for setting in settings:
        prediction = predict(
            setting.costs, num_segments, request.micro_batches, split_loss=split_loss
        )
        models = {
            BASELINE: prediction.accumulation,
            IN_PHASE: prediction.in_phase,
            DOMINO: prediction.domino,
            TICK_TOCK: prediction.tick_tock,
        }
        before = setting.samples[BASELINE]
        exposed_s = _waiting_s(before)
        for name, samples in setting.samples.items():
            seconds = [sample.seconds for sample in samples]
            rows.append(
                {
                    "system": name,
                    "ranks": request.ranks,
                    "compute": request.compute,
                    "exposed": setting.exposed / 100,
                    "measured_exposed": exposed_share(before),
                    "mbit": setting.mbit,
                    "micro_batches": request.micro_batches,
                    **ratio_row(seconds, [sample.seconds for sample in before]),
                    "model": prediction.accumulation / models[name],
                    "waiting": exposed_share(samples),
                    "hidden": 1 - _waiting_s(samples) / exposed_s if exposed_s else None,
                    "compute_s": median(sample.compute_s for sample in samples),
                }
            )
        decision = decide(prediction)
        auto.append({"exposed": setting.exposed / 100, **decision._asdict()})
    return {
        "baseline": BASELINE,
        "request": request.model_dump(),
        "split_loss": split_loss,
        "rows": rows,
        "auto": auto,
        "memory": [
            {
                "system": name,
                "peak_bytes": peak,
                "of_accumulation": peak / peaks[BASELINE],
                "of_in_phase": peak / peaks[IN_PHASE],
                "bitwise": bitwise[name],
            }
            for name, peak in peaks.items()
        ],
    }


class _Bench:
    """Measures steps over links that start without a limit.

    Attributes:
        compute_s: Seconds in passes of an accumulation step.
    """

    def __init__(self, request: WaveRequest, systems: Systems) -> None:
        self._shaped = any(request.exposed)
        self._systems = systems
        count = request.micro_batches * systems.sums_per_micro_batch
        self._sent = sent_bytes(count * request.activation_bytes, request.ranks)
        self._mbit: float | None = None
        self.compute_s = self.median_compute(BASELINE)

    def find_speed(self, share: float) -> float | None:
        """Return the speed at which a share is exposed; one trial corrects it."""
        if not share:
            return None
        mbit = link_mbit(share, self.compute_s, self._sent)
        self.shape(mbit)
        trials = [self.step(BASELINE)[0] for _ in range(_TRIALS)]
        if abs(exposed_share(trials) - share) <= _CLOSE:
            return mbit
        compute_s = median(trial.compute_s for trial in trials)
        waiting_s = median(trial.waiting_s for trial in trials)
        return adjusted_mbit(mbit, share, self._sent, compute_s=compute_s, waiting_s=waiting_s)

    def costs(self, events: list[Event]) -> tuple[Costs, int]:
        """Return what accumulation's segments cost, mean over the ranks, and how many there are."""
        medians = median_seconds(events)
        seconds = _mean(torch.tensor(list(medians.values()))).tolist()
        return costs_of_segments(dict(zip(medians, seconds, strict=True)))

    def shape(self, mbit: float | None) -> None:
        """Set the links' speed."""
        if not self._shaped or mbit == self._mbit:
            return
        dist.barrier()
        if dist.get_rank() == 0:
            ask(mbit)
        dist.barrier()
        self._mbit = mbit

    def median_compute(self, name: str) -> float:
        """Return the seconds in passes of a system's step."""
        return median(self.step(name)[0].compute_s for _ in range(_TRIALS))

    def step(self, name: str) -> tuple[Sample, list[Event]]:
        """Run a step from a barrier to the end of the slowest rank; return this rank's events."""
        recorder = StepRecorder()
        self._systems.clear()
        dist.barrier()
        started = time.perf_counter()
        self._systems.step(name, recorder)
        slowest = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        parts = _mean(torch.tensor([recorder.compute_s, recorder.waiting_s])).tolist()
        return Sample(float(slowest), *parts), recorder.events


def _mean(values: Tensor) -> Tensor:
    """Return the mean over the ranks."""
    total = values.double()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def _examine(systems: Systems) -> tuple[dict[str, bool], dict[str, int]]:
    """Run a step of each system; return whether gradients are bit-identical, and peak bytes."""
    bitwise, peaks = {}, {}
    expected = None
    for name in SYSTEMS:  # the first one is the baseline
        counted = SavedBytes(systems.model)
        systems.clear()
        systems.step(name, saved_tensors=counted.hooks)
        own = systems.gradients()
        expected = own if expected is None else expected
        bitwise[name], peaks[name] = check_gradients(name, own, expected), counted.peak
    return bitwise, peaks


def sent_bytes(payload_bytes: float, ranks: int) -> float:
    """Return the bytes that each rank sends, and receives, to sum a tensor around a ring."""
    return 2 * (ranks - 1) / ranks * payload_bytes


def link_mbit(share: float, compute_s: float, sent: float) -> float:
    """Return the speed at which messages take a share of a step without any overlap.

    Args:
        share: Of the step, above 0 and below 1: for segments of ``f`` forward, ``2f`` backward and
            ``c`` for a collective in each direction it is ``2c / (3f + 2c)``.
        compute_s: Seconds of the step's passes.
        sent: Bytes that a rank sends in the step.

    Returns:
        Mbit/s, of whole frames.
    """
    return _mbit(sent, compute_s * share / (1 - share))


def adjusted_mbit(
    mbit: float, share: float, sent: float, *, compute_s: float, waiting_s: float
) -> float:
    """Return a speed that is nearer to a share, from a measurement at another speed.

    The time of messages beyond the wire's own is assumed to be the same at each speed.

    Args:
        mbit: Speed of the measurement.
        share: The wanted share.
        sent: Bytes that a rank sends in the step.
        compute_s: Measured seconds of the step's passes.
        waiting_s: Measured seconds of its collectives.
    """
    wire_s = 8 * _FRAMING * sent / (mbit * 1e6)
    wanted_s = wire_s + compute_s * share / (1 - share) - waiting_s
    return _mbit(sent, max(wanted_s, _LEAST_WIRE * wire_s))


def _mbit(sent: float, seconds: float) -> float:
    return 8 * _FRAMING * sent / seconds / 1e6


def ask_for_short_slices() -> bool:
    """Ask the scheduler for slices of 0.1 ms for this thread and its future children.

    While a peer's data are there before this rank asks for them, gloo's network thread does not
    sleep. On few cores the asking threads then wait for the next tick of the clock, up to 4 ms at
    250 Hz. A thread with a short slice runs as soon as it wakes up.

    Returns:
        Whether the kernel has accepted it; older kernels accept it without effect.
    """
    number = _SYSCALL.get(platform.machine())
    if number is None or platform.system() != "Linux":
        return False
    size = struct.calcsize(_STRUCTURE)
    attributes = struct.pack(_STRUCTURE, size, 0, 0, 0, 0, _SLICE_NS, 0, 0)
    return ctypes.CDLL(None).syscall(number, 0, ctypes.c_char_p(attributes), 0) == 0
