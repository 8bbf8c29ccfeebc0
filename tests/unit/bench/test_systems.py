# SPDX-License-Identifier: Apache-2.0
"""What each system allows, against the libraries themselves; what theory promises."""

from unittest.mock import MagicMock

import pytest
from deepspeed.runtime.pipe.schedule import DualPipeVSchedule
from torch.distributed.pipelining import Schedule1F1B

from wavemare.bench.systems import BASELINE, BOUND, SYSTEMS


def slots_of_one_f_one_b(stages: int, micro_batches: int) -> int:
    """Play 1F1B with unit costs, slot by slot, and return the slots until all is done."""
    orders = []
    for stage in range(stages):
        warm = min(stages - stage, micro_batches)
        order = [("F", m) for m in range(warm)]
        for m in range(micro_batches):
            order.append(("B", m))
            if warm + m < micro_batches:
                order.append(("F", warm + m))
        orders.append(order)
    done: set[tuple[int, str, int]] = set()
    slots = 0
    while any(orders):
        ready = []
        for stage, order in enumerate(orders):
            if not order:
                continue
            kind, number = order[0]
            before, end = (stage - 1, -1) if kind == "F" else (stage + 1, stages)
            if before == end or (before, kind, number) in done:
                ready.append((stage, kind, number))
        for stage, kind, number in ready:
            orders[stage].pop(0)
            done.add((stage, kind, number))
        slots += 1
    return slots


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 5, 16])
def test_the_ideal_is_what_one_f_one_b_wastes(stages: int, micro_batches: int) -> None:
    ideal = SYSTEMS["wavemare-pipemare"].ideal
    assert ideal is not None
    wasted = slots_of_one_f_one_b(stages, micro_batches) / (2 * micro_batches)
    assert ideal(stages, micro_batches) == pytest.approx(wasted)
    bound, baseline = SYSTEMS[BOUND].ideal, SYSTEMS[BASELINE].ideal
    assert bound is not None
    assert baseline is not None
    assert bound(stages, micro_batches) == ideal(stages, micro_batches)
    assert baseline(stages, micro_batches) == 1.0


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("micro_batches", range(1, 10))
def test_too_few_micro_batches_are_those_that_the_libraries_refuse(
    stages: int, micro_batches: int
) -> None:
    def refused(make: object) -> bool:
        try:
            make()  # type: ignore[operator]
        except (ValueError, AssertionError):
            return True
        return False

    stage = MagicMock(num_stages=stages, stage_index=0)
    torch_refuses = refused(lambda: Schedule1F1B(stage, micro_batches))
    obstacle = SYSTEMS["torch-1f1b"].obstacle(stages, micro_batches, synthetic=False)
    assert (obstacle is not None) == torch_refuses
    dual_refuses = refused(lambda: DualPipeVSchedule(micro_batches, stages, 0))
    obstacle = SYSTEMS["deepspeed-dualpipev"].obstacle(stages, micro_batches, synthetic=False)
    assert (obstacle is not None) == dual_refuses


def test_every_other_system_takes_one_micro_batch() -> None:
    for name in (BASELINE, "torch-zbv", "wavemare-pipemare", BOUND):
        assert SYSTEMS[name].obstacle(8, 1, synthetic=False) is None


def test_a_wait_cannot_be_split() -> None:
    reason = SYSTEMS["torch-zbv"].obstacle(2, 8, synthetic=True)
    assert reason is not None
    assert "splits" in reason
    others = [system for system in SYSTEMS.values() if system.name != "torch-zbv"]
    assert all(system.obstacle(2, 8, synthetic=True) is None for system in others)
