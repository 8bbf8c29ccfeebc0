# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing in the asynchronous engine: what the recomputation sees."""

from itertools import product

import pytest

STEPS, LAYERS = 6, 2
CHECKPOINTING = ["non-reentrant", "reentrant"]
DROPOUT = [0.0, 0.2]


@pytest.mark.parametrize("num_stages", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_recomputed_activations_are_the_first_ones_where_weights_are_exact(launch_once, num_stages):
    results = launch_once("pipemare_recompute.py", num_stages, ranks=num_stages)
    for stage, ours in enumerate(results):
        staleness = num_stages - 1 - stage
        for kind, dropout in product(CHECKPOINTING, DROPOUT):
            exact, off = (ours[f"{kind} {mode} {dropout}"] for mode in ("exact", "off"))
            for found in (exact, off):
                # The last step has forwarded so many micro-batches ahead; each of the others was
                # recomputed.
                once = (STEPS + staleness) * LAYERS
                assert found["forwards"] == [once, once + STEPS * LAYERS], (stage, kind)
            assert (exact["weights"], exact["losses"]) == (0.0, 0.0), (stage, kind, dropout)
            # With the newest weights the activations are others than those that were sent on.
            assert off["losses"] > 1e-5, (stage, kind, dropout)
            assert off["weights"] > 1e-4, (stage, kind, dropout)
        for kind, mode in product(CHECKPOINTING, ("exact", "off")):
            without, dropped = (ours[f"{kind} {mode} {dropout}"]["last"] for dropout in DROPOUT)
            assert abs(without - dropped) > 1e-3  # dropout takes place
