# SPDX-License-Identifier: Apache-2.0
"""What ``wavemare bench whale`` may be asked, and the devices that are made of the cores."""

from typing import Any

import pytest

from wavemare.bench.whale.request import WhaleJob, WhaleRequest, device_shares
from wavemare.errors import ConfigError


def test_devices_share_the_cores_by_their_speeds() -> None:
    assert device_shares((2, 1), 1.35) == pytest.approx((0.9, 0.45))
    assert device_shares((2, 2, 1, 1), 1.35) == pytest.approx((0.45, 0.45, 0.225, 0.225))
    assert device_shares((1, 2, 2, 2), 1.35) == pytest.approx(
        (0.1929, 0.3857, 0.3857, 0.3857), abs=1e-4
    )
    # However many cores there are, a rank of one thread has some rest.
    assert device_shares((2, 1), 64) == pytest.approx((0.9, 0.45))


def test_half_of_the_ranks_share_less_and_either_end_of_a_pipeline_is_slow() -> None:
    jobs = list(WhaleRequest(ranks=(2,), schedules=("1f1b", "pipemare"), factor=3.0).jobs(2))
    assert [(job.part, job.schedule, job.ranks) for job in jobs] == [
        ("shares", "1f1b", 2),
        ("cuts", "1f1b", 2),
        ("cuts", "pipemare", 2),
        ("cuts", "1f1b", 2),
        ("cuts", "pipemare", 2),
    ]
    speeds = [job.devices[0] / job.devices[1] for job in jobs]
    assert speeds == pytest.approx([3, 1 / 3, 1 / 3, 3, 3])
    assert all(sum(job.devices) <= 0.675 * 2 for job in jobs)


def test_the_planner_is_tried_on_four_ranks() -> None:
    request = WhaleRequest(clusters=("unlike", "hosts"))
    (first, unlike), (second, hosts) = request.cluster_jobs(2)
    assert (first, second) == ("unlike", "hosts")
    assert unlike.devices == pytest.approx((0.45, 0.45, 0.225, 0.225))
    assert hosts.devices == pytest.approx((0.3375,) * 4)
    assert not [job for job in request.jobs(2) if job.part == "choice"]


def test_a_job_travels_as_text() -> None:
    (job, *_) = WhaleRequest(ranks=(4,), layers=5).jobs(2)
    assert WhaleJob.from_json(job.to_json()) == job
    assert job.layers == 5


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--parts", {"parts": ()}),
        ("--parts", {"parts": ("share",)}),
        ("--schedules", {"schedules": ("gpipe",)}),
        ("--clusters", {"clusters": ("unlik",)}),
        ("--mbit", {"mbit": 0.0}),
        ("--ranks", {"ranks": ()}),
        ("--ranks", {"ranks": (1,)}),
        ("--ranks", {"ranks": (2, 3)}),
        ("--layers", {"ranks": (4,), "layers": 3}),
        ("--rounds", {"rounds": 0}),
        ("--warmups", {"warmups": -1}),
        ("--sequence", {"sequence": 1}),
        ("--micro-steps", {"micro_steps": 0}),
        ("--factor", {"factor": 0.5}),
        ("--load", {"load": 1.5}),
        ("--hidden", {"hidden": 130}),
    ],
)
def test_what_cannot_be_is_refused_by_its_option(option: str, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        WhaleRequest(**values).check()
    assert caught.value.key == option


def test_the_defaults_and_pipelines_of_odd_length_are_allowed() -> None:
    WhaleRequest().check()
    WhaleRequest(parts=("cuts",), ranks=(3,)).check()
