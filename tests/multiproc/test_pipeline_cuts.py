# SPDX-License-Identifier: Apache-2.0
"""Where a pipeline is cut changes nothing of what it learns, with clipping neither."""

import pytest


def test_losses_do_not_depend_on_the_cuts(launch):
    found = launch("pipeline_cuts.py").check().result(0)
    for kind in ("unclipped", "clipped"):
        assert found[kind][0] == found[kind][1] == found[kind][2], kind
    for losses, exact in zip(found["ZeRO 1"], found["clipped"], strict=True):
        assert losses == pytest.approx(exact, abs=1e-6)
    # Without our section it is stock DeepSpeed, which counts the first stage's norm alone.
    assert [round(losses[1], 4) for losses in found["stock"]] == [2.3670, 2.3844, 2.3538]
    assert [round(losses[1], 4) for losses in found["clipped"]] == [2.3951] * 3
