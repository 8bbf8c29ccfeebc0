# SPDX-License-Identifier: Apache-2.0
"""The loop that runs plans, in an engine of one rank that has all stages of a model."""

import gc
import multiprocessing
import os
import weakref
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed.nn  # once imported within a group, it would hold that one for ever
from deepspeed.comm import comm as deepspeed_comm
from deepspeed.runtime.pipe.engine import BATCH_INPUT_TIMER
from torch import distributed, nn

import wavemare
from wavemare.data.loader import ResumableLoader
from wavemare.engine.observe.progress import PROGRESS
from wavemare.engine.pipe.chunks import ChunkedPipelineModule
from wavemare.errors import CommError, DataError, PlanError
from wavemare.pipeline.plan.orders import forward_only
from wavemare.pipeline.plan.plan import COMPUTE, Plan

WIDTH, MICRO_BATCHES, RATE = 3, 3, 0.25
WHOLE = """
plan schedule=whole stages=2 micro_batches=3 steps=1 send_slots=0 homes=0,0
0: 0F0 1F0 1B0 0B0 0F1 0F2 1F1 1B1 1F2 0B1 1B2 0B2
"""
SPLIT = """
plan schedule=split stages=2 micro_batches=3 steps=1 send_slots=0 homes=0,0
0: 0F0 1F0 0F1 1I0 0I0 1W0 1F1 0F2 1I1 1F2 0W0 0I1 1W1 1B2 0W1 0B2
"""
PLANS = {"whole": WHOLE, "split": SPLIT}
plans = pytest.mark.parametrize("text", PLANS.values(), ids=PLANS)


@pytest.fixture(autouse=True)
def group_of_one():
    """Initialize ``deepspeed.comm`` for this process alone."""
    ops = deepspeed.ops.__compatible_ops__  # one of them would be compiled for minutes
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu"}
    with mock.patch.dict(os.environ, place), mock.patch.dict(ops, deepspeed_shm_comm=False):
        distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        yield
        distributed.destroy_process_group()
        deepspeed_comm.cdb = None


class Layer(nn.Module):
    """A linear layer that calls a function at each forward and backward pass."""

    def __init__(self, seen):
        super().__init__()
        self.linear, self.seen = nn.Linear(WIDTH, WIDTH), seen

    def forward(self, x):
        self.seen()
        outputs = self.linear(x)
        if outputs.requires_grad:
            outputs.register_hook(lambda _: self.seen())
        return outputs


def layers(seen):
    torch.manual_seed(3)
    return [Layer(seen), Layer(seen)]


@pytest.fixture
def start():
    """Return a function that makes an engine of a plan's text, which is destroyed afterwards."""
    engines = []

    def start(text, seen=lambda: None, training_data=None, **config):
        sizes = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "optimizer": {"type": "SGD", "params": {"lr": RATE}},
            "gradient_clipping": 0.0,  # DeepSpeed's default is 1
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1 << 60,
        }
        model = ChunkedPipelineModule(
            layers(seen), num_stages=1, homes=(0, 0), loss_fn=nn.functional.mse_loss
        )
        engine, *_ = wavemare.initialize(
            model=model,
            training_data=training_data,
            config=sizes | config,
            plan=Plan.parse(text),
        )
        engines.append(engine)
        return engine

    start.engines = engines
    yield start
    for engine in engines:
        engine.destroy()
    engines.clear()


def batches(count, first=0):
    for number in range(first, first + count):
        generator = torch.Generator().manual_seed(number)
        yield tuple(torch.randn(2, 2, WIDTH, generator=generator))


def by_torch(count, data=None):
    """Return the weights, and the mean losses, that plain torch gets from whole steps."""
    model = nn.Sequential(*layers(lambda: None))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE), []
    data = batches(count) if data is None else iter(data)
    for _ in range(count // MICRO_BATCHES):
        optimizer.zero_grad()
        of_step = [nn.functional.mse_loss(model(x), y) for x, y in next_step(data)]
        for loss in of_step:
            (loss / MICRO_BATCHES).backward()
        optimizer.step()
        losses.append(float(sum(of_step).detach()) / MICRO_BATCHES)
    return [*model.parameters()], losses


def next_step(data):
    return [next(data) for _ in range(MICRO_BATCHES)]


def assert_trained_as(engine, weights):
    for ours, expected in zip(engine.module.parameters(), weights, strict=True):
        torch.testing.assert_close(ours, expected)


def passes_of(text):
    """Return the actions that the text of a plan has, in words."""
    return text.partition("\n0:")[2].split()


def in_words(actions):
    return [str(action._replace(version=-1)) for action in actions]


def samples():
    return [sample for inputs, labels in batches(6) for sample in zip(inputs, labels, strict=True)]


def test_a_resume_that_reads_training_data_from_the_start_says_so_once(start, tmp_path, caplog):
    def told(*data):
        caplog.clear()
        for each in data:
            engine.train_batch(each)
        return sum(line.startswith("training_data") for line in caplog.messages)

    engine = start(WHOLE, training_data=samples(), wavemare={})
    assert told(None, None) == 0
    engine.save_checkpoint(str(tmp_path))
    engine = start(WHOLE, training_data=samples(), wavemare={})
    engine.load_checkpoint(str(tmp_path / "empty"))
    assert told(None) == 0
    engine.load_checkpoint(str(tmp_path), load_module_only=True)
    assert told(None) == 0
    engine.load_checkpoint(str(tmp_path))
    assert told(None, None) == 1
    engine.load_checkpoint(str(tmp_path))
    data = batches(6)
    assert told(data, None) == 0  # a pipeline goes on with the iterator that it got last


def test_the_remedy_for_training_data_resumes_at_the_exact_sample(start, tmp_path):
    def batches_of(engine):
        loader = ResumableLoader.of(engine, samples(), seed=3)
        loader.consumed_samples = engine.global_samples
        return loader

    whole = start(WHOLE, wavemare={})
    data = batches_of(whole)
    for step in range(3):
        whole.train_batch(data)
        if not step:
            whole.save_checkpoint(str(tmp_path))
    engine = start(WHOLE, wavemare={})
    engine.load_checkpoint(str(tmp_path))
    data = batches_of(engine)
    for _ in range(2):
        engine.train_batch(data)
    ours, expected = (list(each.module.parameters()) for each in (engine, whole))
    assert all(map(torch.equal, ours, expected))


@pytest.mark.parametrize("section", [{}, {"wavemare": {}}])
def test_a_destroyed_engine_has_ended_the_processes_that_read_its_data(start, section):
    """Where the garbage collector ends them, torch waits 5 s for each."""
    engine = start(WHOLE, training_data=samples(), **section)
    engine.train_batch()
    assert multiprocessing.active_children()
    engine.destroy()
    assert not multiprocessing.active_children()


@plans
def test_a_plan_trains_what_torch_trains(start, text):
    engine, data = start(text), batches(6)
    weights, losses = by_torch(6)
    found = [float(engine.train_batch(data)) for _ in losses]
    assert found == pytest.approx(losses, rel=1e-6)
    assert_trained_as(engine, weights)


@plans
@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_are_computed_again_are_those_of_the_actions_stage(start, text, reentrant):
    calls = []
    checkpoints = {"activation_checkpoint_interval": 1, "use_reentrant": reentrant}
    engine = start(text, lambda: calls.append(None), pipeline=checkpoints)
    engine.train_batch(batches(3))
    assert len(calls) == 2 * 3 * 3  # two layers: forward, forward again, backward
    assert_trained_as(engine, by_torch(3)[0])


@plans
def test_each_action_runs_once_in_the_plans_order(start, text):
    engine, time = start(text), iter(range(1000))
    engine.recorder.begin_keeping(clock=lambda: next(time))
    engine.train_batch(batches(3))
    events = engine.recorder.end_keeping()
    actions = engine.plan.ranks[0]
    assert [event.action for event in events] == list(actions)
    assert [(event.start_s, event.end_s) for event in events] == [
        (2 * place, 2 * place + 1) for place in range(len(actions))
    ]
    # The passes are those of the caller's text; what goes between them is the engine's.
    assert in_words(a for a in actions if a.kind in COMPUTE) == passes_of(text)


def test_a_pass_finds_its_action_in_the_progress(start):
    seen = []

    def see():
        place, position = PROGRESS.place, PROGRESS.position
        assert str(place.what) == PROGRESS.plan[position]
        assert place.peer is None  # nothing is sent
        seen.append(place.what)

    engine = start(WHOLE, see)
    engine.train_batch(batches(3))
    assert in_words(seen) == passes_of(WHOLE)
    assert PROGRESS.place.peer is None
    assert "script" in str(PROGRESS.place)
    assert str(PROGRESS.finished) == "train_batch"


def test_an_evaluation_runs_forward_passes_alone_and_changes_nothing(start):
    seen = []
    engine = start(SPLIT, lambda: seen.append(PROGRESS.place.what))
    loss = engine.eval_batch(batches(2), num_micro_batches=2)
    plan = forward_only((0, 0), 2)
    assert in_words(seen) == in_words(a for a in plan.ranks[0] if a.kind in COMPUTE)
    model = nn.Sequential(*layers(lambda: None))
    expected = sum(nn.functional.mse_loss(model(x), y).item() for x, y in batches(2)) / 2
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    assert_trained_as(engine, model.parameters())


def test_evaluations_keep_no_contiguous_activation_checkpoints(start):
    configure = deepspeed.checkpointing.configure
    engine = start(WHOLE, pipeline={"activation_checkpoint_interval": 1})
    contiguous = dict.fromkeys(("partition_activations", "contiguous_checkpointing"), True)
    configure(None, **contiguous, num_checkpoints=4)  # the training has 4 of 6 at a time
    try:
        for _ in range(2):
            engine.eval_batch(batches(3))
        engine.train_batch(batches(3))
    finally:
        configure(None)
    assert_trained_as(engine, by_torch(3)[0])


def test_a_wrapper_of_deepspeeds_loader_may_set_its_arguments_by_name(start):
    loader = deepspeed.DeepSpeedEngine.deepspeed_io

    def without_workers(*args, **named):
        return loader(*args, **{**named, "num_local_io_workers": 0})

    engine = start(WHOLE)
    with mock.patch.object(deepspeed.DeepSpeedEngine, "deepspeed_io", without_workers):
        data = engine.deepspeed_io([torch.full((WIDTH,), float(i)) for i in range(4)])
    assert torch.cat([*data])[:, 0].sort().values.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("failing", "action"), [(4, "0B0"), (6, "0F2"), (7, "1F1")])
def test_an_error_names_its_action_and_ends_training_until_a_load(start, tmp_path, failing, action):
    calls = iter(range(1, 1000))

    def fail():
        if next(calls) == failing:
            raise ZeroDivisionError

    engine = start(WHOLE, fail)
    engine.save_checkpoint(tmp_path)
    with pytest.raises(ZeroDivisionError) as caught:
        engine.train_batch(batches(3))
    (note,) = [note for note in caught.value.__notes__ if "of the plan" in note]
    for word in ("rank 0", f"stage {action[0]}", "step 1", f"action {action}"):
        assert word in note
    with pytest.raises(CommError):
        engine.train_batch(batches(3))
    with pytest.raises(CommError):
        engine.eval_batch(batches(3))
    assert engine.load_checkpoint(tmp_path)[0]
    data = batches(3)
    engine.train_batch(data)
    assert_trained_as(engine, by_torch(3)[0])


def test_an_action_that_fails_takes_no_time_and_is_not_kept(start):
    def fail():
        raise ZeroDivisionError

    engine = start(WHOLE, fail)
    engine.recorder.begin_keeping(clock=engine.recorder.clock)
    engine.recorder.shares()
    with pytest.raises(ZeroDivisionError):
        engine.train_batch(batches(3))
    assert in_words(e.action for e in engine.recorder.end_keeping()) == ["0L0"]
    assert engine.recorder.shares() == (0.0, 0.0)


@plans
def test_data_that_ends_between_steps_leaves_the_engine_as_it_was(start, text):
    engine, data = start(text), batches(3)
    engine.train_batch(data)
    for _ in range(2):
        with pytest.raises(StopIteration):
            engine.train_batch(data)
    assert engine.global_steps == 1
    engine.train_batch(batches(3, first=3))
    assert_trained_as(engine, by_torch(6)[0])


@plans
def test_data_that_ends_within_a_step_is_an_error_of_the_data(start, text):
    engine = start(text)
    with pytest.raises(DataError) as caught:
        engine.train_batch(batches(2))
    assert (caught.value.key, caught.value.value) == ("data_iter", 2)
    with pytest.raises(CommError):
        engine.train_batch(batches(3))
    assert engine.global_steps == 0


def test_an_evaluation_without_data_is_left_out_and_one_that_began_ends_training(start):
    engine, data = start(WHOLE), batches(6)
    engine.train_batch(data)
    with pytest.raises(StopIteration):
        engine.eval_batch(batches(0), num_micro_batches=2)
    engine.train_batch(data)
    assert_trained_as(engine, by_torch(6)[0])
    with pytest.raises(DataError):
        engine.eval_batch(batches(1), num_micro_batches=2)
    with pytest.raises(CommError):
        engine.train_batch(batches(3))


@plans
def test_micro_batches_of_unlike_shapes_train_where_nothing_is_sent(start, text):
    long, short, single = (
        (x[:rows], y[:rows]) for (x, y), rows in zip(batches(3), (2, 1, 1), strict=True)
    )
    engine = start(text)
    engine.train_batch(iter([long, short, single]))
    assert_trained_as(engine, by_torch(3, data=[long, short, single])[0])


def test_evaluating_the_training_data_takes_the_next_batches(start):
    engine, twin, data = start(WHOLE), start(WHOLE), batches(8)
    engine.train_batch(data)
    engine.eval_batch(data, num_micro_batches=2)
    engine.train_batch(data)
    assert next(data, None) is None
    twin.train_batch(batches(3))
    twin.train_batch(batches(3, first=5))
    assert_trained_as(engine, twin.module.parameters())


def test_another_number_of_micro_batches_needs_another_plan(start):
    engine = start(WHOLE)
    with pytest.raises(PlanError):
        engine.set_train_batch_size(2 * engine.train_batch_size())


def test_a_breakdown_times_loads_and_passes_and_changes_no_weight(start):
    plain, timed = start(SPLIT), start(SPLIT, wall_clock_breakdown=True)
    for engine in (plain, timed):
        engine.train_batch(batches(3))
    assert_trained_as(plain, timed.module.parameters())
    assert {BATCH_INPUT_TIMER, "fwd_microstep", "bwd_microstep"} <= timed.timers.timers.keys()
    assert BATCH_INPUT_TIMER not in plain.timers.timers


def test_nothing_holds_an_engine_that_is_destroyed(start):
    engine = start(WHOLE)
    engine.train_batch(batches(3))
    held = weakref.ref(engine)
    engine.destroy()
    start.engines.clear()
    del engine
    gc.collect()
    assert held() is None
