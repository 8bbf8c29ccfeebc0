# SPDX-License-Identifier: Apache-2.0
"""Models laid out by annotations train as they do in one process."""

import pytest

pytestmark = pytest.mark.world_size(2)

EXACT = 1e-6


def check_training(result):
    assert result["losses"] == pytest.approx(result["expected"], abs=EXACT)
    assert len(set(result["losses"])) == len(result["losses"])
    if result["difference"] is not None:
        assert result["difference"] <= EXACT


def test_three_lines_scale_a_local_model(launch_once):
    results = launch_once("annotations.py", "lines")
    expected = {
        "gpt2 pipeline": [2, 1, 1],
        "bert pipeline": [2, 1, 1],
        "gpt2 split": [1, 2, 1],
        "bert replica": [1, 1, 2],
    }
    for result in results:
        assert {name: case["degrees"] for name, case in result.items()} == expected
        for name, case in result.items():
            check_training(case)
            assert case["digest"] == results[0][name]["digest"]
    for name in ("gpt2 pipeline", "bert pipeline"):  # their embeddings are tied to their heads
        assert results[0][name]["difference"] is not None


def test_plans_are_given_in_four_ways(launch_once):
    for result in launch_once("annotations.py", "given"):
        assert len(result) == 4
        assert len({case["digest"] for case in result.values()}) == 1
        for case in result.values():
            check_training(case)


def test_what_is_refused(launch_once):
    for result in launch_once("annotations.py", "refusals"):
        assert "PlanError" in result["disagree"]
        assert "the ranks' layouts differ: rank 0 has" in result["disagree"]
        assert "cannot be read (No such file" in result["no file"]
        assert result["resumed"][0] == result["resumed"][1]
        assert result["digests"][0] == result["digests"][1]
        own, other, saved = result["plans"]
        assert own == saved != other
        assert result["layout"]
        found, expected = result["other plan"]
        assert found == pytest.approx(expected, abs=EXACT)
        assert "wavemare.parallel with names and by annotations in the program" in result["twice"]
        assert "num_layers = 7: the model has 6 layers" in result["other model"]
        assert "the layout is for 4 processes" in result["more processes"]
        assert "Start 4 processes, or change the annotations" in result["world size"]


@pytest.mark.nightly
def test_another_plan_goes_on_from_a_universal_checkpoint(launch_once):
    for result in launch_once("annotations.py", "universal"):
        first, second = result["plans"]
        assert first != second
        assert result["losses"] == pytest.approx(result["expected"], abs=EXACT)
        assert result["losses"] != pytest.approx(result["fresh"], abs=1e-3)


@pytest.mark.nightly
@pytest.mark.world_size(4)
def test_stages_splits_and_replicas_together(launch_once):
    for result in launch_once("annotations.py", "grid", ranks=4):
        assert len(result) == 6
        for name, case in result.items():
            assert "".join(map(str, case["degrees"])) == name.split()[1]
            check_training(case)
