# SPDX-License-Identifier: Apache-2.0
"""The Trainer's reading of a DeepSpeed file: ``"auto"`` of our section, and the table."""

import pytest
import torch
from accelerate import skip_first_batches
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from support.refusals import refuses
from wavemare.accelerate import rows_that_count
from wavemare.engine.checkpoint.random_state import drawn_alike, seeded
from wavemare.errors import ConfigError
from wavemare.hf.config import TrainerConfig
from wavemare.hf.steps import StepFeed, fill_rows, without_labels

ZERO = {"zero_optimization": {"stage": 0}}


def arguments(tmp_path, **changes):
    return TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        report_to=[],
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        warmup_steps=5,
        **changes,
    )


class Model:
    config = None


@pytest.mark.parametrize("size", [0, "2", -1, None])
def test_a_size_that_is_none_is_named(tmp_path, size):
    section = {"tensor_parallel": {"size": size}, "pipeline": {"stages": "auto"}}

    def read():
        config = TrainerConfig({**ZERO, "wavemare": section}, world_size=2)
        config.trainer_config_process(arguments(tmp_path))
        config.trainer_config_finalize(arguments(tmp_path), Model(), 10)

    with pytest.raises(ConfigError) as caught:
        read()
    assert caught.value.key == "wavemare.tensor_parallel.size"


def test_every_auto_key_is_filled_and_told(tmp_path, capfd):
    section = {
        "pipeline": {
            "stages": "auto",
            "dynamic_shape": "auto",
            "schedule": "pipemare",
            "pipemare": {
                "warmup_steps": "auto",
                "lr_rescheduling": {"enabled": True, "anneal_steps": "auto"},
            },
        }
    }
    config = TrainerConfig({**ZERO, "wavemare": section}, world_size=4)
    args = arguments(tmp_path)
    config.trainer_config_process(args)
    config.trainer_config_finalize(args, Model(), 100)
    pipeline = config.ours.pipeline
    assert pipeline.stages == 4
    assert pipeline.dynamic_shape
    assert pipeline.pipemare.warmup_steps == 5
    assert pipeline.pipemare.lr_rescheduling.anneal_steps == 25
    told = capfd.readouterr().err
    for line in ("stages auto: 4:", "dynamic_shape auto: True:", "warmup_steps auto: 5:"):
        assert told.count(f"{line} ") == 1
    assert told.count("anneal_steps auto: 25: ") == 1


def test_stages_are_the_processes_that_tensor_parallelism_leaves():
    section = {"pipeline": {"stages": "auto"}, "tensor_parallel": {"size": 2}}
    config = TrainerConfig({**ZERO, "wavemare": section}, world_size=8)
    assert config.ours.pipeline.stages == 4


def test_values_called_auto_stay_where_they_are_a_value():
    section = {"sparse_collective": {"mode": "auto"}, "wavelet": {"mode": "off"}}
    config = TrainerConfig({**ZERO, "wavemare": section}, world_size=2)
    assert config.section == section
    assert "wavemare" not in config.config


def test_batch_sizes_count_groups_of_processes(tmp_path):
    config = TrainerConfig(
        {**ZERO, "train_batch_size": "auto", "wavemare": {"pipeline": {"stages": 2}}}, world_size=4
    )
    config.trainer_config_process(arguments(tmp_path))
    assert config.config["train_batch_size"] == 4 * 3 * 2
    assert config.config["train_micro_batch_size_per_gpu"] == 4
    assert config.config["gradient_accumulation_steps"] == 3


def test_all_differences_are_told_at_once(tmp_path):
    given = {**ZERO, "train_micro_batch_size_per_gpu": 5, "gradient_clipping": 0.5}
    config = TrainerConfig(given, world_size=2)
    with pytest.raises(ConfigError) as caught:
        config.trainer_config_process(arguments(tmp_path))
    assert (
        "train_micro_batch_size_per_gpu=5, the argument per_device_train_batch_size=4; "
        "gradient_clipping=0.5, the argument max_grad_norm=1.0. " in str(caught.value)
    )


def test_a_schedule_of_another_length_differs(tmp_path):
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": 7, "warmup_num_steps": 5}}
    config = TrainerConfig({**ZERO, "scheduler": scheduler}, world_size=2)
    with refuses(ConfigError, "deepspeed", ["scheduler.params.total_num_steps"]):
        config.trainer_config_finalize(arguments(tmp_path), Model(), 100)


# --- steps ---------------------------------------------------------------------------------------


def feed(count, **changes):
    given = {"micro_batches": 2, "make": lambda read: [n * 10 for n in read] * 2, "seed": 0}
    return StepFeed(iter(range(count)), **{**given, **changes})


def test_an_engine_that_reads_ahead_sees_what_the_trainer_sees():
    ahead = feed(5, make=lambda read: [n * 10 for n in (read * 2)[:2]])
    assert [next(ahead) for _ in range(3)] == [0, 10, 20]
    assert [ahead.next_step() for _ in range(2)] == [[0, 1], [2, 3]]
    assert [next(ahead) for _ in range(3)] == [30, 40, 40]
    with pytest.raises(StopIteration):
        next(ahead)
    assert ahead.next_step() == [4]
    assert ahead.next_step() == []


def test_reading_draws_the_same_numbers_whoever_reads_first():
    def draws(order):
        def source():
            while True:
                yield torch.rand(1).item()

        one = StepFeed(source(), micro_batches=2, make=list, seed=3, epoch=1, data_rank=1)
        torch.manual_seed(order)
        before = torch.get_rng_state()
        found = [next(one) for _ in range(4)] if order else []
        found = found or [x for _ in range(2) for x in one.next_step()]
        assert torch.equal(torch.get_rng_state(), before)
        return found

    assert draws(0) == draws(1)
    assert len(set(draws(0))) == 4


def test_each_model_draws_other_numbers_and_the_same_each_time():
    def draws(**place):
        source = (torch.rand(1).item() for _ in range(4))
        return list(drawn_alike(source, 5, **place))

    assert draws() == draws()
    assert draws()[0] == draws(data_rank=1)[0]  # the order of the epoch
    assert not set(draws()[1:]) & set(draws(data_rank=1)[1:])
    assert not set(draws()) & set(draws(epoch=1))


def test_generators_go_on_as_if_nothing_had_been_drawn():
    torch.manual_seed(1)
    with seeded(2):
        torch.rand(3)
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(1))


def test_a_short_batch_is_filled_with_rows_that_do_not_count():
    batch = {"input_ids": torch.arange(6).view(2, 3), "labels": torch.arange(6).view(2, 3), "k": 1}
    full = fill_rows(batch, 5)
    assert full["input_ids"].tolist() == [[0, 1, 2], [3, 4, 5], [0, 1, 2], [3, 4, 5], [0, 1, 2]]
    assert full["labels"].tolist() == [[0, 1, 2], [3, 4, 5], *[[-100] * 3] * 3]
    assert full["k"] == 1
    assert batch["labels"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert fill_rows(batch, 2) == batch


def test_a_flattened_batch_is_one_row_and_stays_so():
    packed = {"input_ids": torch.arange(6)[None], "position_ids": torch.arange(3).repeat(2)[None]}
    assert fill_rows(packed, 4)["input_ids"].shape == (1, 6)


def test_rows_without_labels_are_masked_and_float_labels_stay():
    ones = torch.ones(3, 2, dtype=torch.int64)
    found = without_labels({"labels": ones, "attention_mask": ones, "input_ids": ones}, 1)
    assert found["labels"].tolist() == [[1, 1], [-100, -100], [-100, -100]]
    assert found["attention_mask"].tolist() == [[1, 1], [0, 0], [0, 0]]
    assert found["input_ids"] is ones
    assert bool((ones == 1).all())
    assert bool((without_labels({"labels": ones.float()}, 0)["labels"] == 1).all())


@pytest.mark.parametrize("skipped", [0, 1, 4])
@pytest.mark.parametrize("drawn", [20, 21, 22, 24, 27])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_drawn_row_counts_once_wherever_a_run_goes_on(skipped, drawn, ranks):
    order, counted = [7 * n % 24 for n in range(drawn)], []
    for rank in range(ranks):
        loader = prepare_data_loader(
            DataLoader(range(24), batch_size=2, sampler=order),
            num_processes=ranks,
            process_index=rank,
            put_on_device=False,
        )
        loader = skip_first_batches(loader, skipped) if skipped else loader
        for batch in loader:
            count = rows_that_count(loader, len(batch), data_rank=rank, data_ranks=ranks)
            counted += batch[:count].tolist()
    assert sorted(counted) == sorted(order[skipped * 2 * ranks :])


@pytest.mark.parametrize("skipped", [0, 2])
def test_no_row_is_a_repetition_where_the_last_ones_are_left_out(skipped):
    loader = DataLoader(range(23), batch_size=2, drop_last=True)
    loader = prepare_data_loader(loader, num_processes=2, process_index=1, put_on_device=False)
    loader = skip_first_batches(loader, skipped) if skipped else loader
    for batch in loader:
        assert rows_that_count(loader, len(batch), data_rank=1, data_ranks=2) == 2
