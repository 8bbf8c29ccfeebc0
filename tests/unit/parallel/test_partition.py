# SPDX-License-Identifier: Apache-2.0
"""State dicts cut into ranks' parts and merged again."""

import pytest
import torch
from tensor_models import KINDS, build, split_state_dict

from wavemare.parallel.tensor.partition import merge_tensor, partition_of
from wavemare.parallel.tensor.vocabulary import VocabularyShare


def split(state, size):
    return [split_state_dict(state, rank, size) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", list(KINDS))
def test_merging_is_the_inverse_of_splitting_to_the_byte(name, size):
    state = build(name).state_dict(keep_vars=True)
    shards = split(state, size)
    merged = {name: merge_tensor(name, [shard[name] for shard in shards], None) for name in state}
    for key, whole in state.items():
        assert merged[key].dtype == whole.dtype
        assert merged[key].detach().numpy().tobytes() == whole.detach().numpy().tobytes(), key


def test_nothing_of_a_part_shares_memory_with_the_whole():
    for name, whole in build("gpt2-101").state_dict().items():
        partition = partition_of(name)
        if partition is not None:
            part = partition.part(whole, 1, 2)
            assert part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
            assert part.is_contiguous()
            assert part.untyped_storage().nbytes() == part.nbytes


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_gets_queries_keys_and_values_of_its_heads(size):
    heads, width = 4, 8
    model = build("gpt2")
    weight = model.transformer.h[0].attn.c_attn.weight.detach()
    bias = model.transformer.h[0].attn.c_attn.bias.detach()
    for rank, shard in enumerate(split(model.state_dict(), size)):
        columns = []
        for what in range(3):  # queries, keys, values
            for head in range(heads):
                if head // (heads // size) == rank:
                    start = what * heads * width + head * width
                    columns += range(start, start + width)
        assert torch.equal(shard["transformer.h.0.attn.c_attn.weight"], weight[:, columns])
        assert torch.equal(shard["transformer.h.0.attn.c_attn.bias"], bias[columns])


def test_merging_drops_padding_if_told_the_size_of_the_vocabulary():
    name, whole = "transformer.wte.weight", torch.randn(101, 4)
    shares = [VocabularyShare(101, rank, 2) for rank in range(2)]
    parts = [share.padded(share.part(whole)) for share in shares]
    assert [part.shape for part in parts] == [(56, 4)] * 2
    assert torch.equal(merge_tensor(name, parts, 101), whole)


@pytest.mark.parametrize(
    ("tokens", "ranks", "rows", "held"),
    [
        (96, 2, 48, [48, 48]),
        (101, 2, 56, [56, 45]),
        (20, 4, 8, [8, 8, 4, 0]),
        (5, 2, 8, [5, 0]),
        (50257, 8, 6288, [6288] * 7 + [6241]),
        (50304, 8, 6288, [6288] * 8),
    ],
)
def test_all_ranks_hold_equally_many_rows_and_each_token_is_held_once(tokens, ranks, rows, held):
    shares = [VocabularyShare(tokens, rank, ranks) for rank in range(ranks)]
    assert [share.rows for share in shares] == [rows] * ranks
    assert [share.held for share in shares] == held
    assert sum(held) == tokens
    found = torch.stack([share.locate(torch.arange(tokens))[1] for share in shares])
    assert torch.equal(found.sum(dim=0), torch.ones(tokens, dtype=torch.int64))


@pytest.mark.parametrize("token", [-1, 101, 111])
def test_a_token_that_no_rank_holds_is_an_error(token):
    with pytest.raises(RuntimeError, match="101"):
        VocabularyShare(101, 1, 2).locate(torch.tensor([5, token]))
