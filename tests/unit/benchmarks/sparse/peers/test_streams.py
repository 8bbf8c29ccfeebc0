# SPDX-License-Identifier: Apache-2.0
"""Sparse streams of SparCML, against dense vectors."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.sparse.peers.sparcml import SparseStream

vectors = st.lists(st.sampled_from([0.0, 0.0, 0.0, 0.1, -0.1, 1e8, -7.3]), min_size=24, max_size=24)


def stream(flat):
    ids = flat.nonzero().flatten()
    return SparseStream.of(len(flat), ids.int(), flat[ids])


@given(vectors, vectors, st.sampled_from([1, 3, 24]), st.sampled_from([1, 3, 24]))
def test_sums_do_not_depend_on_which_of_the_two_is_dense(left, right, some, more):
    a, b = torch.tensor(left), torch.tensor(right)
    # All, a third or one of the elements are set to zero: streams are sparse or dense.
    a[::some] = 0
    b[::more] = 0
    total = stream(a) + stream(b)
    result = torch.zeros_like(a)
    total.write(result)
    assert torch.equal(result.view(torch.int32), (a + b).view(torch.int32))


def test_a_stream_is_dense_as_soon_as_pairs_are_no_smaller():
    for count in range(25):
        flat = torch.zeros(24)
        flat[:count] = 1
        found = stream(flat)
        assert (found.ids is None) == (count >= 12)
        assert sum(tensor.nbytes for tensor in found.tensors) <= flat.nbytes
    half = torch.zeros(24)
    half[:11] = 1
    assert (stream(half) + stream(half.flip(0))).ids is None
