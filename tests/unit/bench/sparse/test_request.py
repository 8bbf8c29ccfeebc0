# SPDX-License-Identifier: Apache-2.0
"""What may be asked of ``wavemare bench sparse``, and the gradients that come of it."""

from typing import Any

import numpy as np
import pytest

from wavemare.bench.sparse.gradients import active_blocks, make_gradient
from wavemare.bench.sparse.request import PATTERNS, SYSTEMS, Case, SparseRequest
from wavemare.errors import ConfigError


def test_the_default_is_valid_and_travels_as_json() -> None:
    request = SparseRequest()
    request.check()
    assert SparseRequest.from_json(request.to_json()) == request
    other = SparseRequest(ranks=2, mbit=200.0, densities=(0.5,), systems=("wavemare-auto-gloo",))
    other.check()
    assert SparseRequest.from_json(other.to_json()) == other


@pytest.mark.parametrize(
    ("values", "option", "named"),
    [
        ({"ranks": 1}, "--ranks", "2 or more"),
        ({"mbit": 0.0}, "--mbit", "more than 0"),
        ({"mebibytes": -1.0}, "--mib", "more than 0"),
        ({"block": 0}, "--block", "1 or more"),
        ({"rounds": 0}, "--rounds", "1 or more"),
        ({"warmups": -1}, "--warmups", "0 or more"),
        ({"densities": ()}, "--densities", "0 to 1"),
        ({"densities": (0.1, 1.5)}, "--densities", "0 to 1"),
        ({"patterns": ("zipff",)}, "--patterns", "'zipf'"),
        ({"patterns": ()}, "--patterns", "random"),
        ({"systems": ("wavemare-pushpul",)}, "--systems", "wavemare-pushpull"),
        ({"systems": ()}, "--systems", "gloo-dense"),
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, Any], option: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SparseRequest(**values).check()
    assert caught.value.key == option
    assert named in str(caught.value)


def test_all_patterns_are_one_where_nothing_is_zero() -> None:
    cases = SparseRequest(densities=(1.0, 0.1)).cases
    assert cases == [Case("random", 1.0), *(Case(pattern, 0.1) for pattern in PATTERNS)]


def test_systems_that_multiply_the_bytes_are_left_out_of_dense_cases() -> None:
    request = SparseRequest()
    left_out = {name for name in SYSTEMS if request.obstacle(name, Case("random", 1.0))}
    assert {"torch-sparse", "deepspeed-sparse", "wavemare-agsparse-gloo"} <= left_out
    assert not any(request.obstacle(name, Case("random", 0.4)) for name in SYSTEMS)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("density", [1.0, 0.1, 0.0])
def test_a_gradient_has_the_density_that_its_name_says(pattern: str, density: float) -> None:
    case = Case(pattern, density)
    gradient = make_gradient(case, 64 * 1000, 64, rank=1).view(1000, 64)
    found = gradient.ne(0).any(dim=1).nonzero().flatten().numpy()
    assert np.array_equal(found, active_blocks(case, 1000, 1))
    assert len(found) == round(1000 * density)


def test_patterns_overlap_as_their_names_say() -> None:
    def union(pattern: str) -> int:
        ranks = [set(active_blocks(Case(pattern, 0.1), 10_000, rank)) for rank in range(4)]
        return len(set.union(*ranks))

    assert union("identical") == 1000
    assert union("random") == pytest.approx(10_000 * (1 - 0.9**4), rel=0.03)
    assert union("identical") < union("zipf") < union("random")
