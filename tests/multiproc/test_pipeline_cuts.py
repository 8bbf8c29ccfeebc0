# SPDX-License-Identifier: Apache-2.0
"""Where a pipeline is cut changes nothing of what it learns; what a stage has sent arrives."""

import pytest


def test_losses_do_not_depend_on_the_cuts(launch):
    found, second = (launched := launch("pipeline_cuts.py").check()).result(0), launched.result(1)
    for kind in ("unclipped", "clipped"):
        assert found[kind][0] == found[kind][1] == found[kind][2], kind
    for losses, exact in zip(found["ZeRO 1"], found["clipped"], strict=True):
        assert losses == pytest.approx(exact, abs=1e-6)
    # Without our section it is stock DeepSpeed, which counts the first stage's norm alone.
    assert [round(losses[1], 4) for losses in found["stock"]] == [2.3670, 2.3844, 2.3538]
    assert [round(losses[1], 4) for losses in found["clipped"]] == [2.3951] * 3
    # DeepSpeed clips to 1 where nothing is said; the difference is told where there is one.
    losses, (line,) = found["default"]
    assert "default" in line
    (given,) = found["given"]
    assert "default" not in given
    assert losses == found["clipped"][0] == second["default"][0]
    assert '"gradient_clipping": 0' in line
    assert found["default without section"] == [found["stock"][0], []]
    assert found["none told"] == [[], []]
    assert second["default"][1] == []


@pytest.mark.parametrize("then", ["go on", "end"])
def test_what_a_stage_has_sent_arrives_whatever_it_does_next(launch, then):
    """As at the end of an engine, or of a process, on a stage that is ahead of its neighbour."""
    finished = launch("messages.py", then, own=True).check()
    assert finished.result(1) is True


def test_a_send_ends_though_the_engine_that_would_receive_it_is_gone(launch):
    """Else the receiver's thread of gloo would occupy a core, and the sender wait for ever."""
    launch("messages.py", "loses", own=True).check()


@pytest.mark.parametrize("code", [3, pytest.param(0, marks=pytest.mark.nightly)])
def test_gloos_threads_do_not_abort_a_process_that_ends(launch, code):
    """They give back tensors of Python's while it ends; the interpreter's shutdown forbids it."""
    for _ in range(1 if code else 4):
        assert launch("abandoned_sums.py", str(code), own=True).codes == [code, code]
