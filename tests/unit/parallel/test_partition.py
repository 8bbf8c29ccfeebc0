# SPDX-License-Identifier: Apache-2.0
"""State dicts cut into ranks' parts and merged again."""

import copy

import pytest
import torch
from tensor_models import KINDS, SHARED, build

from wavemare.parallel.tensor.layers import VocabularyShare
from wavemare.parallel.tensor.partition import Partition, partition_of
from wavemare.parallel.tensor.split import split_model


def parts_of(whole, ranks, as_rank):
    """Each rank's state dict."""
    found = []
    for rank in range(ranks):
        with as_rank(rank, ranks) as group:
            model = split_model(copy.deepcopy(whole), group, verify=False)
        found.append(model.state_dict(keep_vars=True))
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", [*KINDS, *SHARED, "llama", "gpt_neox", "phi3", "roberta", "opt"])
def test_merging_is_the_inverse_of_splitting_to_the_byte(name, size, as_rank):
    whole = build(name)
    shards = parts_of(whole, size, as_rank)
    cut = 0
    for key, value in whole.state_dict().items():
        partition = partition_of(shards[0][key])
        cut += partition is not None
        parts = [shard[key].detach() for shard in shards]
        merged = partition.whole(parts) if partition else parts[0]
        assert merged.dtype == value.dtype
        assert merged.numpy().tobytes() == value.numpy().tobytes(), key
    assert cut >= 6


def test_nothing_of_a_part_shares_memory_with_the_whole():
    for partition in (Partition(0), Partition(1, blocks=2), Partition(0, tokens=7)):
        whole = torch.randn(8, 8)[: partition.tokens or 8]
        part = partition.part(whole, 1, 2)
        assert part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
        assert part.is_contiguous()
        assert part.untyped_storage().nbytes() == part.nbytes


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
