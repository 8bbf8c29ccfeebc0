# SPDX-License-Identifier: Apache-2.0
"""Weights that are loaded without the optimizer's states are those that training goes on from."""

import subprocess
import sys

import pytest

CASES = ("0-bf16", "2", "3-bf16", "1f1b-bf16", "local_steps-bf16")
NIGHTLY = ("0", "1", "1-bf16", "2-bf16", "1f1b-1-bf16", "pipemare-bf16")
OTHERS = ("others:1", "others:2", "others:3", "others:1f1b-1-bf16")
UNIVERSAL = ("1-bf16", "1f1b-1-bf16")


def check(found, ways):
    assert found.keys() == ways
    for way, (before, loaded, stepped) in found.items():
        assert before > 0.01, way  # else nothing would have to be loaded
        assert (loaded, stepped) == (0, 0), way


def check_others(case, found):
    """Whether the states of an optimizer of other weights were refused, and the remedy works."""
    assert len(found) == 4
    for name, (refused, alone, difference) in found.items():
        assert "wpe.weight" in refused or name not in {"thawed", "frozen"}, name
        if case == "others:3" and name in {"swapped", "frozen"}:
            assert "save_pretrained" in refused, name
            assert alone == refused, name
        else:
            assert ("load_optimizer_states=False" in refused) == (case != "others:3"), name
            assert refused, name
            assert (alone, difference) == ("", 0), name


def run_all(launch, folder, *cases):
    finished = launch("weights_alone.py", folder, "ways", *cases).check()
    for rank in range(2):
        for case, found in finished.result(rank).items():
            if case in OTHERS:
                check_others(case, found)
                continue
            ways = {"states", "module"} if case != "local_steps-bf16" else set()
            ways |= {"dictionary"} if case != "3-bf16" else set()
            local = {"3-bf16", "local_steps-bf16"}  # of parts, and of weights to be averaged
            if case not in local:
                ways |= {"module's own", "a part"}
                ways |= {"in place"} if "pipemare" not in case else set()
                ways |= {"nearly"} if case in ("0", "1", "2") else set()
            check(found, ways)


def test_a_step_of_learning_rate_0_leaves_the_loaded_weights(launch, tmp_path):
    run_all(launch, tmp_path / "saved", *CASES, *OTHERS)


@pytest.mark.nightly
def test_it_does_so_in_other_wrappers_and_schedules(launch, tmp_path):
    run_all(launch, tmp_path / "saved", *NIGHTLY)


@pytest.mark.nightly
def test_it_does_so_after_a_universal_checkpoint(launch, tmp_path):
    command = "weights_alone.py", tmp_path / "saved", "universal", *UNIVERSAL
    launch(*command).check()
    for case in UNIVERSAL:
        folder = tmp_path / "saved" / case
        words = ["--input_folder", folder / "plain", "--output_folder", folder / "universal"]
        subprocess.run([sys.executable, "-m", "wavemare.universal", *words], check=True)
    finished = launch(*command).check()
    for rank in range(2):
        for found in finished.result(rank).values():
            check(found, {"universal"})
