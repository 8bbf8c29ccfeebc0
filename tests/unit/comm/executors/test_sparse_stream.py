# SPDX-License-Identifier: Apache-2.0
"""Sparse streams and what they are made of, against dictionaries and dense vectors."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wavemare.comm.executors.pairs import index_dtype, nonzero_ids
from wavemare.comm.executors.sparse_stream import SparseStream, merge_pairs

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
vectors = st.lists(st.sampled_from([0, 0, 0, 0.1, -0.1, 1e8, -7.3]), min_size=24, max_size=24)
pairs = st.dictionaries(st.integers(0, 40), st.floats(-9, 9, width=32), max_size=30)


def as_tensors(numbers, dtype=torch.float32):
    ids = sorted(numbers)
    values = torch.tensor([numbers[i] for i in ids], dtype=dtype)
    return torch.tensor(ids, dtype=torch.int32), values


@given(a=pairs, b=pairs)
def test_merged_pairs_are_those_of_a_dictionary(a, b):
    ids, values = merge_pairs(*as_tensors(a), *as_tensors(b))
    wanted = {i: np.float32(a.get(i, 0)) + np.float32(b.get(i, 0)) for i in a.keys() | b.keys()}
    assert ids.tolist() == sorted(wanted)
    assert ids.dtype == torch.int32
    assert values.tolist() == [wanted[i] for i in sorted(wanted)]


def test_whole_numbers_wrap_around():
    most = {3: 2**31 - 1}
    _, values = merge_pairs(*as_tensors(most, torch.int32), *as_tensors({3: 2}, torch.int32))
    assert values.tolist() == [-(2**31) + 1]
    assert values.dtype == torch.int32


@given(vectors, vectors, st.sampled_from([1, 3, 24]), st.sampled_from([1, 3, 24]))
def test_sums_do_not_depend_on_which_of_the_two_is_dense(left, right, some, more):
    a, b = torch.tensor(left), torch.tensor(right)
    # All, a third or one of the elements are set to zero: streams are sparse or dense.
    a[::some] = 0
    b[::more] = 0
    total = SparseStream.of(a) + SparseStream.of(b)
    result = torch.full_like(a, 5)
    total.write(result, 1.0)
    assert torch.equal(result.view(torch.int32), (a + b).view(torch.int32))


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 12), (torch.float64, 16)])
def test_a_stream_is_dense_as_soon_as_pairs_are_no_smaller(dtype, limit):
    for count in range(25):
        flat = torch.zeros(24, dtype=dtype)
        flat[:count] = 1
        stream = SparseStream.of(flat)
        assert (stream.ids is None) == (count >= limit)
        assert sum(tensor.nbytes for tensor in stream.tensors) <= flat.nbytes
    half = torch.zeros(24, dtype=dtype)
    half[: limit - 1] = 1
    merged = SparseStream.of(half) + SparseStream.of(half.flip(0))
    assert merged.ids is None


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_elements_are_zero_by_their_bits(dtype):
    tiny = torch.finfo(dtype).smallest_normal / 4
    flat = torch.tensor([0, -0.0, float("nan"), float("inf"), tiny, -1, 0], dtype=dtype)
    assert nonzero_ids(flat).tolist() == [2, 3, 4, 5]
    assert nonzero_ids(flat).dtype == torch.int32
    assert nonzero_ids(flat[:6]).tolist() == [2, 3, 4, 5]
    assert nonzero_ids(flat[:0]).tolist() == []
    whole = torch.tensor([0, -(2**31), 1], dtype=torch.int32)
    assert nonzero_ids(whole).tolist() == [1, 2]


def test_indices_are_as_short_as_the_vector_allows():
    assert index_dtype(1 << 31) == torch.int32
    assert index_dtype((1 << 31) + 1) == torch.int64


def test_halves_are_summed_in_float32_and_rounded_once():
    ones = torch.ones(1, dtype=torch.bfloat16)
    total = SparseStream.of(ones)
    for _ in range(300):
        total = total + SparseStream.of(ones)
    total.write(ones, 1.0)
    # bfloat16 by itself would stop at 256.
    assert ones.item() == torch.tensor(301.0).bfloat16().item()
