# SPDX-License-Identifier: Apache-2.0
"""What stages send, read and leave frozen, in pipelines of three stages and every schedule."""

import pytest

SCHEDULES = ("1f1b", "zb-h1", "interleaved", "zbv", "auto", "pipemare")
INPUTS = (
    "mixed",
    "growing",
    "lengths",
    "sparse/clipped",
    "frozen 0",
    "frozen 1",
    "frozen 2/clipped",
)


def named(case, schedule):
    """Return a case's name for the program: changes of the configuration come last."""
    case, *changes = case.split("/")
    return "/".join((case, schedule, *changes))


SAMPLE = [named(case, SCHEDULES[n % 6]) for n, case in enumerate(INPUTS)]
SAMPLE += ["/1f1b/autocast", "mixed/1f1b/zero"]
ALL = [named(case, schedule) for case in INPUTS for schedule in SCHEDULES]
SPECIAL = [f"{case}/{name}" for case in ("alternating", "tied") for name in ("1f1b", "pipemare")]
SPECIAL += [f"epochs/{name}" for name in ("1f1b", "zbv", "interleaved", "pipemare")]
SPECIAL += ["connected/1f1b"]
REFUSED = ["reentrant/1f1b", "reentrant/zb-h1", "reentrant/pipemare"]
REFUSED += ["tied-sparse/1f1b", "tied-sparse/zb-h1"]


def check_equal(found):
    for name, result in found.items():
        ours, expected = result["losses"]
        assert ours == pytest.approx(expected, abs=1e-6), name
        assert result["norms"][0] == pytest.approx(result["norms"][1], rel=1e-5), name
        assert result["furthest"] < 1e-6, name
        assert len(set(expected)) == len(expected)


@pytest.mark.world_size(3)
def test_stages_train_as_one_process_whatever_they_send(launch_once):
    for found in launch_once("stage_inputs.py", *SAMPLE, *SPECIAL, *REFUSED, ranks=3):
        check_equal({name: found[name] for name in SAMPLE})


@pytest.mark.nightly
@pytest.mark.world_size(3)
def test_every_schedule_trains_as_one_process_whatever_stages_send(launch_once):
    for found in launch_once("stage_inputs.py", *ALL, ranks=3):
        check_equal(found)


@pytest.mark.world_size(3)
def test_all_schedules_read_the_same_batches_between_evaluations_and_other_readers(launch_once):
    for found in launch_once("stage_inputs.py", *SAMPLE, *SPECIAL, *REFUSED, ranks=3):
        assert found["alternating/pipemare"] == found["alternating/1f1b"]
        assert len(set(found["alternating/1f1b"])) == 6
        # The end of the data leaves no message behind.
        for name in ("zbv", "interleaved", "pipemare"):
            assert found[f"epochs/{name}"] == pytest.approx(found["epochs/1f1b"], abs=1e-6)
        # Weights tied within one stage need no other one.
        assert found["tied/pipemare"] == found["tied/1f1b"]


@pytest.mark.world_size(3)
def test_no_rank_begins_before_all_are_connected(launch_once):
    # A rank that fails in its first step closes its connections.
    for found in launch_once("stage_inputs.py", *SAMPLE, *SPECIAL, *REFUSED, ranks=3):
        (count,) = set(found["connected/1f1b"])
        assert count > 4


@pytest.mark.world_size(3)
def test_what_cannot_be_trained_is_refused_on_all_ranks(launch_once):
    ranks = list(launch_once("stage_inputs.py", *SAMPLE, *SPECIAL, *REFUSED, ranks=3))
    for name in REFUSED[:3]:
        first, *others = [found[name] for found in ranks]
        assert first.startswith("ModelError: activations = ")
        assert "use_reentrant" in first
        for other in others:
            assert other.startswith("CommError: optimizer step = 1: rank 0 left the step")
    for name in REFUSED[3:]:
        assert {found[name] for found in ranks} == {ranks[0][name]}
        assert ranks[0][name].startswith("ModelError: TiedLayerSpec = 'ends'")
