# SPDX-License-Identifier: Apache-2.0
"""Costs that are measured are those that the actions had."""

from dataclasses import fields

import pytest

from wavemare.pipeline.clock.simulate import Costs, measured_costs, simulate
from wavemare.pipeline.plan.automatic import automatic
from wavemare.pipeline.plan.orders import zb_h1, zbv


@pytest.mark.parametrize("plan", [zbv(4, 8), automatic(2, 4), zbv(1, 2), zb_h1(3, 4)])
def test_the_times_of_a_simulation_give_its_costs(plan):
    stages = range(plan.num_stages)
    costs = Costs(
        forward_s=tuple(1.0 + s for s in stages),
        backward_s=tuple(3.0 + s % 3 for s in stages),
        weight_s=tuple(1.0 + s % 2 for s in stages),
        send_s=0.25 if len(plan.ranks) > 1 else 0.0,
    )
    # Three steps, each rank by its own clock, and one pass of each rank that was held up.
    ranks = []
    for rank, events in enumerate(simulate(plan, costs).ranks):
        steps = [e._replace(start_s=e.start_s + 7 * rank, end_s=e.end_s + 7 * rank) for e in events]
        ranks.append(steps * 3)
        ranks[-1][-2] = steps[-2]._replace(end_s=steps[-2].end_s + 100)
    found = measured_costs(ranks, tuple(plan.rank_of))
    for field in fields(Costs):
        expected = costs.of(field.name, plan.num_stages)
        assert found.of(field.name, plan.num_stages) == pytest.approx(expected)
