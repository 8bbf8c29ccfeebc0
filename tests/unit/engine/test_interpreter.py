# SPDX-License-Identifier: Apache-2.0
"""Our 1F1B beside DeepSpeed's own schedule, and the loop that runs plans."""

from types import SimpleNamespace

import pytest
from deepspeed.runtime.pipe import schedule

from wavemare.engine.observe.progress import PROGRESS
from wavemare.engine.observe.recorder import Recorder
from wavemare.engine.pipe.engine import PipelineEngine, StepSchedule
from wavemare.pipeline.plan.plan import Action, Kind

SIZES = [(p, m) for p in (1, 2, 3, 4, 5, 8, 11) for m in (1, 2, 3, 4, 5, 7, 8, 16, 23)]
COMPUTE = ("load_micro_batch", "forward_pass", "backward_pass")
SENDS = {"send_activations": 1, "send_grads": -1}
RECEIVES = ("recv_activations", "recv_grads")
TAIL = ["reduce_tied_grads", "reduce_grads", "optimizer_step"]
METHODS = {
    kind: method.__name__.removeprefix("_exec_")
    for kind, method in PipelineEngine._INSTRUCTION_MAP.items()
}


@pytest.fixture(autouse=True)
def _within_a_step():
    with PROGRESS.doing("train_batch"):
        yield


class Stage:
    """Notes which of DeepSpeed's methods a plan of the engine calls, with which buffer."""

    _exec_schedule = PipelineEngine._exec_schedule
    _run = PipelineEngine._run
    _peer = PipelineEngine._peer
    _home_of = PipelineEngine._home_of
    _train_schedule = PipelineEngine._train_schedule
    _handlers = PipelineEngine._handlers
    _num_buffers = PipelineEngine._num_buffers
    _buffer = PipelineEngine._buffer
    _stage_watch, loss = None, None
    global_rank = global_steps = 0

    def __init__(self, num_stages, micro_batches, stage):
        self.num_stages, self.micro_batches, self.stage_id = num_stages, micro_batches, stage
        self.pipe_buffers = {"outputs": [None] * 64, "inputs": [None] * 64, "labels": [None] * 64}
        self.recorder, self.calls, self.reserved = Recorder(), [], []
        self.grid = SimpleNamespace(pp_group=range(0, 640, 10))
        self._reserve_pipe_buffers = self.reserved.append

    def is_last_stage(self):
        return self.stage_id == self.num_stages - 1

    def __getattr__(self, name):
        if name.removeprefix("_exec_") in METHODS.values():
            return lambda *given: self.calls.append((name.removeprefix("_exec_"), *given))
        if name.startswith("_do_"):
            return getattr(PipelineEngine, name).__get__(self)
        raise AttributeError(name)


def calls(num_stages, micro_batches, stage):
    engine = Stage(num_stages, micro_batches, stage)
    engine._exec_schedule(engine._train_schedule())
    return engine.reserved, engine.calls


def chosen(found, names):
    return [call for call in found if call[0] in names]


@pytest.mark.parametrize(("num_stages", "micro_batches"), SIZES)
def test_passes_and_messages_have_deepspeeds_order_and_buffers(num_stages, micro_batches):
    for stage in range(num_stages):
        reserved, found = calls(num_stages, micro_batches, stage)
        stock = schedule.TrainSchedule(
            micro_batches=micro_batches, stages=num_stages, stage_id=stage
        )
        expected = [(METHODS[type(each)], *each.kwargs.values()) for step in stock for each in step]
        assert reserved == [stock.num_pipe_buffers()]
        assert [name for name, *_ in found[-3:]] == TAIL
        assert chosen(found, COMPUTE) == chosen(expected, COMPUTE)
        assert chosen(found, TAIL) == chosen(expected, TAIL)
        for kind in (*SENDS, *RECEIVES):
            assert chosen(found, {kind}) == chosen(expected, {kind}), kind
        assert len(found) == len(expected)


class Noting(Stage):
    def __init__(self):
        super().__init__(3, 1, 1)
        self.seen = []

    def note(self, _):
        self.seen.append((PROGRESS.place.what, PROGRESS.position, PROGRESS.place.peer))

    _exec_recv_activations = _do_forward = _exec_send_activations = _do_pair = note


def test_each_action_is_noted_with_its_position_and_the_rank_at_the_other_end():
    kinds = (Kind.RECV_ACTIVATION, Kind.FORWARD, Kind.SEND_ACTIVATION)
    actions = [Action(kind, 1, 0) for kind in kinds]
    engine = Noting()
    engine._exec_schedule(StepSchedule(actions))
    expected = zip(actions, range(3), [0, None, 20], strict=True)
    assert engine.seen == [*expected]
    assert PROGRESS.plan == ("1RA0", "1F0", "1SA0")


def test_an_error_names_the_action():
    engine = Noting()
    engine._do_forward = lambda action: 1 / 0
    with pytest.raises(ZeroDivisionError) as caught:
        engine._exec_schedule(StepSchedule([Action(Kind.FORWARD, 1, 7)]))
    assert caught.value.__notes__ == [
        "rank 0, stage 1, optimizer step 1: in action 1F7 of the plan"
    ]
    assert engine.recorder.shares() == (0.0, 0.0)
