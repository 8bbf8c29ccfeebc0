# SPDX-License-Identifier: Apache-2.0
"""What a rank notes of its steps, with a clock that goes by only when told."""

import json

from wavemare.engine.observe.progress import Progress
from wavemare.engine.observe.recorder import StepTrace
from wavemare.pipeline.plan.plan import Action, Kind
from wavemare.report.runs import Span, read_traces


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def trace_with(clock):
    sizes = iter(range(1, 1000))
    return StepTrace(lambda: next(sizes), clock=clock, wall=lambda: clock.now + 1000)


def test_passes_of_the_data_parallel_engine_become_actions(tmp_path):
    clock, progress = Clock(), Progress()
    trace = trace_with(clock)
    with progress.doing("train_batch"):  # one that began before
        trace.begin(progress)
        clock.now += 1
    for _ in range(2):
        with progress.doing("train_batch"):
            for what in ("the data loader", "forward", "backward", "step"):
                with progress.doing(what):
                    clock.now += 2
        clock.now += 1
    trace.end(progress)
    with progress.doing("train_batch"):
        clock.now += 1
    file = trace.save(tmp_path, rank=3, stage=0, first_step=7)
    assert file == tmp_path / "timeline" / "rank_00003.json"
    content = json.loads(file.read_text())
    assert (content["rank"], content["stage"], content["first_step"]) == (3, 0, 7)
    assert content["steps"] == [[1101, 1109], [1110, 1118]]
    assert content["spans"] == [
        ["the data loader", 1101, 1103, 1],
        ["0F0", 1103, 1105, 2],
        ["0B0", 1105, 1107, 3],
        ["0S0", 1107, 1109, 4],
        ["the data loader", 1110, 1112, 6],
        ["0F1", 1112, 1114, 7],
        ["0B1", 1114, 1116, 8],
        ["0S1", 1116, 1118, 9],
    ]


def test_each_action_of_a_plan_ends_where_the_next_begins(tmp_path):
    clock, progress = Clock(), Progress()
    trace = trace_with(clock)
    trace.begin(progress)
    actions = Action(Kind.LOAD, 1, 2), Action(Kind.FORWARD, 1, 2, 5), Action(Kind.BACKWARD, 1, 2)
    with progress.doing("train_batch"):
        progress.begin_actions(actions, lambda _: None)
        progress.at_action(0)
        with progress.doing("the data loader"):
            clock.now += 1
        clock.now += 1
        progress.at_action(1)
        clock.now += 2
        progress.at_action(2)
        clock.now += 3
        progress.end_actions()
    trace.end(progress)
    trace.save(tmp_path, rank=0, stage=1, first_step=1)
    read = read_traces(tmp_path)
    assert read is not None
    (rank,) = read.ranks
    assert rank.spans == (
        Span("1L2", 0, 2, 2),
        Span("the data loader", 0, 1, 1),
        Span("1F2@5", 2, 4, 3),
        Span("1B2", 4, 7, 4),
    )
    assert rank.steps == ((0, 7),)
    assert rank.busy == 5 / 7


def test_an_exception_leaves_the_trace_in_order():
    clock, progress = Clock(), Progress()
    trace = trace_with(clock)
    trace.begin(progress)
    try:
        with progress.doing("train_batch"):
            progress.begin_actions([Action(Kind.FORWARD, 0, 0)], lambda _: None)
            progress.at_action(0)
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    with progress.doing("evaluation"):
        clock.now += 1
    names = [str(what) for what, *_ in trace.spans]
    assert names == ["0F0", "train_batch", "evaluation"]
