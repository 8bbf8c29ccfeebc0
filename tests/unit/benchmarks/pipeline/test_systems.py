# SPDX-License-Identifier: Apache-2.0
"""What each system allows, against the libraries themselves; what theory promises."""

from unittest.mock import MagicMock

import pytest
from deepspeed.runtime.pipe.schedule import DualPipeVSchedule
from torch.distributed.pipelining import Schedule1F1B

from benchmarks.pipeline.request import BASELINE, BOUND, SYSTEMS, PipelineRequest
from wavemare.pipeline.clock.simulate import Costs, simulate
from wavemare.pipeline.plan.orders import one_f_one_b


@pytest.mark.parametrize("stages", [2, 3, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 16])
def test_the_ideal_is_what_one_f_one_b_wastes(stages, micro_batches):
    makespan = simulate(one_f_one_b(stages, micro_batches), Costs(1.0, 1.0)).makespan_s
    wasted = pytest.approx(makespan / (2 * micro_batches))
    for name, ideal in (("wavemare-pipemare", wasted), (BOUND, wasted), (BASELINE, 1.0)):
        found = SYSTEMS[name].ideal
        assert found is not None
        assert found(stages, micro_batches) == ideal


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("micro_batches", range(1, 10))
def test_too_few_micro_batches_are_those_that_the_libraries_refuse(stages, micro_batches):
    def refused(make):
        try:
            make()
        except (ValueError, AssertionError):
            return True
        return False

    request = PipelineRequest(stages=stages)
    stage = MagicMock(num_stages=stages, stage_index=0)
    torch_refuses = refused(lambda: Schedule1F1B(stage, micro_batches))
    obstacle = request.obstacle("torch-1f1b", micro_batches)
    assert (obstacle is not None) == torch_refuses
    dual_refuses = refused(lambda: DualPipeVSchedule(micro_batches, stages, 0))
    obstacle = request.obstacle("deepspeed-dualpipev", micro_batches)
    assert (obstacle is not None) == dual_refuses


@pytest.mark.parametrize(
    ("name", "idle"),
    [("interleaved", 1 / 2), ("zb-h1", 1 / 3), ("zbv", 1 / 6), ("auto-v", 1 / 6)],
)
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8)])
def test_the_ideal_of_equal_passes_is_that_of_the_closed_form(name, idle, stages, micro_batches):
    ideal = SYSTEMS[f"wavemare-{name}"].ideal
    assert ideal is not None
    found = ideal(stages, micro_batches)
    behind = stages - 1
    assert found == pytest.approx((micro_batches + behind) / (micro_batches + behind * idle))
