# SPDX-License-Identifier: Apache-2.0
"""``find_layouts``: every legal way to lay a job out on given devices, the promising ones first."""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from wavemare.errors import ModelError, PlanError, did_you_mean
from wavemare.files import read_json
from wavemare.parallel.layout.layout import Layout, Prediction
from wavemare.parallel.planner.cluster import Cluster, read_cluster
from wavemare.parallel.planner.model import ModelCosts, model_costs
from wavemare.parallel.planner.predict import Candidate, Scene, Settings, Variant
from wavemare.parallel.planner.proposals import (
    equal_layouts,
    units_by_type,
    unlike_layouts,
    variants,
    whole_micro_steps,
)
from wavemare.parallel.planner.refine import pools, refined

_GIB = 2**30
_WEIGHTS = 3  # the ZeRO stage that divides them
_HEADER = ("layout", "P", "T", "D", "steps", "shares", "ZeRO", "other", "tokens/s", "gain", "GiB")


def _gpt2(width: int, blocks: int, heads: int) -> dict[str, Any]:
    sizes = {"n_embd": width, "n_layer": blocks, "n_head": heads}
    return {"model_type": "gpt2", "n_positions": 1024, "vocab_size": 50257, **sizes}


def _bert(width: int, blocks: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "bert",
        "hidden_size": width,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "vocab_size": 30522,
    }


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "bert-base": _bert(768, 12, 12),
    "bert-large": _bert(1024, 24, 16),
}
"""Configurations of the published models, by name."""


def find_layouts(
    model: Any,
    cluster: str | Path | Cluster,
    *,
    global_batch: int,
    sequence_length: int,
    dtype: str | None = None,
    head: str | None = None,
    **settings: Any,
) -> LayoutSearch:
    """Find the fastest layouts of a training job on given devices, by prediction.

    Args:
        model: A transformers model or configuration, the content or the path of a ``config.json``,
            a name of `PRESETS`, or `ModelCosts`, whose sequence and dtype then hold.
        cluster: A `Cluster`, its file, or a text such as ``8xV100,8xP100``.
        global_batch: Samples of one optimizer step.
        sequence_length: Tokens of a sample.
        dtype: fp32, fp16 or bf16; that of the model's configuration if omitted, or else fp32.
        head: Class of the model where the configuration does not tell.
        settings: Others of `Settings`.

    Raises:
        ModelError: The planner does not know the model's layers.
        PlanError: The cluster or a setting cannot be used, or nothing fits into memory.
    """
    costs = model
    if not isinstance(costs, ModelCosts):
        known = type(model).__name__ if hasattr(model, "config") else None
        config = getattr(model, "config", model)
        if isinstance(config, str | Path):
            config = read_model(config)
        costs = model_costs(config, sequence_length, dtype=dtype, head=head or known)
    names = [field.name for field in fields(Settings)]
    for name, value in settings.items():
        if name not in names:
            raise PlanError(name, value, "there is no such setting", did_you_mean(name, names))
    chosen = Settings(global_batch=global_batch, **settings)
    return search_layouts(costs, read_cluster(cluster, costs.dtype), chosen)


def read_model(source: str | Path) -> Mapping[str, Any]:
    """Return a model's configuration from a preset's name or a file.

    Raises:
        ModelError: It is neither, or the file is no JSON mapping.
    """
    if str(source) in PRESETS:
        return PRESETS[str(source)]
    file = Path(source)
    if os.path.isdir(file):
        file = file / "config.json"
    elif not os.path.exists(file):
        reason = "it is neither a file nor the name of a preset"
        raise ModelError("--model", str(source), reason, did_you_mean(str(source), PRESETS))
    values = read_json(file, ModelError, "--model", "Name a config.json")
    if not isinstance(values, dict):
        raise ModelError("--model", str(source), "it is no mapping", "Name a config.json")
    return values


def search_layouts(costs: ModelCosts, cluster: Cluster, settings: Settings) -> LayoutSearch:
    """Return the best layouts and the best one with equal cuts and shares.

    Candidates are taken in the order of a lower bound of their step time, until the bound says that
    no other one can be among the best. Of each way to use the axes only the best layout is kept, so
    that the five do not differ in details alone.

    Args:
        costs: Of the model's layers.
        cluster: The devices and the links between them.
        settings: Batch, limits and assumptions.

    Raises:
        PlanError: No layout fits into the devices' memory, or the batch cannot be divided.
    """
    scenes = [
        Scene(costs, cluster.of_devices(pool), settings, pool)
        for pool in pools(cluster, leave_out=settings.leave_out)
    ]
    whole = scenes[0]
    candidates = sorted(chain.from_iterable(map(_candidates, scenes)), key=lambda entry: entry[0])
    if not candidates:
        reason = f"no layout of {len(cluster.devices)} devices gets whole samples of it"
        raise PlanError("global_batch", settings.global_batch, reason, "Give a multiple of them")
    best: _Best = {}
    equal: tuple[Candidate, Prediction] | None = None
    for bound_s, scene, variant, micro_steps in candidates:
        key = (variant.stages, variant.tensor_parallel, variant.schedule, variant.experts > 1)
        leaders = heapq.nsmallest(settings.keep, (entry[0] for entry in best.values()))
        full = len(leaders) == settings.keep and bound_s > leaders[-1]
        known = key in best and bound_s > best[key][0]
        if scene is whole and (equal is None or bound_s < equal[1].step_s):
            for layout in equal_layouts(scene, variant, micro_steps):
                predicted = scene.predict(layout, roughly=True)
                plain = variant.schedule == "1f1b" and variant.experts == 1
                if plain and predicted and (equal is None or predicted.step_s < equal[1].step_s):
                    equal = layout, predicted
                _keep(best, key, scene, layout, predicted)
        if full or known:
            continue
        limit_s = best[key][0] if key in best else float("inf")
        if len(leaders) == settings.keep:
            limit_s = min(limit_s, leaders[-1])
        for layout in unlike_layouts(scene, variant, micro_steps, limit_s):
            _keep(best, key, scene, layout, scene.predict(layout, roughly=True))
    if not best:
        raise _nothing_fits(whole)
    if equal is not None:
        equal = equal[0], whole.predict(equal[0]) or equal[1]
    exact = [(own, each, own.predict(each) or p) for _, own, each, p in best.values()]
    exact.sort(key=lambda entry: entry[2].step_s)
    found = [(own, *refined(own, each, p)) for own, each, p in exact[: settings.keep]]
    found.sort(key=lambda entry: entry[2].step_s)
    limit = equal[1].step_s if equal else float("inf")
    layouts = tuple(own.layout(each, p) for own, each, p in found if p.step_s <= limit)
    return LayoutSearch(
        layouts=layouts,
        equal=whole.layout(*equal) if equal else None,
        costs=costs,
        cluster=cluster,
        notes=tuple(_notes(whole, layouts, slower=len(best) - len(layouts))),
    )


_Best = dict[tuple[object, ...], tuple[float, Scene, Candidate, Prediction]]


def _keep(
    best: _Best,
    key: tuple[object, ...],
    scene: Scene,
    layout: Candidate,
    predicted: Prediction | None,
) -> None:
    if predicted and (key not in best or predicted.step_s < best[key][0]):
        best[key] = predicted.step_s, scene, layout, predicted


def _notes(scene: Scene, layouts: Sequence[Layout], *, slower: int) -> Iterator[str]:
    """Yield what was assumed, and why the table lacks what a reader may look for."""
    costs, settings = scene.costs, scene.settings
    yield f"dtype: {costs.dtype}, {costs.dtype_from}"
    for text in scene.cluster.assumed:
        yield f"assumed: {text}"
    if slower > 0:
        yield f"other P, T and schedules that were predicted to be slower than these rows: {slower}"
    if not any(layout.tensor_parallel > 1 for layout in layouts):
        yield f"no layer is shared by ranks: {_why_whole(scene)}"
    if settings.zero_stages != (0,) and not any(
        layout.zero_stage == _WEIGHTS for layout in layouts
    ):
        yield "ZeRO 3 is in no row: it gathers weights in each micro-batch, and memory suffices"
    if len(scene.cluster.types) > 1 and costs.dtype != "fp32":
        yield "replicas have one cut: those of their own need fp32 (torch_autocast goes with it)"


def _why_whole(scene: Scene) -> str:
    """Return why no row has tensor parallelism."""
    costs, most = scene.costs, scene.settings.max_tensor_parallel
    devices = len(scene.cluster.devices)
    sizes = [n for n in range(2, min(most, devices) + 1) if devices % n == 0]
    if not costs.widths:
        return "the engine does not split this model"
    if not any(units_by_type(scene, n) for n in sizes):
        return "no two devices of one type are in one node, or their number does not come out even"
    if not any(costs.splits(n) for n in sizes):
        widths = ", ".join(map(str, costs.widths))
        return f"its heads, key heads and inner width ({widths}) are no multiples of {sizes}"
    return "the sums of each block take longer than they save"


def _candidates(scene: Scene) -> Iterator[tuple[float, Scene, Variant, int]]:
    """Yield variants and micro-steps with a lower bound of their step time.

    For a replica with the share b, rates r and work W per sample: its slowest stage takes at least
    ``b W / sum(r)``, all its stages together ``b W / max(r)``; and some replica has at least its
    part of the samples by its rate. Messages and sums are left out.
    """
    rates = [device.rate for device in scene.cluster.devices]
    for variant in variants(scene):
        work = scene.times(variant).work * variant.tensor_parallel
        through = sum(rates) / variant.data_parallel / variant.tensor_parallel / max(rates)
        for micro_steps in whole_micro_steps(scene, variant.data_parallel):
            passes = float(micro_steps)
            if variant.drains:
                passes = micro_steps - 1 + through
            samples = scene.settings.global_batch / micro_steps
            yield samples * work / sum(rates) * passes, scene, variant, micro_steps


def _nothing_fits(scene: Scene) -> PlanError:
    """Return the error of a search whose every layout is above the memory of some device."""
    devices, least = scene.cluster.devices, float("inf")
    for variant in variants(scene):
        for micro_steps in whole_micro_steps(scene, variant.data_parallel):
            share = scene.settings.global_batch // micro_steps // variant.data_parallel
            memory, bounds = scene.memory(variant), scene.equal_cuts(variant.stages)
            in_flight = variant.in_flight(micro_steps)
            sizes = (
                memory.needed(first, end, kept, share)
                for (first, end), kept in zip(pairwise(bounds), in_flight, strict=True)
            )
            least = min(least, max(sizes) / (1 - scene.settings.margin))
    usable = min(map(scene.usable, range(len(devices))))
    needs = f"; {least / _GIB:.2f} GiB on each would do" if least < float("inf") else ""
    return PlanError(
        "--cluster",
        ", ".join(f"{scene.kind_of.count(k)}x{name}" for k, name in enumerate(scene.cluster.types)),
        f"no layout of {scene.costs.name} fits into {usable / _GIB:.2f} GiB, what the smallest "
        f"device has within the margin{needs}",
        "Use more or larger devices, a smaller global batch or a shorter sequence",
    )


@dataclass(frozen=True, kw_only=True)
class LayoutSearch:
    """Layouts by predicted tokens per second.

    Args:
        layouts: The best ones, none of which is slower than `equal`.
        equal: The best layout with devices as they come, equal shares and cuts into equal work;
            None where none fits into memory.
        costs: Of the model.
        cluster: The devices.
        notes: What was assumed, and why there are no other layouts, in lines.
    """

    layouts: tuple[Layout, ...]
    equal: Layout | None
    costs: ModelCosts
    cluster: Cluster
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Layout:
        """The layout with the most predicted tokens per second."""
        return self.layouts[0]

    @property
    def gain(self) -> float | None:
        """Predicted speedup of the best layout over the equal one."""
        return None if self.equal is None else _speed(self.best) / _speed(self.equal)

    def to_json(self) -> str:
        """Return the layouts, the equal one and the cluster as JSON text."""
        values: dict[str, Any] = {
            "plans": [json.loads(layout.to_json()) for layout in self.layouts],
            "equal": None if self.equal is None else json.loads(self.equal.to_json()),
            "cluster": json.loads(self.cluster.to_json()),
            "notes": list(self.notes),
        }
        return json.dumps(values, indent=2) + "\n"

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [_HEADER]
        rows += [self._row(str(place), layout) for place, layout in enumerate(self.layouts, 1)]
        if self.equal is not None:
            rows.append(self._row("equal", self.equal))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        if self.equal is None:
            lines.append("equal parts do not fit into the devices' memory")
        types = self.cluster.types
        devices = ", ".join(
            f"{sum(d.type == name for d in self.cluster.devices)}x{name}" for name in types
        )
        title = f"{self.costs.name}, {self.costs.parameters / 1e6:.1f} M parameters, on {devices}"
        return "\n".join([title, *lines, "", str(self.best), "", *self.notes])

    def _row(self, name: str, layout: Layout) -> tuple[str, ...]:
        predicted = layout.predicted
        assert predicted is not None, "layouts of a search have predictions"
        marks = ["recompute"] * layout.recompute
        marks += [layout.schedule] * (layout.schedule != "1f1b")
        marks += [f"slack={layout.slack}"] * (layout.slack > 0)
        marks += ["own-cuts"] * (layout.replica_cuts is not None)
        marks += [f"experts/{layout.expert_parallel}"] * (layout.expert_parallel > 1)
        unused = len(self.cluster.devices) - layout.world_size
        marks += [f"{unused}-unused"] * (unused > 0)
        gain = "" if self.equal is None else f"{_speed(layout) / _speed(self.equal):.3f}"
        return (
            name,
            str(layout.stages),
            str(layout.tensor_parallel),
            str(layout.data_parallel),
            str(layout.micro_steps),
            "/".join(map(str, sorted(set(layout.shares), reverse=True))),
            str(layout.zero_stage),
            " ".join(marks) or "-",
            f"{predicted.tokens_per_s:,.0f}",
            gain,
            f"{max(predicted.memory_bytes) / _GIB:.2f}",
        )


def _speed(layout: Layout) -> float:
    assert layout.predicted is not None, "layouts of a search have predictions"
    return layout.predicted.tokens_per_s
