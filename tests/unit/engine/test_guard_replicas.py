# SPDX-License-Identifier: Apache-2.0
"""Digests of weights: what they tell apart, and who is in the minority."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wavemare.engine.guard_replicas import digest, minority

WORD = 2**64
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8]


def words_of(tensor):
    """The sum of a tensor's 64-bit words, padded with zeros, by Python's integers."""
    contents = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    contents += bytes(-len(contents) % 8)
    words = (contents[i : i + 8] for i in range(0, len(contents), 8))
    total = sum(int.from_bytes(word, "little") for word in words) % WORD
    return total - WORD if total >= WORD // 2 else total


@given(st.integers(0, 40), st.sampled_from(DTYPES), st.integers(0, 3), st.data())
def test_a_digest_is_the_sum_of_words_and_sees_each_bit(length, dtype, offset, data):
    raw = torch.randint(0, 256, ((length + offset) * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype)[offset:] if raw.numel() else torch.empty(0, dtype=dtype)
    before = int(digest(tensor))
    assert before == words_of(tensor)
    if not length:
        return
    bit = data.draw(st.integers(0, 8 * dtype.itemsize * length - 1))
    raw[offset * dtype.itemsize + bit // 8] ^= 1 << bit % 8
    assert int(digest(tensor)) != before


def test_a_digest_does_not_depend_on_where_a_parameter_lies():
    whole = torch.randn(7, 5)
    assert digest(whole) == digest(torch.cat([torch.zeros(3), whole.flatten()])[3:].view(7, 5))
    assert digest(whole) == digest(whole.t().contiguous().t())


@pytest.mark.parametrize(
    ("table", "odd"),
    [
        ([(1,), (1,), (2,)], [2]),
        ([(2,), (1,), (1,)], [0]),
        ([(1,), (2,)], []),
        ([(1, 2), (1, 2), (1, 3), (1, 2), (4, 2)], [2, 4]),
        ([(1,), (2,), (3,)], []),
        ([(1,), (1,), (2,), (2,)], []),
    ],
)
def test_the_minority(table, odd):
    assert minority(table) == odd
