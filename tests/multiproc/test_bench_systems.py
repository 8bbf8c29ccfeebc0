# SPDX-License-Identifier: Apache-2.0
"""The systems that are compared for speed do the same work."""

from __future__ import annotations

import pytest

from benchmarks.pipeline.request import OURS, SYSTEMS, UNGUARDED

SYNCHRONOUS = [name for name, system in SYSTEMS.items() if not system.steady]


@pytest.mark.nightly
@pytest.mark.world_size(2)
@pytest.mark.parametrize("counts", [[4], [1, 2, 4, 5]])
def test_synchronous_systems_train_what_one_process_trains(launch_once, counts):
    for rank, result in enumerate(launch_once("bench_systems.py", *counts)):
        bound, waits = result.pop("bound"), result.pop("waits")
        assert {key.split()[0] for key in result} == set(SYNCHRONOUS)
        for key, entry in result.items():
            # Muon's iteration rounds to bf16, so that the last digits of gradients may show.
            assert entry["difference"] < (1e-5 if "muon" in key else 1e-6), key
            assert entry["way"] > 1e-4, key  # it has learnt at all
            assert entry["ordered"], key
            name = key.split()[0]
            assert entry["guarded"] == (name.startswith(OURS) and UNGUARDED not in name), key
        for name, slept in waits.items():
            parts = SYSTEMS[name].parts_per_stage
            forwards = slept.pop(str(10.0 / parts))
            # A drain drops forward passes that are ahead.
            assert forwards == 4 * parts or (SYSTEMS[name].steady and forwards > 4), name
            assert slept == {str(12.0 / parts): 4 * parts, str(8.0 / parts): 4 * parts}, name
        stock = result["deepspeed-1f1b 4"]["actions"]
        sends, receives = [("SA", "RG"), ("SG", "RA")][rank]
        expected = {"L": 12, "F": 12, "B": 12, "R": 3, "S": 3, sends: 12, receives: 12}
        assert stock == {f"{rank}{kind}": number for kind, number in expected.items()}
        folded = result["deepspeed-dualpipev 4"]["actions"]
        assert {kind: folded[kind] for kind in (f"{rank}F", f"{3 - rank}F", f"{3 - rank}B")} == {
            f"{rank}F": 12,
            f"{3 - rank}F": 12,
            f"{3 - rank}B": 12,
        }
        order = [text for m in range(5) for text in (f"{rank}F{m}", f"{rank}B{m}")]
        assert bound == [*order, f"{rank}S4"]
