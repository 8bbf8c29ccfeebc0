# SPDX-License-Identifier: Apache-2.0
"""The benchmarks as a person types them: one small run of each in CI, more of them at night."""

import json
import os
from statistics import median

import pytest

from benchmarks.cluster import EmulatedCluster
from benchmarks.cluster.limits import Throttle
from benchmarks.gpu.request import PARTS
from benchmarks.local_steps.request import PIPELINES as LOCAL_PIPELINES
from benchmarks.local_steps.request import SYSTEMS as LOCAL_SYSTEMS
from benchmarks.pipeline.request import DEFAULT_SYSTEMS
from benchmarks.run import run_ranks
from benchmarks.sparse.request import DEFAULT_SYSTEMS as SPARSE_SYSTEMS
from benchmarks.sparse.request import PEERS, STEP_SYSTEMS
from benchmarks.sparse.request import SYSTEMS as ALL_SPARSE_SYSTEMS
from benchmarks.wave.request import SYSTEMS as WAVE_SYSTEMS
from wavemare.errors import LaunchError

OBSTACLE = EmulatedCluster.obstacle()
try:
    with Throttle():
        NO_QUOTAS = ""
except LaunchError as error:
    NO_QUOTAS = str(error)
nightly, spins = pytest.mark.nightly, pytest.mark.spins
GPT = [
    *("--layers", 4, "--hidden", 32, "--heads", 2, "--sequence", 16, "--batch", 1),
    *("--rounds", 2, "--steps-per-round", 2),
]
WORDS = [
    *("--vocabulary", 4000, "--hidden", 32, "--layers", 1, "--heads", 2, "--block", 32),
    *("--batch", 2, "--sequence", 16, "--steps-per-round", 2, "--ranks", 2, "--warmups", 1),
]
WAVE = [
    *("--layers", 2, "--hidden", 32, "--heads", 2, "--vocabulary", 100, "--sequence", 16),
    *("--micro-batches", 2, "--rounds", 1, "--warmups", 0),
]
FAILING = """
import torch.distributed as dist
from benchmarks.request import Request

class Failing(Request):
    measured_by = "failing:measure"
    ranks: int = 2

def measure(request):
    if dist.get_rank() == 1:
        raise MemoryError("out of memory\\nand more")
    dist.barrier()
"""
PLANNER = [
    *("--layers", 2, "--hidden", 32, "--heads", 2, "--sequence", 16, "--batch", 6),
    *("--ranks", 2, "--rounds", 1, "--warmups", 0),
]


@pytest.fixture
def bench(command, tmp_path):
    """Run a benchmark; return its JSON, and what it said as ``output``."""

    def run(*words):
        ended = command("python", "-m", "benchmarks", *words, "--json", "result.json").check()
        result = json.loads((tmp_path / "result.json").read_text())
        line = " ".join(map(str, ("python", "-m", "benchmarks", *words)))
        assert result["command"].startswith(line)
        assert {"processor", "cores", "torch", "deepspeed"} <= result["machine"].keys()
        for row in result.get("rows", ()):
            if row.get("ratio") is not None and "rounds_s" in row:
                assert len(row["rounds_s"]) == words[words.index("--rounds") + 1]
            assert str(row.get("system", "")) in ended.output
        return {**result, "output": ended.output}

    return run


def by(result, *keys):
    """Return the rows by some of their columns."""
    return {
        tuple(row[key] for key in keys) if len(keys) > 1 else row[keys[0]]: row
        for row in result["rows"]
    }


@pytest.mark.parametrize(
    "systems",
    [
        ("deepspeed-1f1b", "torch-1f1b", "wavemare-pipemare"),
        pytest.param(DEFAULT_SYSTEMS, marks=nightly),
    ],
    ids=["three", "all"],
)
def test_pipelines_have_rows_and_timelines(bench, tmp_path, systems):
    options = ["--micro-batches", "1,4", *GPT, "--systems", ",".join(systems)]
    result = bench("pipeline", *options, "--trace", "trace", "--plot", "plot.png")
    assert result["baseline"] == "deepspeed-1f1b"
    assert result["machine"]["threads_per_rank"] == 1
    assert len(result["stage_s"]) == 2
    rows = by(result, "system", "micro_batches")
    left_out = {(row["system"], row["micro_batches"]) for row in result["skipped"]}
    interleaved = {"torch-interleaved", "wavemare-interleaved"}
    too_few = {"deepspeed-dualpipev", "torch-1f1b", *interleaved}.intersection(systems)
    assert left_out == {(name, 1) for name in too_few}
    assert rows.keys() | left_out == {(name, count) for name in systems for count in (1, 4)}
    for (name, count), row in rows.items():
        stock = rows["deepspeed-1f1b", count]["median_s"]
        assert row["ratio"] == pytest.approx(stock / row["median_s"])
        assert row["cpu_s"] == pytest.approx(median(row["cpu_rounds_s"]))
        trace = (tmp_path / "trace" / f"trace-m{count}.json").read_text()
        assert (f"{name}, M={count}" in trace) == (not name.startswith("torch"))
        if not name.startswith("torch"):
            assert len(row["ranks"]) == row["stages"] == 2
            assert all(rank["compute_s"] > 0 and rank["step_s"] > 0 for rank in row["ranks"])
    assert (tmp_path / "trace" / "timeline-m4.png").stat().st_size > 1000
    assert (tmp_path / "plot.png").stat().st_size > 1000
    assert rows["wavemare-pipemare", 4]["ideal"] == 1.25
    assert "torch-1f1b is left out at M=1" in result["output"]


@nightly
def test_waits_have_a_utilisation_beside_the_ideal(bench):
    systems = "deepspeed-1f1b,wavemare-pipemare,no-communication-bound"
    options = ["--synthetic", "--stages", 4, "--micro-batches", "1,4", "--rounds", 3]
    rows = by(bench("pipeline", *options, "--systems", systems), "system", "micro_batches")
    for count in (1, 4):
        ideal = rows["deepspeed-1f1b", count]["ideal_utilisation"]
        assert ideal == pytest.approx(count / (count + 3))
        # A wait may be longer than asked for on a busy machine, and never shorter.
        assert all(0 < rows[name, count]["utilisation"] <= 1 for name in systems.split(","))


@nightly
def test_losses_of_real_pipelines_are_those_of_their_own_training(bench, tmp_path):
    systems = ["deepspeed-1f1b", "wavemare-auto-v", "deepspeed-1f1b-muon", "wavemare-auto-v-muon"]
    size = [*("--hidden", 32, "--heads", 2, "--sequence", 16, "--batch", 2, "--vocabulary", 300)]
    options = [*size, "--rounds", 3, "--steps-per-round", 4, "--eval-samples", 64]
    systems.append("wavemare-pipemare-auto")
    result = bench("losses", *options, "--systems", ",".join(systems), "--plot", "losses.svg")
    rows = by(result, "system")
    assert list(rows) == systems
    for row in rows.values():
        steps, seconds, losses = zip(*row["curve"], strict=True)
        assert steps == (4, 8, 12)
        assert list(seconds) == sorted(seconds)
        assert losses[-1] < losses[0]
    # Synchronous schedules train the same.
    for one, other in (systems[:2], systems[2:4]):
        curves = [[loss for _, _, loss in rows[name]["curve"]] for name in (one, other)]
        assert curves[0] == pytest.approx(curves[1], rel=1e-3)
    assert rows[systems[0]]["eval_loss"] != pytest.approx(rows[systems[2]]["eval_loss"], rel=1e-3)
    assert "bigrams" in (tmp_path / "losses.svg").read_text()


@spins
def test_collectives_are_measured_and_checked_against_each_other(bench, tmp_path):
    options = ["--ranks", 2, "--mib", 1, "--densities", "1,0.1", "--patterns", "zipf"]
    options += ["--rounds", 1, "--warmups", 0, "--plot", "plot.png", "--duels", 3]
    result = bench("sparse", *options)
    for duel in result["duels"]:
        low, high = duel["interval"]
        assert 0 < low <= duel["ratio"] <= high
        assert duel["fastest"] in SPARSE_SYSTEMS
        assert {len(rounds) for rounds in duel["rounds_s"].values()} == {3}
    rows = by(result, "system", "pattern", "density")
    cases = [("zipf", 1.0), ("zipf", 0.1)]
    left_out = {(row["system"], row["pattern"], row["density"]) for row in result["skipped"]}
    assert rows.keys() | left_out == {(name, *case) for name in SPARSE_SYSTEMS for case in cases}
    assert not rows.keys() & left_out
    for (name, *_), row in rows.items():
        assert row["ratio"] > 0
        assert (row.get("executor") is not None) == name.startswith(("wavemare", *PEERS))
    assert 0 < rows["wavemare-pushpull", "zipf", 0.1]["bytes_up"] < 0.5 * 2**20
    assert (tmp_path / "plot.png").stat().st_size > 1000


@spins
@pytest.mark.parametrize(
    ("systems", "ranks"),
    [(("gloo-dense", *PEERS), 2), pytest.param(ALL_SPARSE_SYSTEMS, 4, marks=nightly)],
    ids=["papers", "all"],
)
def test_systems_of_papers_sum_beside_aggregators(bench, systems, ranks):
    options = ["--ranks", ranks, "--aggregators", 2, "--mib", 1, "--densities", "0.1,0.0"]
    options += ["--patterns", "identical", "--rounds", 1, "--warmups", 1]
    result = bench("sparse", *options, "--systems", ",".join(systems))
    rows = by(result, "system", "density")
    assert rows.keys() == {(name, density) for name in systems for density in (0.1, 0.0)}
    up = {name: rows[name, 0.1].get("bytes_up") for name in systems}
    # Of 1024 blocks 102 are not zero. Workers push these and the first ones of all lanes.
    assert 102 < up["omnireduce"] / 1024 < 102 + 32 + 10
    assert up["deepreduce4"] < up["deepreduce8"] < up["parallax"] < up["agsparse"]


@spins
@pytest.mark.parametrize(
    "systems",
    [("deepspeed-dense", "wavemare-pushpull"), pytest.param(STEP_SYSTEMS, marks=nightly)],
    ids=["two", "all"],
)
def test_steps_with_each_system_learn_the_same(bench, tmp_path, systems):
    options = [*WORDS, "--rounds", 2, "--plot", "a.png", "--systems", ",".join(systems)]
    rows = by(bench("sparse", "--step", *options), "system")
    assert tuple(rows) == systems
    dense = rows["deepspeed-dense"]
    for name, row in rows.items():
        assert row["ratio"] == pytest.approx(dense["median_s"] / row["median_s"])
        assert (row["executor"] is not None) == name.startswith("wavemare")
        if name not in ("wavemare-topk", "no-communication-bound"):
            assert row["loss"] == pytest.approx(dense["loss"], rel=1e-5)
    # A rank's batch has 32 words, and what is sent of the other 3968 rows is a bit each.
    pushed = rows["wavemare-pushpull"]
    assert 0 < pushed["density"] <= pushed["union"] < 0.5
    assert 0 < pushed["bytes_up"] < 4000 * 32 * 4 / 2
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_waves_are_measured_beside_accumulation(bench, tmp_path):
    result = bench("wave", "--exposed", 0, *WAVE, "--plot", "a.png")
    rows = by(result, "system")
    assert tuple(rows) == WAVE_SYSTEMS
    before = rows["accumulation"]
    for row in rows.values():
        assert row["ratio"] == pytest.approx(before["median_s"] / row["median_s"])
        assert row["compute_s"] > 0
        assert row["mbit"] is None
    assert before["model"] == 1
    memory = {row["system"]: row for row in result["memory"]}
    assert memory["tick-tock"]["bitwise"]
    assert memory["tick-tock"]["of_accumulation"] <= 1.02
    assert memory["tick-tock"]["of_in_phase"] < 0.6
    assert "auto at 0%" in result["output"]
    assert (tmp_path / "a.png").stat().st_size > 1000


@nightly
@pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))
def test_links_are_made_for_the_share(bench):
    rows = by(bench("wave", "--exposed", "0,60", *WAVE), "system", "exposed")
    assert rows["accumulation", 0.0]["mbit"] is None
    assert rows["accumulation", 0.6]["mbit"] > 0


@nightly
@pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))
def test_local_steps_are_measured_beside_their_peers(bench):
    options = ["--layers", 1, "--hidden", 64, "--heads", 2, "--vocabulary", 1024, "--sequence", 32]
    options += ["--mbit", 50, "--every", 8, "--dense-steps", 2, "--rounds", 1]
    options += ["--quality", 16, "--warmup", 1]
    result = bench("local-steps", *options)
    rows = by(result, "system")
    left_out = {row["system"] for row in result["skipped"]}  # where torchft is not installed
    assert left_out <= {"torchft-diloco", "torchft-diloco-streaming"}
    assert rows.keys() | left_out == {*LOCAL_SYSTEMS, "no-exchange-bound"}
    size = 4 * result["parameters"]
    assert size < rows["ddp"]["bytes"] < 1.2 * size < rows["deepspeed-zero1"]["bytes"]
    for name in ("wavemare-local-steps", "wavemare-local-steps-streaming"):
        assert rows[name]["bytes"] == pytest.approx(size / 8, rel=0.2)
        assert rows[name]["loss_gap"] < 0.05
    assert rows["ddp"]["eval_loss"] == pytest.approx(rows["deepspeed-zero1"]["eval_loss"], abs=1e-4)
    assert rows["deepspeed-zero1"]["steps_to_loss"] <= 16


@nightly
@pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))
@pytest.mark.parametrize("compute", ["real", "sleep"])
def test_replicas_that_are_pipelines_are_measured_beside_stock_pipelines(bench, compute):
    options = ["--layers", 3, "--hidden", 64, "--heads", 2, "--vocabulary", 1024, "--sequence", 32]
    options += ["--ranks", 4, "--ranks-per-host", 2, "--stages", 2, "--micro-batches", 3]
    options += ["--mbit", 50, "--every", 8, "--dense-steps", 2, "--rounds", 1]
    result = bench("local-steps", *options, "--compute", compute, "--step-ms", 6)
    rows = by(result, "system")
    assert rows.keys() == {*LOCAL_PIPELINES, "no-exchange-bound"}
    assert result["baseline"] == "deepspeed-1f1b"
    size = 4 * result["parameters"]
    width, blocks = 64, 3
    block = 12 * width**2 + 13 * width
    assert result["parameters"] == (2 * 1024 + 32) * width + blocks * block + 2 * width
    # The link of a host carries both stages' messages once in a step, or once in eight.
    assert size < rows["deepspeed-1f1b"]["bytes"] < 1.2 * size
    for name in ("wavemare-local-steps", "wavemare-local-steps-streaming"):
        assert rows[name]["bytes"] == pytest.approx(size / 8, rel=0.2)
    assert rows["deepspeed-1f1b-across"]["bytes"] < size / 8  # activations
    assert rows["no-exchange-bound"]["bytes"] < size / 80


def test_every_part_of_the_gpu_benchmark_works_at_tiny_sizes(bench):
    result = bench("gpu", "--tiny", "--rounds", 1, "--warmups", 1)
    assert result["tiny"]
    assert {name for launch in result["launches"] for name in launch["parts"]} == PARTS.keys()
    rows = by(result, "part", "system", "case")
    on_gpu = result["device"] != "cpu"
    left_out = {
        (row["part"], row["case"] or row["system"], row["system"]) for row in result["skipped"]
    }
    if on_gpu:
        assert not left_out
    else:
        graphs = {f"{name}-graphs" for name in ("one-stream", "two-streams")}
        assert left_out == {
            ("collectives", "nccl", ""),
            *(("streams", "8 micro-batches", name) for name in graphs),
        }
    for (part, name, _), row in rows.items():
        assert row["median_s"] > 0
        assert row["host_s"] > 0
        assert row["rounds_s"]
        assert row["ratio"] > 0
        assert name not in PARTS[part].baselines[:1] or row["ratio"] == 1
    found = {part: [row for row in result["rows"] if row["part"] == part] for part in PARTS}
    assert {row["case"] for row in found["kernels"]} == {"float32", "bfloat16"}
    assert {row["case"] for row in found["collectives"]} == {"d = 1", "d = 0.1", "d = 0.01"}
    # A step more, and bf16 rounds to three digits.
    losses = [row["loss"] for row in found["step"]]
    assert losses == pytest.approx([losses[0]] * 6, rel=0.01)
    pipelines = {row["system"]: row["loss"] for row in found["schedules"]}
    assert pipelines.pop("wavemare-pipemare") is None
    assert len(pipelines) == 8
    rel = 1e-4 if on_gpu else 1e-5
    assert all(row["loss_gap"] < rel for row in found["schedules"] if row["loss"] is not None)
    stock = pipelines["deepspeed-1f1b"]
    assert pipelines == {name: pytest.approx(stock, rel=rel) for name in pipelines}
    split = {row["case"]: {} for row in found["split"]}
    for row in found["split"]:
        split[row["case"]][row["system"]] = row
    for systems in split.values():
        assert systems.keys() == {"whole", "split", "whole-compiled", "split-compiled"}
        assert systems["split"]["equal"]
        assert systems["split"]["kept_bytes"] > systems["split-compiled"]["kept_bytes"] == 0
    waves = {(row["case"], row["system"]): row for row in found["waves"]}
    assert len(waves) == 2 * len(WAVE_SYSTEMS)
    assert waves["no collectives", "tick-tock"]["equal"]
    assert waves["25% exposed", "accumulation"].get("share", 0) == 0
    assert waves["25% exposed", "tick-tock"]["spin_s"] > 0
    for row in found["optimizers"]:
        assert 0 < row["share"] < 1
        assert row["optimizer_s"] == pytest.approx(row["share"] * row["median_s"])


def test_the_error_of_a_rank_is_the_reason_of_its_launch(tmp_path, monkeypatch):
    """One rank fails; the other one waits for it until it is ended."""
    (tmp_path / "failing.py").write_text(FAILING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    from failing import Failing

    with pytest.raises(LaunchError, match="rank 1 failed: MemoryError: out of memory"):
        run_ranks(Failing(), timeout_s=600)


needs_quotas = pytest.mark.skipif(bool(NO_QUOTAS), reason=NO_QUOTAS)


@needs_quotas
def test_shares_that_fit_unlike_devices_are_measured_beside_equal_ones(bench, tmp_path):
    options = ["--micro-steps", 2, "--factor", 4, "--plot", "a.png"]
    result = bench("planner", *PLANNER, "--parts", "shares", *options)
    assert result["throttle"] in {"cgroup v1", "cgroup v2"}
    assert result["throttle"] in result["output"]
    assert result["baseline"] == "equal"
    equal, planned = result["rows"]
    assert (equal["system"], planned["system"]) == ("equal", "planned")
    assert equal["shares"] == [6, 6]
    assert sum(planned["shares"]) == 12
    assert planned["ratio"] == pytest.approx(equal["median_s"] / planned["median_s"])
    assert planned["bound_fraction"] == pytest.approx(planned["ratio"] / planned["ideal"])
    assert len(planned["losses"]) == 1
    assert planned["loss_gap"] <= 1e-6
    assert (tmp_path / "a.png").stat().st_size > 1000


@nightly
@needs_quotas
@pytest.mark.parametrize("schedule", ["1f1b", "pipemare"])
def test_cuts_are_measured_with_either_end_slow(bench, schedule):
    result = bench("planner", *PLANNER, "--parts", "cuts", "--schedules", schedule)
    rows = [(row["slow"], row["system"]) for row in result["rows"]]
    assert rows == [(0, "equal"), (0, "planned"), (1, "equal"), (1, "planned")]
    for row in result["rows"]:
        assert row["schedule"] == schedule
        assert row["cuts"][0] == row["best_cuts"][0] == 0
        assert row["cuts"][-1] == row["best_cuts"][-1]
        assert len(row["stage_s"]) == len(row["predicted_stage_s"]) == 2
        assert min(row["stage_s"]) > 0


@nightly
@needs_quotas
@pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))
def test_the_planners_choice_is_measured_beside_other_axes(bench):
    options = ["--parts", "choice", "--clusters", "hosts", "--micro-steps", 2]
    rows = bench("planner", *PLANNER, *options)["rows"]
    assert [row["chosen"] for row in rows] == [True, *[False] * (len(rows) - 1)]
    assert max(row["ratio"] for row in rows) == 1
    assert len({row["system"] for row in rows}) == len(rows) > 2
