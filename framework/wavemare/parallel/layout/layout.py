# SPDX-License-Identifier: Apache-2.0
"""How one training job is laid out on its devices: stages, splits, replicas and their shares.

Plain data, equal on all ranks; it is made, read and compared without torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import groupby, pairwise
from typing import Any

from wavemare.errors import PlanError, check_number, did_you_mean
from wavemare.files import parse_json
from wavemare.pipeline.plan.schedules import TRAINED

VERSION = 1
_GIB = 2**30
_MS_PER_S = 1e3
_ZERO_STAGES = (0, 1, 2, 3)
_LATER: Mapping[str, Any] = {"replica_cuts": None, "slack": 0, "expert_parallel": 1}
"""Keys that files of earlier versions lack, and their values there."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a layout is expected to do.

    Args:
        step_s: An optimizer step, in seconds.
        tokens_per_s: Of the whole job.
        stage_s: For each stage its slowest replica's seconds for one micro-batch, forward and
            backward.
        rank_s: For each data-parallel rank its seconds of one step before the gradients are
            reduced.
        memory_bytes: For each rank the most that it needs; empty where nobody has counted.

    Raises:
        PlanError: A number is negative or not finite.
    """

    step_s: float
    tokens_per_s: float
    stage_s: tuple[float, ...]
    rank_s: tuple[float, ...]
    memory_bytes: tuple[float, ...]

    def __post_init__(self) -> None:
        for field in fields(self):
            key, value = f"predicted.{field.name}", getattr(self, field.name)
            several = isinstance(value, tuple)
            if several == (field.type == "float"):
                reason = "it is a list" if several else "it is no list of numbers"
                raise PlanError(key, value, reason, "Make the layout again")
            for number in value if several else (value,):
                check_number(PlanError, key, number)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout of ranks, and what each of them trains on.

    Rank ``(stage * data_parallel + replica) * tensor_parallel + part`` holds that part of a stage
    of a replica: DeepSpeed's order of the axes pipe, data, model.

    Args:
        stages: Pipeline stages, P.
        tensor_parallel: Ranks that share each layer, T.
        data_parallel: Replicas, D.
        cuts: P + 1 bounds, from 0 to ``num_layers``: stage ``s`` holds the layers
            ``[cuts[s], cuts[s + 1])`` of the chain of `wavemare.models.to_pipeline`. None with one
            stage.
        replica_cuts: For each replica such bounds, where replicas are cut at layers of their own;
            ``cuts`` are then those of the first one. With ZeRO 0 and schedules that empty the
            pipeline. None where all are cut alike.
        num_layers: Length of that chain; None where nothing is cut.
        schedule: ``1f1b``, ``zb-h1`` or ``pipemare``.
        slack: With 1F1B and PipeMare: how many micro-batches more each stage runs ahead of the next
            one.
        expert_parallel: Ranks that share the experts of each layer, of a stage's
            ``data_parallel * tensor_parallel``.
        wavelet: Whether waves hide tensor-parallel sums, by ``wavelet.mode`` "auto"; with one
            stage.
        zero_stage: ZeRO stage, 0 to 3; 0 or 1 with several stages.
        recompute: Whether activations are computed again in the backward pass.
        global_batch: Samples of one optimizer step.
        micro_steps: Micro-batches of one optimizer step on each rank.
        shares: For each replica its samples in one micro-step.
        order: ``order[rank]`` is the index of the device, in the cluster's description, that runs
            the rank; None: as they come. Devices that it leaves out do nothing.
        predicted: What the planner expects; it is no part of the layout's identity.

    Raises:
        PlanError: The numbers do not fit each other.
    """

    global_batch: int
    shares: tuple[int, ...]
    stages: int = 1
    tensor_parallel: int = 1
    data_parallel: int = 1
    cuts: tuple[int, ...] | None = None
    num_layers: int | None = None
    schedule: str = "1f1b"
    wavelet: bool = False
    zero_stage: int = 0
    recompute: bool = False
    micro_steps: int = 1
    order: tuple[int, ...] | None = None
    predicted: Prediction | None = None
    replica_cuts: tuple[tuple[int, ...], ...] | None = None
    slack: int = 0
    expert_parallel: int = 1

    def __post_init__(self) -> None:
        _check_layout(self)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.stages * self.tensor_parallel * self.data_parallel

    @property
    def balanced(self) -> bool:
        """Whether all replicas have the same share."""
        return len(set(self.shares)) == 1

    @property
    def micro_batch(self) -> int:
        """Mean samples of a replica in one micro-step: what DeepSpeed is told."""
        return sum(self.shares) // self.data_parallel

    @property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of everything but the prediction."""
        values = self._values()
        del values["predicted"]
        # Digests in checkpoints of earlier versions count this removed key, and no later ones.
        values["colocated"] = []
        for name, default in _LATER.items():
            if values[name] == default:
                del values[name]
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> str:
        """Return the layout as JSON text."""
        return json.dumps(self._values(), indent=2) + "\n"

    def _values(self) -> dict[str, Any]:
        # By way of JSON, so that tuples are the lists that a reader will find.
        return {"version": VERSION, **json.loads(json.dumps(asdict(self)))}

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """Read what `to_json` wrote.

        Raises:
            PlanError: The text is no JSON mapping, of another version, has an unknown key, lacks
                one, or a value is of the wrong kind.
        """
        remedy = "Give the file of 'wavemare layout search --output', or layout.json of a run"
        if text.startswith("plan "):
            reason = "it is the plan of a schedule, the order of its passes"
            raise PlanError(
                "layout", text[:40], reason, f'{remedy}; "schedule": "file:PATH" takes it'
            )
        try:
            values = parse_json(text)
        except ValueError as error:
            raise PlanError("layout", text[:40], str(error), remedy) from error
        if not isinstance(values, dict):
            raise PlanError("layout", text[:40], "it is no mapping", remedy)
        if "plans" in values and "cluster" in values:
            raise PlanError(
                "layout", text[:40], "it holds several layouts, with their cluster", remedy
            )
        version = values.pop("version", None)
        if version != VERSION or isinstance(version, bool):
            reason = f"this program reads version {VERSION}"
            raise PlanError("version", version, reason, "Make the layout again")
        values = {**_LATER, **values}
        if isinstance(values["replica_cuts"], list):
            rows = values["replica_cuts"]
            values["replica_cuts"] = [tuple(r) if isinstance(r, list) else r for r in rows]
        predicted = values.pop("predicted", None)
        if predicted is not None:
            predicted = Prediction(**_arguments(Prediction, predicted, "predicted."))
        return cls(**_arguments(cls, values, "", {"predicted"}), predicted=predicted)

    def configure(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a DeepSpeed configuration that runs the layout.

        Keys that the layout decides are replaced. A layout without waves leaves their keys alone.
        ``recompute`` of one stage is done by the model's own gradient checkpointing, and ``order``
        by the launcher.

        Args:
            config: The other settings, with or without a section "wavemare".
        """
        section = dict(config.get("wavemare", {}))
        section["pipeline"] = self._pipeline(section.get("pipeline", {}))
        section["tensor_parallel"] = {"size": self.tensor_parallel}
        if self.expert_parallel > 1:
            section["expert_parallel"] = {"size": self.expert_parallel}
        if self.wavelet:
            section["wavelet"] = {**section.get("wavelet", {}), "mode": "auto"}
        balance = section.pop("balance", {})
        kept = dict(balance) if isinstance(balance, Mapping) else {}
        kept.pop("shares", None)
        if not self.balanced:
            kept["shares"] = list(self.shares)
        if kept:
            section["balance"] = kept
        zero = config.get("zero_optimization", {})
        zero = {**(zero if isinstance(zero, Mapping) else {}), "stage": self.zero_stage}
        result = {
            **config,
            "train_batch_size": self.global_batch,
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.micro_steps,
            "zero_optimization": zero,
            "wavemare": section,
        }
        if self.stages > 1 and self.recompute:
            theirs = dict(config.get("pipeline", {}))
            if not theirs.get("activation_checkpoint_interval"):
                theirs["activation_checkpoint_interval"] = 1
            result["pipeline"] = theirs
        return result

    def _pipeline(self, given: Mapping[str, Any]) -> dict[str, Any]:
        section = {**given, "stages": self.stages, "schedule": self.schedule}
        for name in ("partition", "slack"):
            section.pop(name, None)
        if self.replica_cuts is not None:
            section["partition"] = [list(bounds[:-1]) for bounds in self.replica_cuts]
        elif self.cuts is not None:
            section["partition"] = list(self.cuts[:-1])
        if self.slack and self.schedule == "pipemare":
            section["pipemare"] = {**section.get("pipemare", {}), "slack": self.slack}
        elif self.slack:
            section["slack"] = self.slack
        return section

    def __str__(self) -> str:
        splits = f"{self.stages} stages x {self.tensor_parallel} splits"
        lines = [
            f"layout {self.digest[:12]}: {splits} x {self.data_parallel} replicas = "
            f"{self.world_size} ranks",
            f"  schedule       {self.schedule}{f', slack {self.slack}' if self.slack else ''}"
            f"{', waves' if self.wavelet else ''}",
            f"  memory         ZeRO {self.zero_stage}, "
            f"activations {'recomputed' if self.recompute else 'kept'}",
            f"  batch          {self.global_batch} = {self.micro_steps} x {_sum(self.shares)}",
        ]
        if self.expert_parallel > 1:
            lines.append(f"  experts        over {self.expert_parallel} ranks")
        if self.cuts is not None:
            rows = self.replica_cuts or (self.cuts,)
            text = " | ".join(",".join(map(str, bounds)) for bounds in rows)
            lines.append(f"  cuts           {text}")
        if self.order is not None:
            lines.append(f"  devices        {','.join(map(str, self.order))}")
        return "\n".join(lines + (_predicted_lines(self.predicted) if self.predicted else []))


def _sum(shares: tuple[int, ...]) -> str:
    """Return ``4x20 + 4x12`` for shares that come in runs."""
    text = " + ".join(f"{len(list(run))}x{share}" for share, run in groupby(shares))
    return f"({text})"


def _predicted_lines(predicted: Prediction) -> list[str]:
    stages = ", ".join(f"{seconds * _MS_PER_S:.3g}" for seconds in predicted.stage_s)
    most = max(predicted.memory_bytes, default=0.0) / _GIB
    return [
        f"  predicted      {predicted.tokens_per_s:,.0f} tokens/s, "
        f"{predicted.step_s * _MS_PER_S:.4g} ms a step",
        f"  stages         {stages} ms a micro-batch",
        *([f"  most memory    {most:.2f} GiB"] if predicted.memory_bytes else []),
    ]


def _arguments(
    kind: type, values: Any, prefix: str, apart: frozenset[str] | set[str] = frozenset()
) -> dict[str, Any]:
    """Return the arguments of a dataclass from parsed JSON: lists as tuples, no unknown key."""
    if not isinstance(values, dict):
        raise PlanError(prefix.rstrip("."), values, "it is no mapping", "Give what to_json wrote")
    names = {field.name for field in fields(kind)} - apart
    for name in values:
        if name not in names:
            reason = "a layout has no such key"
            key = f"{prefix}{name if name.strip() else repr(name)}"
            raise PlanError(key, values[name], reason, did_you_mean(name, names))
    for name in sorted(names - values.keys()):
        raise PlanError(f"{prefix}{name}", None, "the key is missing", "Give what to_json wrote")
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }


# --- what the numbers must have in common ---------------------------------------------------------


def _check_layout(layout: Layout) -> None:
    """Check a layout.

    Raises:
        PlanError: Naming the number that cannot be, the reason and the remedy.
    """
    for name in ("global_batch", "stages", "tensor_parallel", "data_parallel", "micro_steps"):
        check_number(PlanError, name, getattr(layout, name), 1, whole=True)
    check_number(PlanError, "slack", layout.slack, whole=True)
    check_number(PlanError, "expert_parallel", layout.expert_parallel, 1, whole=True)
    if layout.num_layers is not None:
        check_number(PlanError, "num_layers", layout.num_layers, 1, whole=True)
    for name, least in (("shares", 1), ("cuts", 0), ("order", 0)):
        numbers = getattr(layout, name)
        if not isinstance(numbers, tuple) and (numbers is not None or name == "shares"):
            raise PlanError(name, numbers, "it is no tuple of whole numbers", "Give a tuple")
        for place, number in enumerate(numbers or ()):
            check_number(PlanError, f"{name}[{place}]", number, least, whole=True)
    for check in (_choices, _batch, _cuts, _experts, _replica_cuts, _memory, _order):
        for name, reason, remedy in check(layout):
            raise PlanError(name, getattr(layout, name), reason, remedy)


_Refusals = Iterator[tuple[str, str, str]]
"""Names of values that cannot be, the reasons and the remedies."""


def _choices(layout: Layout) -> _Refusals:
    if layout.slack and (layout.schedule not in ("1f1b", "pipemare") or layout.stages == 1):
        yield "slack", "it is an option of 1F1B and PipeMare with several stages", "Give 0"
    for name in ("wavelet", "recompute"):
        if not isinstance(getattr(layout, name), bool):
            yield name, "it is neither true nor false", "Give one of the two"
    if layout.schedule not in TRAINED:
        yield "schedule", "there is no such schedule", did_you_mean(str(layout.schedule), TRAINED)
    elif layout.stages > 1 and layout.schedule in ("interleaved", "zbv", "auto"):
        reason = "it puts several stages on each rank, and a layout puts one there"
        remedy = "Use 1f1b, zb-h1 or pipemare, or leave out annotations, layout and --balance"
        yield "schedule", reason, remedy
    zero = layout.zero_stage
    if zero not in _ZERO_STAGES or not isinstance(zero, int) or isinstance(zero, bool):
        yield "zero_stage", "there is no such stage of ZeRO", "Give 0, 1, 2 or 3"


def _batch(layout: Layout) -> _Refusals:
    count, replicas, samples = len(layout.shares), layout.data_parallel, sum(layout.shares)
    if count != replicas:
        yield "shares", f"there are {count} of them for {replicas} replicas", f"Give {replicas}"
    if samples * layout.micro_steps != layout.global_batch:
        reason = (
            f"{layout.micro_steps} micro-steps of {samples} samples are not {layout.global_batch}"
        )
        yield "shares", reason, "Make the products equal"
    if samples % replicas:
        reason = f"the mean share, {samples} / {replicas}, which DeepSpeed needs, is not whole"
        yield "shares", reason, f"Give shares whose sum is a multiple of {replicas}"


def _cuts(layout: Layout) -> _Refusals:
    if layout.cuts is None:
        if layout.stages > 1:
            yield "cuts", f"{layout.stages} stages need it", f"Give {layout.stages + 1} bounds"
        return
    if layout.stages == 1:
        yield "cuts", "one stage is not cut", "Leave it out"
    yield from _bounds(layout, "cuts", layout.cuts)


def _bounds(layout: Layout, name: str, cuts: tuple[int, ...]) -> _Refusals:
    stages = layout.stages
    if len(cuts) != stages + 1:
        yield name, f"there are {len(cuts)} bounds for {stages} stages", f"Give {stages + 1}"
    if cuts[0] != 0 or cuts[-1] != layout.num_layers:
        reason = f"they do not lead from 0 to num_layers ({layout.num_layers})"
        yield name, reason, "Begin with 0 and end with the number of layers"
    if any(right <= left for left, right in pairwise(cuts)):
        yield name, "a stage is empty", "Give bounds that increase"


def _replica_cuts(layout: Layout) -> _Refusals:
    rows, name = layout.replica_cuts, "replica_cuts"
    if rows is None:
        return
    whole = isinstance(rows, tuple) and all(
        isinstance(row, tuple) and row and all(type(bound) is int for bound in row) for row in rows
    )
    if not whole:
        yield name, "it is no tuple of tuples of whole numbers", "Give the bounds of each replica"
    if len(rows) != layout.data_parallel:
        reason = f"there are {len(rows)} of them for {layout.data_parallel} replicas"
        yield name, reason, f"Give {layout.data_parallel}"
    if rows[0] != layout.cuts:
        yield name, "the first replica's are not cuts", "Give cuts those of the first replica"
    for row in rows:
        yield from _bounds(layout, name, row)
    if layout.zero_stage or layout.schedule == "pipemare" or layout.expert_parallel > 1:
        reason = "replicas that are cut apart divide neither states nor experts, and step together"
        yield name, reason, "Use ZeRO 0, no divided experts, and 1f1b or zb-h1; or one cut for all"


def _experts(layout: Layout) -> _Refusals:
    ranks, size = layout.data_parallel * layout.tensor_parallel, layout.expert_parallel
    if ranks % size or size % layout.tensor_parallel > 0 < size - 1:
        reason = f"a stage has {ranks} ranks, of which {layout.tensor_parallel} share each layer"
        remedy = f"Give a multiple of {layout.tensor_parallel} that divides {ranks}"
        yield "expert_parallel", reason, remedy
    if size > 1 and not layout.balanced:
        yield "expert_parallel", "divided experts go with equal shares", "Give equal shares"
    if size > 1 and layout.zero_stage == _ZERO_STAGES[-1]:
        yield "expert_parallel", "ZeRO 3 divides experts, too", "Give ZeRO 0, 1 or 2"


def _memory(layout: Layout) -> _Refusals:
    if (layout.stages > 1 or layout.schedule == "pipemare") and layout.zero_stage > 1:
        reason = "gradients or weights that ZeRO partitions cannot stay for a pipeline"
        yield "zero_stage", reason, "Give 0 or 1"
    if layout.wavelet and layout.stages > 1:
        reason = "stages interleave their micro-batches already"
        yield "wavelet", reason, "Give false"
    if layout.wavelet and layout.stages == 1 and not layout.balanced:
        reason = "waves scale the losses of micro-batches that are alike on all ranks"
        yield "wavelet", reason, "Give false, or equal shares"


def _order(layout: Layout) -> _Refusals:
    order, ranks = layout.order, layout.world_size
    if order is not None and len(order) != ranks:
        reason = f"it names {len(order)} devices for {ranks} ranks"
        yield "order", reason, "Name one device for each rank"
    if order is not None and len(set(order)) != len(order):
        yield "order", "a device runs two ranks", "Name each device once"
