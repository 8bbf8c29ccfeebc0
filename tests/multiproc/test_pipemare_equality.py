# SPDX-License-Identifier: Apache-2.0
"""Real asynchronous stages compute what a version-exact simulation in one process computes."""

import json
from itertools import product

import pytest

CORRECTIONS = [("off", False), ("off", True), ("ema", False), ("ema", True)]
OPTIMIZERS = ["sgd", "momentum", "adamw"]
SIZES = [1, 2, 4]


def case(optimizer, correction, micro_batches, **others):
    mode, t1 = correction
    return {
        "optimizer": optimizer,
        "correction": mode,
        "t1": t1,
        "micro_batches": micro_batches,
        **others,
    }


# Each optimizer with each correction, and each of these with some number of micro-batches.
CHOSEN = [
    case(optimizer, correction, SIZES[(i + j) % len(SIZES)])
    for i, optimizer in enumerate(OPTIMIZERS)
    for j, correction in enumerate(CORRECTIONS)
] + [
    case("adamw", ("exact", False), 1),
    case("adamw", ("auto", False), 2, slack=1),
    case("momentum", ("auto", True), 1, warmup_steps=7, drain_interval=5),
    case("adamw", ("predict", False), 1),
    case("momentum", ("predict", True), 2, warmup_steps=5, drain_interval=7),
    case("momentum", ("exact", False), 2, error_feedback=True),
    case("momentum", ("predict", False), 1, error_feedback=True, drain_interval=9),
    case("nadam", ("off", False), 1),
    case("soap", ("exact", False), 1, error_feedback=True),
    case("soap", ("predict", False), 1, error_feedback=True),
    case("soap", ("predict", False), 2),
    case("muon", ("exact", False), 1, error_feedback=True),
    case("muon", ("off", False), 2, error_feedback=True),
    case("muon", ("predict", False), 2, error_feedback=True),
]
ALL = [case(*chosen) for chosen in product(OPTIMIZERS, CORRECTIONS, SIZES)]


def check(launch_once, num_stages, steps, cases, **options):
    words = [num_stages, steps, json.dumps(cases)]
    results = launch_once("pipemare_equality.py", *words, ranks=num_stages, **options)
    for rank, result in enumerate(results):
        for chosen, found in zip(cases, result, strict=True):
            # A synchronous pipeline ends elsewhere: the simulation is no trivial one.
            assert found["staleness"] > 1e-4, (rank, chosen, found)
            assert found["weights"] <= 1e-6, (rank, chosen, found)
            assert found["losses"] <= 1e-6, (rank, chosen, found)


def test_real_processes_equal_the_simulation_of_versions(launch_once):
    check(launch_once, 2, 16, CHOSEN)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("part", range(3))  # idle threads of gloo would fill the cores of one
def test_every_combination_equals_the_simulation(launch_once, num_stages, part):
    check(launch_once, num_stages, 50, (ALL + CHOSEN)[part::3], timeout=800)
