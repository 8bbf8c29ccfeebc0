# SPDX-License-Identifier: Apache-2.0
"""Messages between stages whose sender has gone on."""


def test_what_a_dropped_outbox_has_sent_arrives(launch):
    """As at the end of an engine on a stage that is ahead of its neighbour."""
    finished = launch("messages.py", timeout=60).check()
    assert finished.result(1) is True
