# SPDX-License-Identifier: Apache-2.0
"""A destroyed engine leaves no thread, descriptor or process group, whenever ranks destroy it."""

import pytest

SAMPLE = ("background", "sparse_1", "local_steps", "tensor_parallel", "1f1b")
OTHERS = ("zero_0", "zero_1", "waves", "sparse", "experts")
LINKED = ("zb-h1", "zbv", "pipemare")


def check(launch, *kinds):
    finished = launch("destroyed.py", *kinds).check()
    for rank in range(2):
        for kind, left in finished.result(rank).items():
            assert left["groups"] == 0, kind
            assert max(left.values()) < 1, (kind, left)  # a library may open something once


def test_engines_leave_nothing(launch):
    check(launch, *SAMPLE)


@pytest.mark.nightly
def test_engines_of_the_other_kinds_leave_nothing(launch):
    check(launch, *OTHERS)


@pytest.mark.nightly
def test_engines_that_send_ahead_leave_nothing(launch):
    check(launch, *LINKED)


def test_engines_can_end_at_any_time(launch):
    finished = launch("destroyed.py", "times").check()
    for rank in range(2):
        found = finished.result(rank)
        # When an engine is collected, other ranks may not be ready to leave its groups.
        for case in ("collected", "refused"):
            before, after = found[case]
            assert before == after, case
        before, between, after = found["destroyed"]
        assert before == after < between
