# SPDX-License-Identifier: Apache-2.0
import torch
from hypothesis import given
from hypothesis import strategies as st

from wavemare.engine.sparse.buckets import Member, embedding_weights, make_buckets, row_tables

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
    assert row_tables(model.modules()) == {id(bag.weight)}
