# SPDX-License-Identifier: Apache-2.0
"""Gradients, rows, ratios and model of ``benchmarks sparse``; the table and the picture."""

import numpy as np
import pytest

from benchmarks.sparse.measure import (
    Sample,
    active_blocks,
    build_result,
    make_gradient,
    ratio_interval,
)
from benchmarks.sparse.request import PATTERNS, Case, SparseRequest
from wavemare.comm.collective_queue import Statistics

CASE = Case("identical", 0.5)


def sample(seconds, executor="", **phases):
    if not executor:
        return Sample(seconds)
    statistics = Statistics(
        executor=executor, union=0.5, bytes_up=100, bytes_down=90, phases_s=phases
    )
    return Sample(seconds, statistics)


def request(mbit=8.0):
    return SparseRequest(
        ranks=2,
        mbit=mbit,
        mib=1.0,
        block=256,
        densities=(1.0, 0.5),
        patterns=("identical",),
        systems=("mpi-dense", "gloo-dense", "wavemare-auto", "torch-sparse"),
    )


def result(mbit=8.0):
    measured = {
        CASE: {
            "mpi-dense": [sample(3.0), sample(9.0), sample(4.0)],
            "gloo-dense": [sample(5.0), sample(2.0), sample(5.0)],
            "wavemare-auto": [
                sample(s, "pushpull", mask=m, push=1.0, reduce=0.1)
                for s, m in ((1.0, 0.3), (2.0, 0.1), (4.0, 0.2))
            ],
        }
    }
    return build_result(request(mbit), measured, {})


def rows(of):
    return {row["system"]: row for row in of["rows"]}


def test_ratios_are_to_the_faster_dense_system():
    found = rows(result())
    assert found["mpi-dense"]["median_s"] == 4.0
    assert {name: row["ratio"] for name, row in found.items()} == {
        "mpi-dense": 1.0,
        "gloo-dense": 0.8,
        "wavemare-auto": 2.0,
    }
    assert found["wavemare-auto"]["rounds_s"] == [1.0, 2.0, 4.0]


def test_the_model_is_bytes_over_the_rate_and_measured_kernels():
    row = rows(result())["wavemare-auto"]
    # Push and pull of half the bucket each, half of both within the rank: 0.5 MiB at 1 MB/s.
    assert row["model_s"] == pytest.approx(2**19 / 1e6 + 0.2 + 0.1)
    assert row["model"] == pytest.approx(4.0 / row["model_s"])
    assert rows(result(mbit=None))["wavemare-auto"]["model_s"] is None


def test_skipped_systems_have_a_reason():
    skipped = result()["skipped"]
    assert [(row["system"], row["density"]) for row in skipped] == [
        ("torch-sparse", 1.0),
        ("torch-sparse", 0.5),
    ]
    assert all("dense bytes" in row["reason"] for row in skipped)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("density", [1.0, 0.1, 0.0])
def test_a_gradient_has_the_density_that_its_name_says(pattern, density):
    case = Case(pattern, density)
    gradient = make_gradient(case, 64 * 1000, 64, rank=1).view(1000, 64)
    found = gradient.ne(0).any(dim=1).nonzero().flatten().numpy()
    assert np.array_equal(found, active_blocks(case, 1000, 1))
    assert len(found) == round(1000 * density)


def test_patterns_overlap_as_their_names_say():
    def union(pattern):
        ranks = [set(active_blocks(Case(pattern, 0.1), 10_000, rank)) for rank in range(4)]
        return len(set.union(*ranks))

    assert union("identical") == 1000
    assert union("random") == pytest.approx(10_000 * (1 - 0.9**4), rel=0.03)
    assert union("identical") < union("zipf") < union("random")


def test_the_interval_of_a_ratio_holds_its_median_and_narrows_with_rounds():
    assert ratio_interval([1.0, 2.0, 4.0], [2.0, 4.0, 8.0]) == (2.0, 2.0, 2.0)
    noise = np.random.default_rng(1).lognormal(0, 0.2, 60)
    few, many = (ratio_interval(np.ones(n), 1.5 * noise[:n]) for n in (6, 60))
    for low, middle, high in (few, many):
        assert low <= middle <= high
    assert many[0] < 1.5 < many[2]
    assert many[2] - many[0] < few[2] - few[0]
