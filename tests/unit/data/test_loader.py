# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.refusals import refuses
from wavemare.data.loader import ResumableLoader, evaluation_batches
from wavemare.errors import CheckpointError, ConfigError, DataError


class Epochs:
    """Samples that tell index and epoch."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.at(index, 0)

    def at(self, index, epoch):
        return index, epoch


def samples_of(batch):
    """Return a batch of torch's ``default_collate`` as a list of samples."""
    return [(int(index), int(epoch)) for index, epoch in zip(*batch, strict=True)]


def load(dataset, micro=2, rank=0, world=1, seed=0, consumed=0, **options):
    loader = ResumableLoader(
        dataset, micro_batch_size=micro, data_rank=rank, data_world_size=world, seed=seed, **options
    )
    loader.load_state_dict({**loader.state_dict(), "consumed_samples": consumed})
    return loader


def following(loader):
    return samples_of(next(loader))


def stream(length, count, seed=0, **options):
    loader = load(Epochs(length), micro=1, seed=seed, **options)
    return [following(loader)[0] for _ in range(count)]


@given(st.integers(1, 30), st.integers(0, 5))
def test_every_epoch_holds_every_sample_once(length, seed):
    samples = stream(length, 3 * length, seed)
    for epoch in range(3):
        part = samples[epoch * length : (epoch + 1) * length]
        assert sorted(part) == [(i, epoch) for i in range(length)]


def test_epochs_and_seeds_are_ordered_differently():
    samples = [index for index, _ in stream(50, 100)]
    assert samples[:50] != samples[50:]
    assert samples[:50] != list(range(50))
    assert [i for i, _ in stream(50, 50, seed=1)] != samples[:50]
    assert [i for i, _ in stream(50, 50)] == samples[:50]
    assert stream(4, 6, shuffle=False) == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1)]


@given(
    length=st.integers(1, 40),
    micro=st.integers(1, 4),
    world=st.integers(1, 4),
    consumed=st.integers(0, 100),
)
def test_ranks_share_the_stream(length, micro, world, consumed):
    loaders = [load(Epochs(length), micro, rank, world, consumed=consumed) for rank in range(world)]
    seen = [sample for _ in range(4) for loader in loaders for sample in following(loader)]
    assert seen == stream(length, consumed + 4 * micro * world)[consumed:]
    assert {loader.consumed_samples for loader in loaders} == {consumed + 4 * micro * world}


def test_a_global_batch_does_not_depend_on_the_number_of_ranks():
    def global_batches(micro, world, accumulation):
        loaders = [load(Epochs(37), micro, rank, world) for rank in range(world)]
        return [
            sorted(s for _ in range(accumulation) for loader in loaders for s in following(loader))
            for _ in range(9)
        ]

    expected = global_batches(12, 1, 1)
    for micro, world, accumulation in ((3, 4, 1), (3, 2, 2), (1, 4, 3), (6, 1, 2)):
        assert global_batches(micro, world, accumulation) == expected


@given(st.integers(0, 12), st.integers(1, 3), st.integers(1, 3))
def test_resume_is_exact(steps, micro, world):
    loader = load(Epochs(11), micro, world - 1, world, seed=5)
    for _ in range(steps):
        next(loader)
    state = loader.state_dict()
    resumed = load(Epochs(11), micro, world - 1, world, seed=5)
    resumed.load_state_dict(state)
    assert [following(resumed) for _ in range(8)] == [following(loader) for _ in range(8)]


@pytest.mark.parametrize(
    ("other", "key"),
    [
        (load(Epochs(12)), "data.num_samples"),
        (load(Epochs(11), seed=1), "data.seed"),
        (load(Epochs(11), shuffle=False), "data.shuffle"),
    ],
)
def test_a_state_of_another_stream_is_refused(other, key):
    loader, state = load(Epochs(11)), other.state_dict()
    with refuses(CheckpointError, key):
        loader.load_state_dict({**state, "consumed_samples": 4})
    assert loader.consumed_samples == 0


def test_megatrons_order_is_for_one_number_of_steps():
    longer = load(Epochs(12), shuffle=False).state_dict()
    with refuses(CheckpointError, "data.num_samples", 12):
        load(Epochs(11), shuffle=False).load_state_dict(longer)


def test_a_state_without_position_is_refused():
    loader = load(Epochs(11))
    state = loader.state_dict()
    del state["consumed_samples"]
    with refuses(CheckpointError, "data.consumed_samples", None):
        loader.load_state_dict(state)


@given(
    length=st.integers(1, 40),
    micro=st.integers(1, 4),
    world=st.integers(1, 4),
    limit=st.none() | st.integers(0, 40),
)
def test_evaluation(length, micro, world, limit):

    def evaluate(rank):
        return [*map(samples_of, evaluation_batches(Epochs(length), micro, rank, world, limit))]

    if length < world:
        with refuses(DataError, "--data", length):
            evaluation_batches(Epochs(length), micro, 0, world)  # before a batch is asked for
        return
    ranks = [evaluate(rank) for rank in range(world)]
    read = length if limit is None else min(max(limit, world), length)
    micro = min(micro, read // world)
    rounds = read // (micro * world)
    assert {len(batches) for batches in ranks} == {rounds}
    assert {len(batch) for batches in ranks for batch in batches} == {micro}
    seen = [i for batches in zip(*ranks, strict=True) for batch in batches for i in batch]
    assert seen == [(length * n // read, 0) for n in range(rounds * micro * world)]
    assert len(set(seen)) == len(seen)


def test_an_evaluation_leaves_torchs_random_numbers_alone():
    state = torch.get_rng_state()
    assert len([*evaluation_batches(Epochs(4), 2)]) == 2
    assert torch.equal(torch.get_rng_state(), state)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(1, 40),
    st.integers(0, 3),
    st.integers(1, 4),
)
def test_unequal_shares_give_the_order_of_one_rank(shares, length, seed, rounds):
    shares[-1] += -sum(shares) % len(shares)  # so that their mean is a whole number
    world, micro = len(shares), sum(shares) // len(shares)
    loaders = [
        load(Epochs(length), micro=micro, rank=rank, world=world, seed=seed, shares=shares)
        for rank in range(world)
    ]
    together = [sample for _ in range(rounds) for loader in loaders for sample in following(loader)]
    assert together == stream(length, len(together), seed)
    assert {loader.consumed_samples for loader in loaders} == {len(together)}


def test_a_run_resumes_under_other_shares():
    loaders = [load(Epochs(50), micro=3, rank=rank, world=2, shares=[4, 2]) for rank in range(2)]
    got = [sample for loader in loaders for sample in following(loader)]
    state = loaders[0].state_dict()
    others = [load(Epochs(50), micro=3, rank=rank, world=2) for rank in range(2)]
    for other in others:
        other.load_state_dict(state)
    got += [sample for loader in others for sample in following(loader)]
    assert got == stream(50, 12)


@pytest.mark.parametrize("shares", [[4, 3], [6, 0], [6]])
def test_shares_that_do_not_fit_are_refused(shares):
    with refuses(ConfigError, "shares", shares):
        load(Epochs(9), micro=3, rank=1, world=2, shares=shares)
