# SPDX-License-Identifier: Apache-2.0
"""Run DeepSpeed's own unit tests with `wavemare.initialize` in the place of `deepspeed.initialize`.

python tests/tools/conformance.py .deepspeed/tests  # goes on where it was stopped

Each file runs once for each mode, in a process of its own, on CPU with gloo; as a plugin of pytest
this module makes the replacement, in the processes that the tests fork as well.
"""

import argparse
import json
import multiprocessing
import os
import platform
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

PAGE = Path("docs/results/conformance.md")
RESULTS = PAGE.with_suffix(".json")
SECTIONS = {
    "sparse": {"sparse_collective": {"mode": "auto"}},
    "pipemare": {"pipeline": {"schedule": "pipemare", "pipemare": {"warmup_steps": 1_000_000}}},
    "1f1b": {"pipeline": {"schedule": "1f1b"}},
}
MODES = ("stock", "ours", *SECTIONS)
# Files of tests/unit by what else they run with; those that compute no training step have none.
_STAGES = """
pipe/test_pipe_module checkpoint/test_pipeline runtime/pipe/test_pipe
"""
_TRAIN = """
runtime/test_ds_config_dict checkpoint/test_latest_checkpoint checkpoint/test_other_optimizer
checkpoint/test_shared_weights runtime/test_data_efficiency runtime/test_multi_output_model
runtime/test_multiple_models runtime/test_data checkpoint/test_sparse
checkpoint/test_lr_scheduler runtime/test_ds_initialize
runtime/sparse_tensor/test_averaging_sparse_gradients runtime/sparse_tensor/test_sparse_grads
runtime/zero/test_ignore_unused_parameters checkpoint/test_zero_optimizer
v1/half_precision/test_bf16
"""
_PLAIN = """
checkpoint/test_moe_checkpoint checkpoint/test_tag_validation
checkpoint/test_reshape_checkpoint runtime/pipe/test_pipe_schedule runtime/pipe/test_topology
v1/moe/test_moe comm/test_dist runtime/test_pld runtime/test_ds_config_model
runtime/test_no_sync_ctxt checkpoint/test_convert_checkpoint runtime/zero/test_zero_grad_clip
runtime/zero/test_unwrap_model runtime/test_lr_schedulers runtime/test_mup_optimizers
v1/half_precision/test_gradient_clipping_default v1/moe/test_moe_tp comm/test_comms_logger
checkpoint/test_mics_optimizer checkpoint/test_universal_checkpoint
v1/moe/test_autoep_checkpoint model_parallelism/test_configurable_parallel_pp
model_parallelism/test_configurable_parallel_mp
"""
FILES = {
    f"{name}.py": sections
    for names, sections in ((_STAGES, tuple(SECTIONS)), (_TRAIN, ("sparse",)), (_PLAIN, ()))
    for name in names.split()
}
_SHUFFLED = (
    "with a wavemare section, pipelines read training_data in the shuffled order of the "
    "data-parallel engine, so that consecutive rows have other lengths"
)
_CHANGE = "TestZeROElasticCheckpoint::test_elastic_checkpoint_change_dp"
_RESIZED = (
    "the test expects that states of ZeRO 2 are refused with another number of ranks; "
    "load_checkpoint brings them to it"
)
CANNOT = {
    **{
        (mode, "runtime/pipe/test_pipe.py::TestPipeDynamicShape::test_pipe_base"): _SHUFFLED
        for mode in SECTIONS
    },
    ("pipemare", "pipe/test_pipe_module.py::TestPipeModuleSequential::test["): (
        "PipeMare adds the missing batch sizes to engine.config, but checkpointing.configure "
        "reads them as if every rank were a replica"
    ),
    **{
        (mode, f"test_zero_optimizer.py::{_CHANGE}[True-"): _RESIZED  # it loads their states
        for mode in ("ours", "sparse")
    },
}
"""Tests that pass with stock DeepSpeed and cannot with ours: a mode, a name's beginning, why."""


def replace_initialize(mode):
    """Put `wavemare.initialize`, with a section of this mode, where tests find DeepSpeed's."""
    import deepspeed
    import torch
    import torch._dynamo  # which each process would import at its first optimizer
    from deepspeed.accelerator import get_accelerator

    # Ops that want a compiler: tests that need them are skipped, gloo does without.
    compiled = deepspeed.ops.__compatible_ops__
    compiled.update(dict.fromkeys(compiled, False))
    deepspeed.DeepSpeedEngine.sparse_tensor_module_names = frozenset()  # older tests compare it
    type(get_accelerator()).is_fp16_supported = lambda _: True  # torch computes it, if slowly
    torch.cpu.get_rng_state = lambda *_: torch.get_rng_state()  # which fork_rng asks for
    torch.cpu.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    if mode == "stock":
        return
    import _pytest.python_api  # of pytest before 8.4, whose fixtures these tests need

    import wavemare
    from wavemare.engine.initialize import read_config

    def fail(reason):  # pytest's own is no Exception, at which a pool's process ends in silence
        raise AssertionError(reason)

    _pytest.python_api.fail = fail  # of pytest.raises
    stock = deepspeed.initialize

    def initialize(*args, **kwargs):
        staged = isinstance(kwargs.get("model"), deepspeed.PipelineModule)
        if mode in SECTIONS and (mode == "sparse" or staged):
            names = ("config", "config_params")
            given = [kwargs.pop(name, None) for name in names]
            config = read_config(kwargs.get("args"), *given)
            kwargs["config"] = {**config, "wavemare": SECTIONS[mode]}
            for name in ("deepspeed_config", "deepscale_config"):
                if hasattr(kwargs.get("args"), name):
                    setattr(kwargs["args"], name, None)
        deepspeed.initialize = stock  # which ours calls
        try:
            return wavemare.initialize(*args, **kwargs)
        finally:
            deepspeed.initialize = initialize

    deepspeed.initialize = initialize


def read_log(log):
    """Return the outcome of each test in a log of the plugin; one without an end has hung."""
    found = {}
    for line in log.read_text().splitlines() if log.exists() else ():
        name, outcome, message = json.loads(line)
        found[name] = [outcome, message if outcome == "failed" else ""]
    return found


if "CONFORMANCE_MODE" in os.environ:  # in pytest, and in the server that forks its processes
    replace_initialize(os.environ["CONFORMANCE_MODE"])
    LOG = Path(os.environ["CONFORMANCE_LOG"])

    def pytest_configure(config):
        multiprocessing.set_forkserver_preload(["conformance", "torch.multiprocessing"])
        import torch.multiprocessing as processes

        start = processes.set_start_method
        processes.set_start_method = lambda _, force: start("forkserver", force=True)

    def pytest_collection_modifyitems(items):
        done = read_log(LOG)
        items[:] = [item for item in items if item.nodeid not in done]

    def note(name, outcome, message=""):
        with LOG.open("a") as file:
            for folder in (Path.cwd(), Path(os.__file__).parent):  # of this machine alone
                message = message.replace(f"{folder}/", "")
            file.write(json.dumps([name, outcome, message[:300]]) + "\n")

    def pytest_collectreport(report):
        if report.outcome != "passed":  # a whole file is skipped, or cannot be imported
            note(report.nodeid, report.outcome, str(report.longrepr))

    def pytest_runtest_logstart(nodeid):
        note(nodeid, "hung")

    def pytest_runtest_logreport(report):
        if report.when == "call" or report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            note(report.nodeid, report.outcome, crash.message if crash else str(report.longrepr))


def run(tests, file, mode, log):
    """Run what a log does not have of a file, again after each test that hung."""
    tools = Path(__file__).resolve().parent
    environment = {
        **os.environ,
        "CONFORMANCE_MODE": mode,
        "CONFORMANCE_LOG": str(log.resolve()),
        "PYTHONPATH": os.pathsep.join([str(tools), os.environ.get("PYTHONPATH", "")]),
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": "4",  # so many processes a test may start
        "DS_UNITTEST_TIMEOUT": "400",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conformance", "--timeout=460"]
    command += ["-p", "no:cacheprovider", f"unit/{file}"]
    before = -1
    while len(read_log(log)) > before:
        before = len(read_log(log))
        with log.with_suffix(".out").open("a") as output:
            done = subprocess.run(
                command, cwd=tests, env=environment, stdout=output, stderr=output, check=False
            )
        if done.returncode not in (0, 1, 2, 5) and not read_log(log):  # pytest itself failed
            raise SystemExit(log.with_suffix(".out").read_text())
        if done.returncode in (0, 1, 5) and "hung" not in dict(read_log(log).values()):
            break


def outcome_of(found, stock=None):
    """Return a table's cell, and the tests that differ from stock DeepSpeed's."""
    counts = Counter(outcome for outcome, _ in found.values())
    cell = " / ".join(str(counts[name]) for name in ("passed", "failed", "skipped"))
    if counts["hung"]:
        cell += f" / {counts['hung']} hung"
    passed = [name for name, (outcome, _) in (stock or {}).items() if outcome == "passed"]
    return cell, [name for name in passed if found.get(name, ["missing"])[0] != "passed"]


def reason_of(name, mode, message):
    """Return why a test cannot pass; a section that is refused by its name says so itself."""
    if mode in SECTIONS and "ConfigError: " in message and "wavemare." in message:
        return "refused: " + message.split("ConfigError: ")[1].splitlines()[0]
    excused = (why for (kind, start), why in CANNOT.items() if kind == mode and start in name)
    return next(excused, None)


def show(results):
    """Write the page; return the tests that differ without a reason."""
    rows, listed, unexplained = [], [], []
    files = results["files"].values()
    stock = [name for modes in files for name in outcome_of({}, modes["stock"])[1]]
    differ = sum(len(outcome_of(m["ours"], m["stock"])[1]) for m in files if "ours" in m)
    for file, modes in results["files"].items():
        cells = []
        for mode in MODES:
            found = modes.get(mode)
            cell, differing = outcome_of(found or {}, modes["stock"])
            cells.append(cell if found else "")
            for name in differing if found else ():
                message = found.get(name, ["", "it was not run"])[1]
                reason = reason_of(name, mode, message)
                (listed if reason else unexplained).append((mode, name, reason or message))
        rows.append(f"| `{file}` | " + " | ".join([*cells, modes["dates"].get("ours", "")]) + " |")
    lines = [
        "# DeepSpeed's own unit tests",
        "",
        f"Of {len(stock)} tests that pass with stock DeepSpeed, {len(stock) - differ} also pass "
        "with `wavemare.initialize` in place of `deepspeed.initialize`. "
        "[How to run the tests](../CONTRIBUTING.md):",
        "",
        "```bash",
        "make conformance DEEPSPEED_TESTS=FOLDER",
        "```",
        "",
        f"This was measured on {results['date']}, on {results['machine']}, with DeepSpeed "
        f"{results['deepspeed']}. The tests are those of its repository at version "
        f"{results['tests']}, the newest that was publicly available. Tests that fail with stock "
        "DeepSpeed test features that 0.19.8 no longer has. In all columns, the CPU computes fp16, "
        "and operators that need a compiler are off.",
        "",
        "Each cell has the numbers of tests that passed / failed / were skipped:",
        "",
        "* *ours*: `wavemare.initialize` without a `wavemare` section;",
        "* *sparse*: the same with `sparse_collective` in the mode `auto`;",
        "* *PipeMare*: the same with PipeMare, which `warmup_steps` keeps synchronous;",
        "* *1F1B*: the same with wavemare's 1F1B;",
        "* *day of ours*: when *ours* was run. Other columns may be older; `conformance.json` has "
        "the day of each.",
        "",
        "| file of tests/unit | stock | ours | sparse | PipeMare | 1F1B | day of ours |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        f"In all columns, {len(listed)} tests that pass with stock DeepSpeed cannot pass, for the "
        f"reasons below. {len(unexplained)} fail for other reasons.",
        "",
        "| mode | file | test | why |",
        "|---|---|---|---|",
    ]
    groups: dict[tuple[str, str, str], list[str]] = {}
    for mode, name, why in [*listed, *unexplained]:
        file, _, test = name.removeprefix("unit/").partition("::")
        groups.setdefault((mode, file, why), []).append(test)
    for (mode, file, why), tests in groups.items():
        text = why.replace("|", "\\|").replace("\n", " ").replace("<", "\\<")
        more = f" and {len(tests) - 1} more" if len(tests) > 1 else ""
        lines.append(f"| {mode} | `{file}` | `{tests[0]}`{more} | {text} |")
    left = [f"`{file}`" for file in FILES if "ours" not in results["files"].get(file, {})]
    if left:
        lines += ["", f"Not run with ours yet: {', '.join(left)}."]
    PAGE.write_text("\n".join(lines) + "\n")
    return unexplained


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tests", type=Path, help="the folder tests of DeepSpeed's repository")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--only", default="", help="files with this in their names")
    parser.add_argument("--logs", type=Path, default=Path("build/conformance"))
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    release = options.tests.parent / "version.txt"
    results = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} {platform.machine()} cores, no GPU",
        "deepspeed": version("deepspeed"),
        "tests": release.read_text().strip() if release.exists() else "unknown",
        "files": {},
    }
    if RESULTS.exists():  # what other runs have found of these versions stays
        found = json.loads(RESULTS.read_text())
        if all(found[key] == results[key] for key in ("deepspeed", "tests")):
            results["files"] = found["files"]
            for modes in results["files"].values():
                modes.setdefault("dates", {mode: found["date"] for mode in modes})
    for file, sections in FILES.items():
        found = results["files"].pop(file, {})
        for mode in ("stock", "ours", *sections):
            log = options.logs / f"{mode}-{file.replace('/', '-')}l"
            if options.only in file and mode in options.modes:
                run(options.tests, file, mode, log)
            if outcomes := read_log(log):
                found[mode] = outcomes
                day = datetime.fromtimestamp(log.stat().st_mtime, UTC).date()
                found.setdefault("dates", {})[mode] = day.isoformat()
        if "stock" in found:
            results["files"][file] = found
            RESULTS.write_text(json.dumps(results, indent=0) + "\n")
    unexplained = show(results)
    for mode, name, message in unexplained:
        print(f"{mode}: {name}: {message.splitlines()[0] if message else ''}")
    return bool(unexplained)


if __name__ == "__main__":
    sys.exit(main())
