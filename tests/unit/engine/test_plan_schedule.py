# SPDX-License-Identifier: Apache-2.0
"""Our 1F1B in DeepSpeed's instructions, beside DeepSpeed's own schedule."""

import pytest
from deepspeed.runtime.pipe import schedule

from wavemare.engine.pipe.plan_schedule import PlanSchedule

SIZES = [(p, m) for p in (1, 2, 3, 4, 5, 8, 11) for m in (1, 2, 3, 4, 5, 7, 8, 16, 23)]
COMPUTE = (schedule.LoadMicroBatch, schedule.ForwardPass, schedule.BackwardPass)
SENDS = {schedule.SendActivation: 1, schedule.SendGrad: -1}
RECEIVES = {schedule.RecvActivation: -1, schedule.RecvGrad: 1}
TAIL = [schedule.ReduceTiedGrads, schedule.ReduceGrads, schedule.OptimizerStep]


def flat(kind, num_stages, micro_batches, stage):
    made = kind(micro_batches=micro_batches, stages=num_stages, stage_id=stage)
    return made, [command for step in made for command in step]


def chosen(commands, kinds):
    return [(type(c), c.kwargs) for c in commands if isinstance(c, kinds)]


@pytest.mark.parametrize(("num_stages", "micro_batches"), SIZES)
def test_passes_and_messages_have_deepspeeds_order_and_buffers(num_stages, micro_batches):
    for stage in range(num_stages):
        ours, commands = flat(PlanSchedule, num_stages, micro_batches, stage)
        stock, expected = flat(schedule.TrainSchedule, num_stages, micro_batches, stage)
        assert ours.num_pipe_buffers() == stock.num_pipe_buffers()
        assert chosen(commands, COMPUTE) == chosen(expected, COMPUTE)
        assert [type(c) for c in commands[-3:]] == TAIL
        assert chosen(commands, tuple(TAIL)) == chosen(expected, tuple(TAIL))
        for kind in (*SENDS, *RECEIVES):
            assert chosen(commands, kind) == chosen(expected, kind), kind
        assert len(commands) == len(expected)


@pytest.mark.parametrize(("num_stages", "micro_batches"), SIZES)
def test_blocking_sends_and_receives_meet_without_a_deadlock(num_stages, micro_batches):
    kinds = (*SENDS, *RECEIVES)
    queues = [
        [type(c) for c in flat(PlanSchedule, num_stages, micro_batches, s)[1] if type(c) in kinds]
        for s in range(num_stages)
    ]
    meets = {schedule.SendActivation: schedule.RecvActivation, schedule.SendGrad: schedule.RecvGrad}
    progress = True
    while progress:
        progress = False
        for stage, queue in enumerate(queues):
            if not queue or queue[0] not in SENDS:
                continue
            other = queues[stage + SENDS[queue[0]]]
            if other and other[0] is meets[queue[0]]:
                del queue[0], other[0]
                progress = True
    assert queues == [[]] * num_stages
