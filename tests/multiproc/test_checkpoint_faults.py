# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are written behind training, and refused whole where they are not what was saved."""

import shutil
import signal

import pytest

from wavemare.engine.checkpoint.manifest import complete_tags, read_manifest, verify_contents


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "cases",
    [["1", "pipemare"], pytest.param(["0", "2", "3", "pipeline"], marks=pytest.mark.nightly)],
    ids="-".join,
)
def test_training_goes_on_while_a_thread_writes_what_was(launch, tmp_path, cases):
    run = launch("checkpoint_faults.py", tmp_path / "work", "background", *cases).check()
    for rank in range(2):
        for case in cases:
            found = run.result(rank)[case]
            assert found["absent"], case
            assert found["present"], case
            assert found["later"], case
            assert found["alive"] == [], case
            front, back = found["files"]
            assert back == front, case  # the same checksums, whatever was trained meanwhile
            assert len(back) >= 3
            expected, resumed = found["losses"]
            assert resumed == expected, case
            expected, resumed = found["weights"]
            assert resumed == expected, case


@pytest.mark.world_size(2)
def test_damage_is_named_on_all_ranks_before_anything_is_loaded(launch, tmp_path):
    run = launch("checkpoint_faults.py", tmp_path / "work", "damage", "1").check()
    damaged = {
        "weights": ("mp_rank_00_model_states.pt", "the file's checksum is"),
        "moments": ("zero_pp_rank_1_mp_rank_00_optim_states.pt", "the file's checksum is"),
        "random": ("wavemare_rank_00001_state.pt", "the file's checksum is"),
        "cut": ("zero_pp_rank_1_mp_rank_00_optim_states.pt", "999 bytes instead of"),
        "missing": ("wavemare_rank_00000_state.pt", "the file is missing"),
        "extra": (
            "zero_pp_rank_2_mp_rank_00_optim_states.pt",
            "was not there when the checkpoint was complete",
        ),
    }
    for rank in range(2):
        found = run.result(rank)["1"]
        for name, (file, reason) in damaged.items():
            assert reason in found[name]["reason"], name
            assert found[name]["file"].endswith(file), name
            assert "Load the tag 'older'" in found[name]["remedy"], name
            assert found[name]["untouched"], name
        assert (found["older"], found["newer"]) == (1, 2)


@pytest.mark.world_size(1)
def test_no_file_of_a_checkpoint_can_run_code(launch, tmp_path):
    run = launch("checkpoint_faults.py", tmp_path / "work", "hostile", "1", ranks=1).check()
    found = run.result(0)["1"]
    kinds = {"model_states", "optim_states", "wavemare_rank"}
    assert all(any(kind in name for name in found) for kind in kinds)
    for name, (error, marked) in found.items():
        assert not marked, name
        if "wavemare_rank" in name and name.endswith("False"):
            continue  # a folder without our list is DeepSpeed's own, and this file is not read
        assert "cannot be read safely" in error["reason"], name
        assert "system" in error["reason"], name
        assert error["file"].endswith(name.split()[0]), name


@pytest.mark.world_size(2)
def test_a_rank_that_cannot_write_fails_the_save_on_all(launch, tmp_path):
    cases = ["foreground", "background"]
    run = launch("checkpoint_faults.py", tmp_path / "work", "full", *cases).check()
    for rank in range(2):
        for case in cases:
            found = run.result(rank)[case]
            assert len(found["errors"]) == (2 if case == "foreground" else 4)
            for error, tag in zip(found["errors"], ["two", "one", "three", "four"], strict=False):
                assert error["file"].endswith(f"/{case}/{tag}")
                assert "rank 1 could not write zero_pp_rank_1" in error["reason"]
                assert "File too large" in error["reason"]
                assert "are free there" not in error["reason"]  # the limit is one of files
            assert found["there"] == ["latest", "one", "zero_to_fp32.py", "zero_to_torch.py"] or (
                found["there"] == ["latest", "one", "zero_to_fp32.py"]
            )
            assert found["latest"] == "one"
            assert found["kept"]
            assert found["after"] == "after"


@pytest.mark.world_size(2)
def test_a_rank_that_dies_while_it_writes_is_not_waited_for(launch, tmp_path):
    run = launch("checkpoint_faults.py", tmp_path / "work", "lost", "1", own=True)
    assert run.codes == [1, -signal.SIGKILL], run.outputs
    assert "rank 0 has lost rank 1" in run.outputs[0]
    assert "has ended without a word" in run.outputs[0]
    assert complete_tags(tmp_path / "work") == []


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "case", ["foreground", pytest.param("background", marks=pytest.mark.nightly)]
)
def test_a_full_disk_ends_all_ranks_and_leaves_what_was_complete(launch, tmp_path, disk, case):
    checkpoints = disk(2048)
    run = launch("checkpoint_faults.py", checkpoints, "too_small", case, folder=tmp_path, own=True)
    assert run.codes == [2, 2], run.outputs
    said = "".join(run.outputs)
    assert "No space left on device" in said
    # Each learns of a background save's end at a step of its own, so that the first may have left,
    # and with it the store by which the second would know that all is said.
    assert 1 <= said.count("error on rank") <= (2 if case == "background" else 1)
    assert shutil.disk_usage(checkpoints).total == 2 << 20
    tags = complete_tags(checkpoints)
    assert (checkpoints / "latest").read_text() == tags[0] == f"step-{len(tags) - 1:02}"
    assert len(tags) > 0
    for tag in tags:
        verify_contents(checkpoints / tag, read_manifest(checkpoints / tag) or {})
    there = {path.name for path in checkpoints.iterdir()}
    assert there - {"latest", "zero_to_fp32.py", "zero_to_torch.py"} == set(tags)
