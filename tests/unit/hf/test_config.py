# SPDX-License-Identifier: Apache-2.0
"""The Trainer's reading of a DeepSpeed file: ``"auto"`` of our section, and the table."""

import copy
import random

import accelerate
import numpy
import pytest
import torch
from accelerate import skip_first_batches
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler
from transformers import TrainingArguments

from support.refusals import refuses
from wavemare.accelerate import rows_that_count
from wavemare.engine.checkpoint.random_state import begin_late, drawn_alike, seeded, share_draws
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


def test_arguments_that_the_file_does_not_mention_hold(tmp_path):
    """With our section; without it, the file is as stock DeepSpeed reads it."""
    given = {
        **ZERO,
        "optimizer": {"type": "AdamW"},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 1e-5}},
    }
    args = arguments(
        tmp_path, learning_rate=3e-3, weight_decay=0.2, max_grad_norm=0.3, adam_beta2=0.5
    )
    for section in ({}, {"wavemare": {}}):
        config = TrainerConfig({**copy.deepcopy(given), **section}, world_size=2)
        config.trainer_config_process(args)
        config.trainer_config_finalize(args, Model(), 100)
        values = {key: config.config.get(key) for key in ("optimizer", "scheduler")}
        if not section:
            assert values == {key: given[key] for key in values}
            assert "gradient_clipping" not in config.config
            continue
        assert config.config["gradient_clipping"] == 0.3
        optimizer = {"lr": 3e-3, "weight_decay": 0.2, "betas": [0.9, 0.5]}
        assert values["optimizer"] == {"type": "AdamW", "params": optimizer}
        assert values["scheduler"]["params"] == {
            "warmup_min_lr": 1e-5,
            "warmup_max_lr": 3e-3,
            "warmup_num_steps": 5,
            "total_num_steps": 100,
        }


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_an_optimizer_that_may_know_no_decay_gets_the_one_that_is_asked_for(tmp_path, decay):
    given = {**ZERO, "optimizer": {"type": "SGD", "params": {}}, "wavemare": {}}
    config = TrainerConfig(given, world_size=2)
    args = arguments(tmp_path, learning_rate=3e-3, weight_decay=decay, optim="sgd")
    config.trainer_config_process(args)
    expected = {"lr": 3e-3, **({"weight_decay": decay} if decay else {})}
    assert config.config["optimizer"]["params"] == expected


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

        one = StepFeed(source(), micro_batches=2, make=list, seed=3, epoch=1)
        torch.manual_seed(order)
        before = torch.get_rng_state()
        found = [next(one) for _ in range(4)] if order else []
        found = found or [x for _ in range(2) for x in one.next_step()]
        assert torch.equal(torch.get_rng_state(), before)
        return found

    assert draws(0) == draws(1)
    assert len(set(draws(0))) == 4


class Lazy(Sampler):
    """An order whose numbers are drawn one by one, as they are read."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return 24

    def __iter__(self):
        left = list(range(24))
        while left:
            yield left.pop(self.draw(len(left)))


class Noisy(Dataset):
    """Rows of their number and of what each generator draws for them."""

    def __len__(self):
        return 24

    def __getitem__(self, number):
        return number, random.random(), float(torch.rand(())), numpy.random.rand()


class Stream(IterableDataset):
    """Rows in an order that is drawn while they are read."""

    def __iter__(self):
        yield from Lazy(random.randrange)


def with_noise(rows):
    return [(row, random.random(), float(torch.rand(())), numpy.random.rand()) for row in rows]


LOADERS = {
    "python": {"sampler": Lazy(random.randrange), "batch_size": 2},
    "torch": {"sampler": Lazy(lambda n: int(torch.randint(n, ()))), "batch_size": 2},
    "numpy": {"sampler": Lazy(numpy.random.randint), "batch_size": 2},
    "batches": {"batch_sampler": BatchSampler(Lazy(random.randrange), 2, drop_last=False)},
    "shuffled": {"shuffle": True, "batch_size": 2},
    "stream": {"dataset": Stream, "collate_fn": with_noise, "batch_size": 2},
}


def read_by(rank, kind, *, workers=0, epoch=0, skipped=0, dropout=0):
    """Return the rows that a data rank of two reads in an epoch."""
    given = {"dataset": Noisy, "collate_fn": list, **LOADERS[kind]}
    loader = prepare_data_loader(
        DataLoader(given.pop("dataset")(), num_workers=workers, **given),
        num_processes=2,
        process_index=rank,
        put_on_device=False,
        use_seedable_sampler=True,
        data_seed=3,
    )
    share_draws(loader.base_dataloader, rank)
    loader = skip_first_batches(loader, skipped) if skipped else loader
    loader.set_epoch(epoch)
    random.seed(dropout), numpy.random.seed(dropout), torch.manual_seed(dropout)
    found = []
    for batch in drawn_alike(iter(loader), 3, epoch=epoch):
        random.random(), torch.rand(dropout), numpy.random.rand()  # as dropout of a stage draws
        found.append(batch)
    return found


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", LOADERS)
def test_replicas_share_an_order_however_it_is_drawn(kind, workers):
    if kind == "stream" and workers:
        pytest.skip("each process of a loader would read the whole stream")
    ranks = [read_by(rank, kind, workers=workers) for rank in (0, 1)]
    read = [row for batches in ranks for batch in batches for row in batch]
    rows, *drawn = zip(*read, strict=True)
    assert sorted(rows) == list(range(24))
    assert all(len(set(numbers)) == 24 for numbers in drawn)
    # Another stage of the first replica, whose dropout draws otherwise.
    assert read_by(0, kind, workers=workers, dropout=5) == ranks[0]
    other = read_by(0, kind, workers=workers, epoch=1)
    assert [row for batch in other for row, *_ in batch] != list(rows[:12])


def read_unprepared(rank, kind, *, workers=0, skipped=0, dropout=0):
    """Return the rows of a loader that a script made, of whose order a sampler takes its part."""
    given = {"dataset": Noisy, "collate_fn": list, **LOADERS[kind]}
    loader = DataLoader(given.pop("dataset")(), num_workers=workers, **given)
    for _ in range(2):  # of two calls of train
        share_draws(loader, rank)
        begin_late(loader)
    loader = accelerate.skip_first_batches(loader, skipped) if skipped else loader
    random.seed(dropout), numpy.random.seed(dropout), torch.manual_seed(dropout)
    return list(drawn_alike(iter(loader), 3))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", LOADERS)
def test_loaders_that_are_not_prepared_draw_one_order_and_rows_by_rank(kind, workers):
    if kind == "stream" and workers:
        pytest.skip("each process of a loader would read the whole stream")
    one, other = (read_unprepared(rank, kind, workers=workers) for rank in (0, 1))
    rows = [[row for batch in batches for row, *_ in batch] for batches in (one, other)]
    assert rows[0] == rows[1]
    assert sorted(rows[0]) == list(range(24))
    drawn = [{row[1] for batch in batches for row in batch} for batches in (one, other)]
    assert not drawn[0] & drawn[1]
    assert read_unprepared(0, kind, workers=workers, dropout=5) == one
    if kind != "stream":
        assert read_unprepared(1, kind, workers=0, skipped=2)[0] == read_unprepared(1, kind)[2]


@pytest.mark.parametrize("kind", LOADERS)
def test_an_epoch_that_is_resumed_has_the_rows_and_the_draws_of_a_whole_one(kind):
    assert read_by(1, kind, epoch=2, skipped=2) == read_by(1, kind, epoch=2)[2:]
    assert len(read_by(1, kind, epoch=2, skipped=2)) == 4


def test_the_order_is_that_of_the_plain_loader():
    """A sampler draws what it draws alone, from the epoch's seed."""
    ranks = [read_by(rank, "python") for rank in (0, 1)]
    with seeded(3):
        alone = list(Lazy(random.randrange))
    found = [row for pair in zip(*ranks, strict=True) for batch in pair for row, *_ in batch]
    assert found == alone


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
