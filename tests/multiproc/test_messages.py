# SPDX-License-Identifier: Apache-2.0
"""Messages between stages whose sender has gone on."""

import pytest


@pytest.mark.parametrize("then", ["go on", "end"])
def test_what_a_stage_has_sent_arrives_whatever_it_does_next(launch, then):
    """As at the end of an engine, or of a process, on a stage that is ahead of its neighbour."""
    finished = launch("messages.py", then, own=True).check()
    assert finished.result(1) is True


@pytest.mark.parametrize("code", [3, pytest.param(0, marks=pytest.mark.nightly)])
def test_gloos_threads_do_not_abort_a_process_that_ends(launch, code):
    """They give back tensors of Python's while it ends; the interpreter's shutdown forbids it."""
    for _ in range(1 if code else 4):
        assert launch("abandoned_sums.py", str(code), own=True).codes == [code, code]
