# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wavemare.comm.gradient_rows import GradientRows
from wavemare.engine.sparse.buckets import (
    Member,
    default_bucket_bytes,
    embedding_weights,
    make_buckets,
)

FLOAT, HALF = torch.float32, torch.bfloat16

members = st.lists(
    st.tuples(st.integers(1, 700), st.sampled_from([FLOAT, HALF]), st.booleans()), max_size=30
).map(lambda rows: [Member(f"p{i}", *row) for i, row in enumerate(rows)])


@given(members, st.sampled_from([1, 8, 64]), st.sampled_from([1, 800, 4000, 1 << 30]))
def test_each_parameter_has_one_place_that_begins_a_block(members, block, bucket_bytes):
    buckets = make_buckets(members, block, bucket_bytes)
    by_name = {member.name: member for member in members}
    slots = [slot for bucket in buckets for slot in bucket.slots]
    assert sorted(slot.name for slot in slots) == sorted(by_name)
    for bucket in buckets:
        used = set()
        for slot in bucket.slots:
            assert slot.start % block == 0
            assert slot.stop - slot.start == by_name[slot.name].numel
            blocks = set(range(slot.start // block, -(-slot.stop // block)))
            assert not used & blocks
            used |= blocks
        assert used == set(range(-(-bucket.numel // block)))


@given(members, st.sampled_from([1, 8, 64]), st.sampled_from([1, 800, 4000, 1 << 30]))
def test_buckets_mix_neither_types_nor_embeddings_and_are_no_larger_than_asked(
    members, block, bucket_bytes
):
    by_name = {member.name: member for member in members}
    buckets = make_buckets(members, block, bucket_bytes)
    assert len({bucket.key for bucket in buckets}) == len(buckets)
    for bucket in buckets:
        inside = [by_name[slot.name] for slot in bucket.slots]
        assert {member.dtype for member in inside} == {bucket.dtype}
        assert len({member.embedding for member in inside}) == 1
        assert bucket.numel * bucket.dtype.itemsize <= bucket_bytes or len(inside) == 1


@given(members, st.sampled_from([800, 4000]))
def test_buckets_stand_in_the_order_in_which_backward_passes_complete_them(members, bucket_bytes):
    arrival = {member.name: time for time, member in enumerate(reversed(members))}
    complete = [
        max(arrival[slot.name] for slot in bucket.slots)
        for bucket in make_buckets(members, 8, bucket_bytes)
    ]
    assert complete == sorted(complete)


def test_small_parameters_share_a_bucket():
    buckets = make_buckets([Member(f"p{i}", 10, FLOAT) for i in range(5)], 16, 4 * 16 * 3)
    assert [bucket.key for bucket in buckets] == ["p4 to p2", "p1 to p0"]
    assert [bucket.numel for bucket in buckets] == [42, 26]


def test_what_is_tied_to_an_embedding_belongs_to_it():
    table = torch.nn.Embedding(4, 2)
    bag = torch.nn.EmbeddingBag(4, 2, sparse=True)
    head = torch.nn.Linear(2, 4)
    head.weight = table.weight
    model = torch.nn.ModuleList([table, bag, head])
    assert embedding_weights(model.modules()) == {id(head.weight), id(bag.weight)}
    assert embedding_weights(model.modules(), sparse=True) == {id(bag.weight)}


class Tables(torch.nn.Module):
    """Embeddings, one of them tied to a layer, and a bag."""

    def __init__(self):
        super().__init__()
        self.words, self.places = torch.nn.Embedding(50, 6), torch.nn.Embedding(9, 6)
        self.bag = torch.nn.EmbeddingBag(20, 6)
        self.tied = torch.nn.Embedding(12, 6)
        self.head = torch.nn.Linear(6, 12, bias=False)
        self.head.weight = self.tied.weight

    def forward(self, ids):
        hidden = self.words(ids) + self.places(input=ids % 9) + self.tied(ids % 12)
        return self.head(hidden + self.bag(ids % 20, torch.arange(len(ids)))).square().sum()


@pytest.mark.parametrize("order", ["forward and backward", "two forward passes first"])
def test_recorded_rows_are_those_whose_gradients_have_come(order):
    module = Tables()
    parameters = dict(module.named_parameters())
    members = [Member(name, p.numel(), FLOAT, True) for name, p in parameters.items()]
    (bucket,) = make_buckets(members, 4, 1 << 20)
    rows = GradientRows(module, parameters)
    with torch.no_grad():
        module(torch.tensor([49]))  # without a backward pass
    first = module(torch.tensor([3, 7, 3]))
    second = module(torch.tensor([40, 8])) if order.startswith("two") else None
    for loss in (first, second or module(torch.tensor([40, 8]))):
        module.zero_grad()
        loss.backward()
        flat = torch.zeros(-(-bucket.numel // 4) * 4)
        for slot in bucket.slots:
            flat[slot.start : slot.stop] = parameters[slot.name].grad.view(-1)
        nonzero = set(flat.view(-1, 4).any(1).nonzero().flatten().tolist())
        [tied] = [slot for slot in bucket.slots if slot.name == "tied.weight"]
        nonzero |= set(range(tied.start // 4, -(-tied.stop // 4)))  # whole: the layer uses all
        assert set(rows.take(bucket.slots, 4).tolist()) == nonzero
    rows.close()
    module(torch.tensor([1])).backward()
    assert rows.take(bucket.slots, 4).numel() == -(-tied.stop // 4) - tied.start // 4
    (alone,) = make_buckets([members[-1]], 4, 1 << 20)
    assert alone.slots[0].name == "tied.weight"
    assert rows.take(alone.slots, 4) is None


def test_rows_are_not_known_of_gradients_that_were_there_before():
    module = torch.nn.Sequential(torch.nn.Embedding(50, 6))
    parameters = dict(module.named_parameters())
    (bucket,) = make_buckets([Member("0.weight", 300, FLOAT, True)], 4, 1 << 20)
    rows = GradientRows(module, parameters)
    for ids, added, known in (([3], False, True), ([7], True, False), ([9], False, True)):
        if not added:
            module.zero_grad()
        module(torch.tensor(ids)).sum().backward()
        blocks = rows.take(bucket.slots, 4)
        assert (blocks is not None) == known
    assert set(blocks.tolist()) == {54 // 4, 59 // 4}


class Shifted(torch.nn.Embedding):
    """Reads other rows than its ids say, as some models' positions do."""

    def forward(self, ids):
        return super().forward(ids + 2)


@pytest.mark.parametrize("table", [Shifted(9, 4), torch.nn.Embedding(9, 4, sparse=True)])
def test_only_plain_embeddings_are_recorded(table):
    (bucket,) = make_buckets([Member("0.weight", 36, FLOAT, True)], 4, 1 << 20)
    module = torch.nn.Sequential(table)
    rows = GradientRows(module, dict(module.named_parameters()))
    module(torch.tensor([3])).sum().backward()
    assert rows.take(bucket.slots, 4) is None


@pytest.mark.parametrize(
    ("dense_mib", "expected_mib"), [(0.5, 2), (6, 2), (16, 4), (200, 50), (4000, 64)]
)
def test_default_buckets_leave_in_about_four_parts(dense_mib, expected_mib):
    dense = Member("layers", int(dense_mib * 2**20) // 4, FLOAT)
    words = Member("words", 1 << 30, FLOAT, True)
    assert default_bucket_bytes([dense, words]) == expected_mib << 20
