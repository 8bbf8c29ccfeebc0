# SPDX-License-Identifier: Apache-2.0
"""The gradients of ``wavemare bench sparse``."""

import numpy as np
import pytest

from wavemare.bench.sparse.gradients import active_blocks, make_gradient
from wavemare.bench.sparse.request import PATTERNS, Case


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("density", [1.0, 0.1, 0.0])
def test_a_gradient_has_the_density_that_its_name_says(pattern, density):
    case = Case(pattern, density)
    gradient = make_gradient(case, 64 * 1000, 64, rank=1).view(1000, 64)
    found = gradient.ne(0).any(dim=1).nonzero().flatten().numpy()
    assert np.array_equal(found, active_blocks(case, 1000, 1))
    assert len(found) == round(1000 * density)


def test_patterns_overlap_as_their_names_say():
    def union(pattern):
        ranks = [set(active_blocks(Case(pattern, 0.1), 10_000, rank)) for rank in range(4)]
        return len(set.union(*ranks))

    assert union("identical") == 1000
    assert union("random") == pytest.approx(10_000 * (1 - 0.9**4), rel=0.03)
    assert union("identical") < union("zipf") < union("random")
