# SPDX-License-Identifier: Apache-2.0
"""Write the tables that are generated: keys of the configuration, results, and families.

``make reference`` replaces the text between ``<!-- generated: KIND of NAME -->`` and ``<!-- end
-->``. ``keys of`` a section, or of ``wavemare`` for the list of sections; ``pairs of`` features in
a TOML file; ``ratios of`` a table of results/tables.toml, ``times of`` one of steps to a loss,
``staleness of`` all or few runs; ``calls of``, ``duels of``, ``schedules of``, ``steps of``, ``gpu
of`` result files that match NAME; ``families of``, ``cells of`` a file of tests; ``options of`` one
use of Megatron's options; ``settings of`` local steps; ``corrections of`` the engine's table;
``losses of`` a pipeline, ``stages x micro-batches``; ``layouts of`` emulated clusters; ``restarts
of`` a file of kills. A test compares the pages with what this file would write. It also writes
`LOSSES`.
"""

import inspect
import json
import math
import re
import runpy
import statistics
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from benchmarks.curve import first_at
from benchmarks.local_steps.request import BASELINE, WARMED
from wavemare.engine.config.resolve import WavemareConfig
from wavemare.parallel.planner import local_steps as planner
from wavemare.pipeline.staleness.staleness import MEASURED, largest_staleness, policy_optimizer
from wavemare.simulation.quality import SYSTEMS
from wavemare.training import megatron

TESTS = Path(__file__).parents[1] / "tests"
RESULTS = Path(__file__).with_name("results")
LOSSES = Path(planner.__file__).with_name("local_steps.json")
"""What local steps were measured to lose: the file of the package that the planner reads."""
PAGES = [
    Path(__file__).parent / f"{name}.md"
    for name in (
        "configuration asynchronous models schedules schedule-features huggingface "
        "megatron-options performance results/async-quality results/async-time results/sparse "
        "results/pipeline results/whale results/wave results/slow-links results/gpu "
        "results/checkpoints"
    ).split()
]
SECTIONS = {name: field.annotation for name, field in WavemareConfig.model_fields.items()}
_MARKED = re.compile(
    r"^(<!-- generated: (\w+) of (\S+) -->\n).*?(?=^<!-- end -->$)", re.MULTILINE | re.DOTALL
)
_BOUNDS = {
    "minimum": "from {:g}",
    "exclusiveMinimum": "above {:g}",
    "maximum": "up to {:g}",
    "exclusiveMaximum": "below {:g}",
}


def page(text: str) -> str:
    """Return the page with its tables written anew."""
    kinds = {"keys": table, "calls": calls, "duels": duels, "pairs": pairs}
    kinds |= {"schedules": schedules, "steps": steps, "families": families, "ratios": ratios}
    kinds |= {"times": times, "cells": cells, "gpu": gpu, "options": options}
    kinds |= {"settings": settings, "staleness": staleness, "corrections": corrections}
    kinds |= {"losses": in_time, "layouts": layouts, "restarts": restarts}
    return _MARKED.sub(lambda found: f"{found[1]}\n{kinds[found[2]](found[3])}\n", text)


def pairs(name: str) -> str:
    """Return a row for each feature; a cell says whether a test trains it with another one."""
    data = tomllib.loads((TESTS / "unit" / "engine" / name).read_text())
    features = list(data["features"])
    rows = []
    for number, first in enumerate(features):
        known = [f"{other}, {first}" for other in features[:number]]
        known += ["", *(f"{first}, {other}" for other in features[number + 1 :])]
        rows.append([first, *("yes" if pair in data["works"] else "" for pair in known)])
    return _markdown([["", *features], ["---"] * (len(features) + 1), *rows])


def cells(name: str) -> str:
    """Return a row for each feature and a column for each schedule: trained, or the key refused."""
    values = runpy.run_path(str(TESTS / name))
    rows = []
    for feature in values["FEATURES"]:
        row = [feature]
        for schedule in values["ROWS"]:
            cell = f"{schedule}/{feature}"
            refused = values["REFUSED"].get(cell, "").partition(": ")[2]
            known = any(f"{each}/".startswith(f"{cell}/") for each in values["CELLS"])
            note = values.get("NOTES", {}).get(cell)
            equal = f"equal {note}" if note else "equal"
            row.append(f"refused: `{refused}`" if refused else equal * known)
        rows.append(row)
    heads = ["", *(f"`{schedule}`" for schedule in values["ROWS"])]
    return _markdown([heads, ["---"] * len(heads), *rows])


def options(use: str) -> str:
    """Return Megatron's options of one use: those with a reason in common stand in one row."""
    found: dict[tuple[str, ...], list[str]] = {}
    for row in megatron.of_use(use):
        usual = f" (other than {', '.join(row.usual)})" if row.usual else ""
        reasons = row.use in (megatron.IDLE, megatron.REFUSED)
        text = [row.text, row.remedy] if row.remedy else [row.text]
        key = text if reasons else [_code(row.sets), row.text]
        found.setdefault(tuple(key), []).append(f"`--{row.name}`{usual}")
    heads = {
        megatron.MODEL: ["Megatron", "of the model's configuration", "meaning"],
        megatron.IDLE: ["Megatron", "why it has no meaning here"],
        megatron.REFUSED: ["Megatron", "why it is refused", "instead"],
        megatron.JSON: ["Megatron", "key of the JSON", "meaning"],
        megatron.RECIPE: ["Megatron", "option of the recipe", "meaning"],
    }[use]
    rows = [[", ".join(names), *key] for key, names in found.items()]
    return _markdown([heads, ["---"] * len(heads), *rows])


def _code(text: str) -> str:
    """Return a name of the JSON or an option as code; other words as they are."""
    return f"`{text}`" if text and " " not in text else text


def families(name: str) -> str:
    """Return the table of models that tests build."""
    rows = runpy.run_path(str(TESTS / name))["ROWS"]
    return _markdown([["model", "pipeline", "tensor parallelism, waves"], ["---"] * 3, *rows])


def ratios(name: str) -> str:
    """Return a table of results/tables.toml: label, column and cell are made of each row's values.

    ``columns`` gives the heads by what ``column`` makes; rows of other columns are left out, as are
    those without the value of the cell. ``cells`` are those of single columns. A part of the table
    has ``files``, maybe a ``text`` before its labels, and ``only`` the values that a row must have.
    """
    table = tomllib.loads((RESULTS / "tables.toml").read_text())[name]
    heads = table["columns"]
    found: dict[str, dict[str, str]] = {}
    for part in table["parts"]:
        for row in (row for result in _results(part["files"]) for row in result["rows"]):
            column = table["column"].format_map(row)
            wanted = all(row[key] in values for key, values in part.get("only", {}).items())
            if column in heads and wanted and row[table["value"]] is not None:
                label = (part.get("text", "") + table["label"]).format_map(row)
                cells = found.setdefault(label, {})
                cell = table.get("cells", {}).get(column, table["cell"])
                cells[column] = cell.format_map(row)
    rows = [[label, *(cells.get(c, "") for c in heads)] for label, cells in found.items()]
    head = [table["head"], *heads.values()]
    return _markdown([head, ["---"] + ["---:"] * len(heads), *rows])


def times(name: str) -> str:
    """Return how much sooner than ZeRO 1 systems reach its loss, over each link.

    Steps are those of the table of losses, seconds per step those of the links with one rank per
    host. A synchronous first step takes as long as one of DDP.
    """
    table = tomllib.loads((RESULTS / "tables.toml").read_text())[name]
    heads = {key: head for key, head in table["columns"].items() if key != BASELINE}
    rows = []
    for link in _results("local-steps-[24]-*.json"):
        seconds = {row["system"]: row["median_s"] for row in link["rows"]}
        for part in table["parts"]:
            found: dict[str, float] = {}
            for result in _results(part["files"]):
                request = result["request"]
                for row in result["rows"]:
                    if (needed := row.get("steps_to_loss")) is not None:
                        first = request["warmup"] * request["every"] * (row["system"] in WARMED)
                        own = (needed - first) * seconds[row["system"]]
                        found[row["system"]] = first * seconds["ddp"] + own
            cells = [f"{found[BASELINE] / found[key]:.1f}" if key in found else "" for key in heads]
            shape = link["request"]
            text = f"{shape['ranks']} ranks, {shape['mbit']:g} Mbit/s, {part['text']}"
            rows.append([text, *cells])
    head = ["ZeRO 1's time over", *heads.values()]
    return _markdown([head, ["---"] + ["---:"] * len(heads), *rows])


def measured_losses() -> str:
    """Return `LOSSES` anew: a line for each setting of local steps, with the figures of its seeds.

    Gaps are to synchronous training with the same inner optimizer and as many steps; ``steps`` says
    how many times as many steps the loss of synchronous training takes, where that was measured.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for setting, figures in (*_in_processes(), *_replayed()):
        row = found.setdefault(json.dumps(setting), {"gaps": [], "losses": [], "steps": []})
        for name, figure in figures.items():
            row[name].append(round(figure, 4))
    lines = sorted(json.dumps({**json.loads(key), **row}) for key, row in found.items())
    return "[\n" + ",\n".join(lines) + "\n]\n"


def settings(_: str) -> str:
    """Return a row for each setting of `measured_losses`, with the range over its seeds."""
    heads = ["inner optimizer", "weights", "steps between exchanges", "message", "fragments"]
    heads += ["outer rate, momentum", "seeds", "gap of the loss", "times as many steps"]

    def span(figures: list[float], form: str) -> str:
        ends = dict.fromkeys((min(figures), max(figures))) if figures else {}
        return " to ".join(format(each, form) for each in ends)

    rows = []
    for row in json.loads(measured_losses()):
        bits = f"{row['message']} bits" if row["message"].isdigit() else f"`{row['message']}`"
        cells = [row["optimizer"], f"{row['parameters'] / 1e6:.2f} M", str(row["every"]), bits]
        cells += [str(row["fragments"]), row["outer"].replace("/", ", "), str(len(row["gaps"]))]
        rows.append([*cells, span(row["gaps"], "+.1%"), span(row["steps"], ".2f")])
    return _markdown([heads, ["---"] * 2 + ["---:"] * (len(heads) - 2), *rows])


def _in_processes() -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """Yield setting and figures of each row of ``benchmarks local-steps`` without first steps."""
    fragments = {"wavemare-local-steps": 1, "wavemare-local-steps-streaming": 4}
    for result in _results("slow-links-loss-cold-*.json"):
        request = result["request"]
        for row in (row for row in result["rows"] if row["system"] in fragments):
            setting = {"optimizer": "AdamW", "every": request["every"], "message": "32"}
            setting |= {"fragments": fragments[row["system"]], "outer": "1/0.5"}
            setting |= {"replicas": request["ranks"], "parameters": result["parameters"]}
            figures = {"gaps": row["loss_gap"], "losses": row["eval_loss"]}
            figures["steps"] = row["steps_to_loss"] / request["quality"]
            yield setting | {"training": request["quality"]}, figures


def _replayed() -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """Yield the same of ``benchmarks local-steps-loss``, with gaps over all of its files."""
    names = {"adamw": "AdamW", "muon": "Muon"}
    files = list(_results("slow-links-messages-*.json"))
    rows = [({**f["request"], "parameters": f["parameters"]}, r) for f in files for r in f["rows"]]

    def run(request: dict[str, Any], row: dict[str, Any]) -> list[Any]:
        sizes = [request[name] for name in ("steps", "parameters", "replicas", "batch", "sequence")]
        return [row["optimizer"], row["seed"], *sizes]

    for request, row in rows:
        if row["every"]:
            own = run(request, row)
            alone = [r["loss"] for q, r in rows if not r["every"] and run(q, r) == own]
            setting = {"optimizer": names[row["optimizer"]], "every": row["every"]}
            setting |= {"message": row["message"], "fragments": 1, "outer": row["outer"]}
            setting |= {"replicas": request["replicas"], "parameters": request["parameters"]}
            figures = {"gaps": row["loss"] / min(alone) - 1, "losses": row["loss"]}
            yield setting | {"training": request["steps"]}, figures


def layouts(pattern: str) -> str:
    """Return a row for each cluster of ``benchmarks layouts``, and one for all of them."""
    head = ["devices, by hosts", "Mbit/s", "chosen P x D", "first blocks of stages", "samples"]
    head += ["beside", "s predicted", "measured", "error, of all", "of the best", "Metis", "equal"]
    clusters: dict[str, dict[str, Any]] = {}
    for row in (row for result in _results(pattern) for row in result["rows"]):
        clusters.setdefault(row["cluster"], {})[row["system"]] = row
    rows, errors, bests, gains = [], [], [], []
    for systems in clusters.values():
        own = systems["chosen"]
        errors.append([abs(row["error"]) for row in systems.values()])
        bests.append(own["of_best"])
        gains.append([systems[name]["median_s"] / own["median_s"] for name in ("metis", "equal")])
        cells = [" + ".join(", ".join(f"{speed:g}" for speed in each) for each in own["hosts"])]
        cells += [", ".join(f"{mbit:g}" for mbit in own["mbit"] or ()) or "-", own["axes"]]
        cells += [own["cuts"].replace("|", "and"), own["shares"], own["other"]]
        cells += [f"{own['predicted_s']:.2f}", f"{own['median_s']:.2f}", f"{max(errors[-1]):.1%}"]
        rows.append([*cells, f"{bests[-1]:.1%}", *(f"{gain:.2f}" for gain in gains[-1])])
    all_errors = [error for each in errors for error in each]
    last = [f"{statistics.median(all_errors):.1%}, worst {max(all_errors):.1%}"]
    middles = map(statistics.median, zip(*gains, strict=True))
    last += [f"worst {min(bests):.1%}", *(f"{middle:.2f}" for middle in middles)]
    return _markdown([head, ["---"] * 6 + ["---:"] * 6, *rows, ["**median**", *[""] * 7, *last]])


def duels(pattern: str) -> str:
    """Return a row for each case of ``benchmarks sparse --duels``, over all result files."""
    head = ["ranks", "link", "size", "masks", "d", "fastest other", "`auto` chose"]
    head += ["other / `auto`", "95 %"]
    rows = []
    for result in _results(pattern):
        shape = result["rows"][0]
        link = "memory" if shape["mbit"] is None else f"{shape['mbit']:g} Mbit/s"
        for duel in result["duels"]:
            low, high = duel["interval"]
            cells = [shape["ranks"], link, f"{result['mebibytes']:g} MiB", duel["pattern"]]
            cells += [f"{duel['density']:g}", f"`{duel['fastest']}`", duel["executor"]]
            rows.append([str(c) for c in cells] + [f"{duel['ratio']:.2f}", f"{low:.2f}-{high:.2f}"])
    return _markdown([head, ["---"] * len(head), *rows])


def calls(pattern: str) -> str:
    """Return a row for each system of ``benchmarks sparse``: speed, and what rank 0 sends."""
    cases: dict[str, None] = {}
    found: dict[str, dict[str, str]] = {}
    for row in (row for result in _results(pattern) for row in result["rows"]):
        case = f"{row['pattern']}, d = {row['density']:g}"
        sent = f" ({row['bytes_up'] / 2**20:.1f} MiB)" if row.get("bytes_up") else ""
        cases[case] = None
        found.setdefault(f"`{row['system']}`", {})[case] = f"{row['ratio']:.2f}{sent}"
    rows = [[name, *(cells.get(case, "") for case in cases)] for name, cells in found.items()]
    return _markdown([["system", *cases], ["---"] + ["---:"] * len(cases), *rows])


def schedules(pattern: str) -> str:
    """Return a row for each system of ``benchmarks pipeline``, a column for each case."""
    cases: dict[str, None] = {}
    found: dict[str, dict[str, str]] = {}
    for result in _results(pattern):
        waits = result["waits_s"]
        passes = "GPT" if waits is None else f"{1e3 * waits['forward_s']:g} ms"
        for row in result["rows"]:
            case = f"P={row['stages']}, M={row['micro_batches']}, {passes}"
            cases[case] = None
            ideal = f" ({row['ideal']:.2f})" if row["ideal"] else ""
            found.setdefault(f"`{row['system']}`", {})[case] = f"{row['ratio']:.2f}{ideal}"
    rows = [[name, *(cells.get(case, "") for case in cases)] for name, cells in found.items()]
    return _markdown([["system", *cases], ["---"] + ["---:"] * len(cases), *rows])


def steps(pattern: str) -> str:
    """Return a row for each system of ``benchmarks sparse --step``, over all result files."""
    head = ["ranks", "system", "ms per step", "times as fast", "beyond no messages, ms"]
    rows = []
    for result in _results(pattern):
        for row in result["rows"]:
            beyond = "" if row["communication_s"] is None else f"{1e3 * row['communication_s']:.0f}"
            cells = [str(row["ranks"]), f"`{row['system']}`", f"{1e3 * row['median_s']:.0f}"]
            rows.append(
                [*cells, f"{row['ratio']:.2f}", beyond, f"{row['link_bytes_up'] / 2**20:.2f}"]
            )
    return _markdown([[*head, "MiB per rank"], ["---"] * 6, *rows])


def staleness(which: str) -> str:
    """Return a row for each asynchronous system of ``simulate --systems``, the freshest first.

    ``all``, or the ``few`` of results/tables.toml; with most seeds, if several files have the same.
    """
    table = tomllib.loads((RESULTS / "tables.toml").read_text())["staleness"]
    results = [file for pattern in table["files"] for file in _results(pattern) if "runs" in file]
    ends = {_alike(file, run): run["curve"][-1][1] for file in results for run in file["runs"]}
    found: dict[tuple[Any, ...], tuple[int, list[str]]] = {}
    for file, row in ((result, row) for result in results for row in result.get("rows", ())):
        name, micro_batches, states = row["system"], row["micro_batches"], row["memory"]
        runs = {_alike(file, r): r["curve"][-1][1] for r in file["runs"] if r["system"] == name}
        same = [ends.get((SYSTEMS[name].baseline, *run[1:])) for run in runs]
        gaps = [loss / base - 1 for loss, base in zip(runs.values(), same, strict=True) if base]
        if SYSTEMS[name].flushes or (row["own_gap"] is None and len(gaps) < len(runs)):
            continue
        own = statistics.fmean(gaps) if row["own_gap"] is None else row["own_gap"]
        one_step = SYSTEMS[name].delays == "one-step"  # whatever the pipeline is
        worst, mean = (1, 1.0) if one_step else largest_staleness(row["stages"], micro_batches)
        shown = f"`{name}`"
        if name == "auto":
            shown += " (SOAP)" if states["optimizer"] > _MOST_OF_MUON else " (Muon)"
        elif name == _MUON_OF_AUTO and policy_optimizer(worst) == "Muon":
            shown = "`auto` (Muon)"
        _, bert, rate, *_ = next(iter(runs))
        pipeline = f"{'BERT' if bert else 'GPT'}, P={row['stages']}, M={micro_batches}"
        cells = [pipeline, shown, rate, str(row["steps"])]
        chosen = which == "all" or cells in table["few"]
        key = worst, mean, not bert, row["stages"], micro_batches, row["steps"], shown, rate
        cells = [f"{worst} ({mean:.2f})", *cells, str(row["seeds"]), f"{100 * own:+.1f} %"]
        if chosen and row["seeds"] > found.get(key, (0, []))[0]:
            found[key] = row["seeds"], [*cells, f"{sum(states.values()):.1f}"]
    rows = [cells for _, (_, cells) in sorted(found.items())]
    return _markdown([table["heads"], ["---"] * 4 + ["---:"] * 4, *rows])


def _alike(result: dict[str, Any], run: dict[str, Any]) -> tuple[Any, ...]:
    """Return a system and what its runs and the synchronous ones have in common."""
    words = str(result["command"]).split()
    given = {"--lr": run.get("learning_rate"), **dict(pairwise(words))}
    sizes = [given.get(f"--{n}") for n in ("lr", "num-layers", "hidden-size", "sequence_length")]
    return run["system"], "bert" in words, *sizes, run["curve"][-1][0], run["seed"]


_MOST_OF_MUON = 5  # weights of states; the policy that had more has taken SOAP
_MUON_OF_AUTO = "muon+feedback+prediction"  # what it takes while gradients are fresh enough


def in_time(shape: str) -> str:
    """Return a row for each method of results/tables.toml: its loss, and its time to two losses.

    In brackets is how many times as fast it comes there as 1F1B with the optimizer of that loss.

    Args:
        shape: Stages, ``x`` and micro-batches.
    """
    table = tomllib.loads((RESULTS / "tables.toml").read_text())["in-time"]
    stages, micro_batches = map(int, shape.split("x"))
    measured = [row for file in _results(f"async-time-{shape}.json") for row in file["rows"]]
    if not measured:
        return "There is no result yet.\n"
    seconds = {row["system"]: row["median_s"] for row in measured}
    stock = seconds[table["goals"][0]["step"]]
    runs = [run for pattern in table["runs"] for run in _simulated(pattern)]

    def curves(run: str) -> tuple[float, dict[int, list[list[float]]]]:
        """Return a system's best rate, by its mean loss, and its curves at that rate by seed."""
        by_rate: dict[float, dict[int, list[list[float]]]] = {}
        for each in runs:
            same = (each["stages"], each["micro_batches"]) == (stages, micro_batches)
            if each["system"] == run and (same or SYSTEMS[run].place):
                by_rate.setdefault(each["learning_rate"], {})[each["seed"]] = each["curve"]
        means = {r: statistics.fmean(c[-1][1] for c in own.values()) for r, own in by_rate.items()}
        best = min(means, key=means.__getitem__, default=math.nan)
        return best, by_rate.get(best, {})

    goals = []
    for goal in table["goals"]:
        _, own = curves(goal["run"])
        losses = {seed: curve[-1][1] * (1 + goal["above"]) for seed, curve in own.items()}
        steps = [first_at(curve, losses[seed]) or math.nan for seed, curve in own.items()]
        goals.append((losses, statistics.fmean(steps) * seconds[goal["step"]]))
    rows = []
    for method in table["methods"]:
        rate, found = curves(method["run"])
        if not found or method["step"] not in seconds:
            continue
        each, first = seconds[method["step"]], method.get("first", 0)
        ends = [curve[-1][1] for curve in found.values()]
        mean = statistics.fmean(ends)
        spread = f" ± {max(abs(end - mean) for end in ends):.3f}" if len(ends) > 1 else ""
        cells = [method["name"], method["optimizer"], f"{rate:g}", f"{mean:.3f}{spread}"]
        cells += [str(len(found)), f"{1e3 * each:.1f} ({stock / each:.2f})"]
        for losses, usual in goals:
            steps = [first_at(found[seed], losses[seed]) for seed in found.keys() & losses.keys()]
            reached = [step for step in steps if step is not None]
            times = [min(step, first) * stock + max(step - first, 0) * each for step in reached]
            time = statistics.fmean(times) if times else math.inf
            some = f", {len(times)} of {len(steps)} seeds" if len(times) < len(steps) else ""
            cells.append(f"{time:.1f} s ({usual / time:.2f}{some})" if times else "never")
        rows.append(cells)
    heads = ["method", "optimizer", "rate", "held-out loss", "seeds", "ms per step"]
    heads += [goal["head"] for goal in table["goals"]]
    return _markdown([heads, ["---"] * 2 + ["---:"] * (len(heads) - 2), *rows])


def _simulated(pattern: str) -> Iterator[dict[str, Any]]:
    """Yield the runs of ``simulate --systems``; a size or a rate may stand in the command alone."""
    options = {"stages": "--stages", "micro_batches": "--micro_batches", "learning_rate": "--lr"}
    for result in _results(pattern):
        words = result["command"].replace("--micro-batches", "--micro_batches").split()
        given = dict(pairwise(words))
        for run in result["runs"]:
            yield {**{key: run.get(key) or float(given[o]) for key, o in options.items()}, **run}


def corrections(_: str) -> str:
    """Return what ``discrepancy_correction`` ``auto`` is, by optimizer and staleness."""
    rows = []
    for row in MEASURED:
        mode = "by memory" if row.correction == "auto" else f"`{row.correction}`"
        limit = "any" if row.up_to == math.inf else f"up to {row.up_to:g}"
        source = f"[`{row.source}`](results/{row.source})" if row.source else "not measured"
        memory = "" if math.isnan(row.memory) else f"{row.memory:g}"
        rows.append([row.optimizer or "any other", limit, mode, memory, source])
    heads = ["optimizer", "staleness", "`auto` is", "memory, weights", "runs"]
    return _markdown([heads, ["---"] * len(heads), *rows])


def gpu(pattern: str) -> str:
    """Return a row for each system of ``benchmarks gpu``, and for each that is left out."""
    head = ["device", "part", "case", "system", "ms", "host ms", "times as fast", "more"]
    rows = []
    for result in _results(pattern):
        for row in result["rows"]:
            more = [f"{row['gb_s']:.0f} GB/s"] if "gb_s" in row else []
            more += [f"cpu {1e3 * row['cpu_s']:.3f} ms"] if "cpu_s" in row else []
            more += [f"share {row['share']:.1%}"] if "share" in row else []
            more += [f"loss {row['loss']:.4f}"] if row.get("loss") is not None else []
            ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
            cells = [row["part"], row["case"], f"`{row['system']}`"]
            cells += [f"{1e3 * row['median_s']:.3f}", f"{1e3 * row['host_s']:.3f}", ratio]
            rows.append([result["device"], *cells, ", ".join(more)])
        for row in result["skipped"]:
            name = f"`{row['system']}`" if row["system"] else ""
            reason = " ".join(row["reason"].replace("|", "/").split())
            cells = [row["part"], row["case"], name, "", "", "", f"left out: {reason}"]
            rows.append([result["device"], *cells])
    if not rows:
        return "There is no result yet.\n"
    return _markdown([head, ["---"] * 4 + ["---:"] * 3 + ["---"], *rows])


def restarts(name: str) -> str:
    """Return the parts of the time from the death of a rank to the end of the next step."""
    rounds = json.loads((RESULTS / name).read_text())["rounds"]
    parts = {part: [each["seconds"][part] for each in rounds] for part in rounds[0]["seconds"]}
    sums = [sum(each["seconds"].values()) for each in rounds]
    own = ("until this process started", "of imports")
    rest = [[s for part, s in each["seconds"].items() if part not in own] for each in rounds]
    beyond = [sum(seconds) for seconds in rest]
    parts |= {"together": sums, "together, without the first two": beyond}
    rows = [
        [part, f"{statistics.median(found):.1f}", f"{min(found):.1f} to {max(found):.1f}"]
        for part, found in parts.items()
    ]
    return _markdown([["seconds", "median", "range"], ["---", "---:", "---:"], *rows])


def _results(pattern: str) -> Iterator[dict[str, Any]]:
    for file in sorted(RESULTS.glob(pattern), key=lambda file: (len(file.name), file.name)):
        yield json.loads(file.read_text())


def _markdown(lines: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def table(name: str) -> str:
    """Return the table of a section's keys, or the table of all sections."""
    if name == "wavemare":
        head = ["section of `wavemare`", "purpose"]
        rows = [
            [f"[`{key}`]({_place(key)})", _first_line(model)] for key, model in SECTIONS.items()
        ]
    else:
        head = [f"key in `wavemare.{name}`", "values", "default", "meaning"]
        rows = [
            [f'<a id="{name}.{key}"></a>`{key}`', *rest]
            for key, *rest in keys(SECTIONS[name].model_json_schema())
        ]
    return _markdown([head, ["---"] * len(head), *rows])


def _place(section: str) -> str:
    """Return the anchor of the heading above a section's table of keys."""
    above = PAGES[0].read_text().partition(f"<!-- generated: keys of {section} -->")[0]
    heading = re.findall(r"^#+ (.*)$", above, re.MULTILINE)[-1]
    return "#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def keys(schema: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Yield key, values, default and meaning of each key of a model's JSON schema, inner dotted."""

    def walk(model: dict[str, Any], prefix: str) -> Iterator[tuple[str, str, str, str]]:
        for key, field in model["properties"].items():
            inner = [_resolve(one, schema) for one in (field, *field.get("anyOf", ()))]
            models = [one for one in inner if "properties" in one]
            if not models or field.get("anyOf"):  # a model that is always there has no value itself
                default = json.dumps(field["default"]) if "default" in field else None
                shown = {"null": "none", None: "required"}.get(default, f"`{default}`")
                meaning = _one_line(field["description"], f"{prefix}{key}")
                yield f"{prefix}{key}", _values(field, schema), shown, meaning
            for one in models:
                yield from walk(one, f"{prefix}{key}.")

    yield from walk(schema, "")


def _resolve(field: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    name = field.get("$ref", "").rpartition("/")[2]
    return schema["$defs"][name] if name else field


def _values(field: dict[str, Any], schema: dict[str, Any]) -> str:
    """Describe the values of a key. Null stands for an absent key and is left out."""
    if "anyOf" in field:
        kinds = (_values(one, schema) for one in field["anyOf"] if one.get("type") != "null")
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in field or "const" in field:
        choices = field.get("enum", [field.get("const")])
        return ", ".join(f"`{json.dumps(choice)}`" for choice in choices)
    kind = _resolve(field, schema)["type"]
    if kind == "array":
        few = "non-empty " if field.get("minItems") else ""
        kind = f"{few}list of {_plural(_values(field['items'], schema))}"
    elif kind == "object" and isinstance(inner := field.get("additionalProperties"), dict):
        kind = f"object of {_plural(_values(inner, schema))} by name"
    bounds = [text.format(field[bound]) for bound, text in _BOUNDS.items() if bound in field]
    return " ".join([kind, *bounds])


def _plural(kind: str) -> str:
    first, _, rest = kind.partition(" ")
    return " ".join([f"{first}s", rest]).rstrip()


def _one_line(description: str, key: str) -> str:
    """Return a docstring as one line of Markdown, with links to the pages that it names."""
    text = " ".join(description.split()).replace("``", "`")
    text = re.sub(r"\bdocs/([\w-]+)\.md\b", r"[\1](\1.md)", text)
    if "|" in text:
        raise ValueError(f"{key}: a bar in its description would end the cell")
    return text


def _first_line(model: type[BaseModel]) -> str:
    return _one_line(inspect.cleandoc(model.__doc__ or "").partition("\n\n")[0], model.__name__)


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(page(each.read_text()))
    LOSSES.write_text(measured_losses())
