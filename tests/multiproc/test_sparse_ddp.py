# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel through the sparse collective trains as by itself, bit for bit."""

import pytest

CASES = ["plain", "auto", "static", "views", "unused", "accumulation", "types", "sparse"]
OTHERS = ["compressed", "mismatch"]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, ["plain", "auto", "unused", "types", "sparse", *OTHERS]),
        (3, ["plain", "accumulation", "sparse"]),
        pytest.param(2, [*CASES, *OTHERS], marks=pytest.mark.nightly),
        pytest.param(3, [*CASES, *OTHERS], marks=pytest.mark.nightly),
    ],
)
def test_ddp_through_the_hook_equals_plain_ddp_bitwise(launch_once, ranks, cases):
    results = launch_once("sparse_ddp.py", *cases, ranks=ranks)
    for case in set(cases) - set(OTHERS):
        for result in results:
            assert result[case]["ordered"] == 0.0, case
            assert result[case]["weights"] == results[0][case]["weights"], case
            assert result[case]["calls"] > 6, f"{case} has one bucket alone"
        if ranks == 2:  # the sum of two has one order
            assert results[0][case]["torch"] == 0.0, case
    executors = results[0]["sparse"]["executors"]
    assert any(name.startswith("rows-") for name in executors)
    if "compressed" in cases:
        check_compressed(results)
        for result in results:
            kind, text = result["mismatch"]["error"]
            assert kind == "CommError", text
            assert "allreduce_(20 float32" in text


def check_compressed(results):
    for result in (each["compressed"] for each in results):
        # DDP's buckets of the first step after a resume are others than before it.
        assert result["resumed"] == result["whole"] == results[0]["compressed"]["whole"]
        assert result["forgetful"] != result["whole"]
        assert result["waiting"] > 0
        assert "layers.1.weight" in result["names"]


@pytest.mark.world_size(2)
def test_uneven_data_trains_as_without_the_hook(launch_once):
    results = launch_once("sparse_ddp_join.py")
    assert results[0] == results[1]
    assert results[0]["hooked"] == results[0]["plain"]
