# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are DeepSpeed's own, whole or refused; going back to one."""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import load_file

from wavemare.files import temporary_sibling

CASES = ["1", "3", "pipeline"]


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of all cases, and the losses of the run that wrote them."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture
def run(launch, tmp_path, saved):
    def run(action, *cases, ranks=2, folder=saved):
        results = tmp_path / f"{action}-{'-'.join(cases)}".replace(":", "_")
        results.mkdir()
        return launch("checkpoints.py", folder, action, *cases, ranks=ranks, folder=results).check()

    if not any(saved.iterdir()):
        finished = run("save", *CASES)
        for rank in range(2):
            shutil.copy(finished.folder / f"rank_{rank}.json", saved / f"rank_{rank}.json")
    return run


def expected(saved, rank, case):
    return json.loads((saved / f"rank_{rank}.json").read_text())[case]


@pytest.mark.parametrize("case", ["1", "3"])
def test_zero_to_fp32_reads_our_folder_and_gives_the_exported_weights(run, saved, case):
    weights = get_fp32_state_dict_from_zero_checkpoint(str(saved / case))
    exported = load_file(saved / case / "model" / "model.safetensors")
    assert exported
    for name, tensor in exported.items():
        assert torch.equal(weights[name], tensor), name


def test_the_pipelines_layer_files_hold_the_exported_weights(run, saved):
    files = sorted((saved / "pipeline" / "first").glob("layer_*-model_states.pt"))
    held = [t for file in files for t in torch.load(file, weights_only=True).values()]
    exported = load_file(saved / "pipeline" / "model" / "model.safetensors")
    assert exported
    for name, tensor in exported.items():
        assert any(t.shape == tensor.shape and torch.equal(t, tensor) for t in held), name


@pytest.mark.world_size(2)
def test_a_client_state_that_cannot_be_kept_is_refused_by_all_ranks(run, tmp_path):
    told = run("refuse_states", "run:moe", folder=tmp_path)
    for rank in range(2):
        keys = ["client_state['universal_checkpoint_info']", "client_state['own']"]
        keys += ["lr_scheduler.state_dict()['own']", "tag", "save_dir"]
        assert told.result(rank)["run:moe"] == keys
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["good", "latest"]
    assert not list(tmp_path.glob("run?"))


@pytest.mark.world_size(1)
@pytest.mark.parametrize("case", ["1", "3", "pipeline"])
def test_names_of_folders_and_tags_are_taken_literally(run, tmp_path, case):
    found = run("odd_names", f"run:{case}", ranks=1, folder=tmp_path).result(0)[f"run:{case}"]
    names = ["d[1]/a[0]*?", "a b/5", "-ünï/x/y::z", "{a,b}"]
    assert [path for path in found if not path.endswith(".pt")] == []
    assert [path.rpartition("/")[0] for path in found] == [name for name in names for _ in range(2)]


@pytest.mark.world_size(2)
def test_a_pipeline_goes_on_from_an_exported_model(run):
    done = run("exported", "1:pipeline")
    for rank in range(2):
        found, right = done.result(rank)["1:pipeline"]
        assert found == pytest.approx(right, rel=1e-6)


@pytest.mark.world_size(2)
def test_a_checkpoint_of_another_model_is_refused_naming_a_weight(run):
    refused = run("refuse", "1:1-deep", "1:1-wide", "3:3-wide", "pipeline:pipeline-wide")
    for rank in range(2):
        deep, *wide = refused.result(rank).values()
        assert ".h.2." in deep["reason"]
        assert "None in it" in deep["reason"]
        assert all("[50, 32] in it, and [60, 32] in this run" in one["reason"] for one in wide)


@pytest.mark.world_size(1)
@pytest.mark.parametrize(
    "case",
    ["1", "pipeline", *(pytest.param(c, marks=pytest.mark.nightly) for c in ("3", "pipemare"))],
)
def test_another_topology_goes_through_the_universal_checkpoint(run, saved, tmp_path, case):
    if case == "pipemare":
        asynchronous = run("save", case).result(0)[case]["losses"]
    folder = tmp_path / "con[v]erted"
    shutil.copytree(saved / case, folder / case, ignore=shutil.ignore_patterns("model"))
    own = folder / case
    words = ["--input_folder", str(own / "first"), "--output_folder", str(own / "first_universal")]
    command = [sys.executable, "-m", "wavemare.universal", *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (own / "latest_universal").write_text("first_universal")

    losses = run("universal", case, ranks=1, folder=folder).result(0)[case]["losses"]
    before = load_file(saved / case / "model" / "model.safetensors")
    for name in ("model", *(("weights alone",) if case in ("1", "3") else ())):
        after = load_file(folder / case / name / "model.safetensors")
        assert before.keys() == after.keys() != set()
        assert all(torch.equal(before[name], after[name]) for name in before)
    if case == "pipeline":  # the same data as with two stages; the optimizer must go on as well
        assert losses == pytest.approx(expected(saved, 0, case)["losses"], rel=1e-5)
    if case == "pipemare":  # from then on two stages have stale micro-batches, and one has none
        assert losses[0] == pytest.approx(asynchronous[0], rel=1e-5)
        assert losses[1:] != pytest.approx(asynchronous[1:], rel=1e-5)
    if case == "1":  # DeepSpeed reads these files past its checkpoint engine, and unpickles freely
        for file in (folder / case / "first_universal" / "zero").rglob("exp_avg.pt"):
            torch.save(Evil(tmp_path / "marker"), file)
        error = run("refuse_universal", case, ranks=1, folder=folder).result(0)[case]
        assert "cannot be read safely" in error["reason"]
        assert not (tmp_path / "marker").exists()


@pytest.mark.world_size(1)
def test_what_a_save_that_died_has_left_is_not_in_the_next_one(launch_once, tmp_path):
    def leave():
        partial = temporary_sibling(tmp_path / "run" / "only")
        partial.mkdir(parents=True)
        (partial / "zero_pp_rank_7_mp_rank_00_optim_states.pt").write_bytes(b"of an ended rank")

    writer = multiprocessing.get_context("fork").Process(target=leave)
    writer.start()
    writer.join()
    leave()  # and by one that is alive
    launch_once("checkpoints.py", tmp_path, "again", "run:1", ranks=1)
    (alive,) = (tmp_path / "run").rglob("zero_pp_rank_7*")
    assert f"-{os.getpid()}-" in alive.parent.name
    assert list((tmp_path / "run" / "only").glob("zero_pp_rank_0*"))


SITUATIONS = [
    *(f"{what}, ZeRO {stage}" for what in ("bad", "open") for stage in range(4)),
    *("open, offload", "bad, bf16", "bad, 1f1b", "bad, pipemare"),
    "waves, sync",
    *("nothing there, None", "nothing there, none"),
]


@pytest.mark.parametrize("name", SITUATIONS)
def test_nothing_of_what_went_wrong_is_left(launch_once, name):
    for result in launch_once("going_back.py"):
        found, expected = result[name]
        assert len(found) >= 3
        assert found == expected
