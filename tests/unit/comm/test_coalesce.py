# SPDX-License-Identifier: Apache-2.0
"""Sums of rows with the same id, against a dictionary that adds one number at a time."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slow_twins import same

from wavemare.comm.rows import coalesce as at_once
from wavemare.comm.rows import coalesce_sorted

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(params=[at_once, coalesce_sorted], ids=["on a CPU", "as on a GPU"])
def coalesce(request):
    return request.param


def slow(ids, rows):
    """Return ids and sums, adding one row at a time."""
    number = np.float64 if rows.dtype == torch.float64 else np.float32
    terms = rows.to(torch.float64).numpy()
    sums = {}
    with np.errstate(all="ignore"):
        for i, key in enumerate(ids.tolist()):
            sums[key] = sums.get(key, np.zeros(rows.shape[1], number)) + terms[i].astype(number)
    keys = sorted(sums)
    wide = torch.tensor(np.array([sums[key] for key in keys], dtype=number))
    return keys, wide.reshape(len(keys), rows.shape[1]).to(rows.dtype)


def check(coalesce, ids, rows):
    before = rows.clone()
    unique, sums = coalesce(ids, rows)
    keys, expected = slow(ids, rows)
    assert unique.dtype == torch.int64
    assert unique.tolist() == keys
    assert same(sums, expected)
    assert same(rows, before)


@every_dtype
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ids=st.lists(st.integers(-2, 3) | st.integers(-(2**63), 2**63 - 1), max_size=40),
    width=st.integers(0, 5),
    data=st.data(),
)
def test_sums_are_those_of_the_slow_twin(coalesce, dtype, ids, width, data):
    seed = data.draw(st.integers(0, 2**32))
    rows = torch.randn(len(ids), width, generator=torch.Generator().manual_seed(seed))
    # Of very different sizes: another order of summation would round otherwise.
    rows *= 10.0 ** torch.randint(-4, 4, rows.shape)
    check(coalesce, torch.tensor(ids, dtype=torch.int64), rows.to(dtype))


@every_dtype
def test_popular_ids_and_large_rows(coalesce, dtype):
    ids = torch.from_numpy(np.random.default_rng(0).zipf(1.3, 600) % 40)
    # Rows of 16 bits are converted in parts of 2**18 elements.
    check(coalesce, ids, torch.randn(600, 1000).to(dtype))
    check(coalesce, ids, torch.randn(7, 600).to(dtype).T)


def test_16_bit_rows_are_rounded_once(coalesce):
    # 256 + 1 has no place in bfloat16: rounded at each step, the sum would stay at 256.
    rows = torch.tensor([[256.0]] + [[1.0]] * 256).to(torch.bfloat16)
    assert coalesce(torch.zeros(257, dtype=torch.int64), rows)[1].item() == 512.0
    # In float16 the sum on the way is beyond the largest number.
    rows = torch.tensor([[60000.0], [60000.0], [-60000.0]]).to(torch.float16)
    assert coalesce(torch.zeros(3, dtype=torch.int64), rows)[1].item() == 60000.0


def test_zeros_become_positive_and_ids_stay(coalesce):
    rows = torch.tensor([[-0.0, 1.0], [-0.0, -1.0], [-0.0, 0.0]])
    unique, sums = coalesce(torch.tensor([9, 9, -4]), rows)
    assert unique.tolist() == [-4, 9]
    assert not sums.view(torch.int32).any()


@every_dtype
def test_what_is_not_finite_survives(coalesce, dtype):
    inf, nan = torch.inf, torch.nan
    rows = torch.tensor([[inf, inf, nan], [1.0, -inf, 1.0], [inf, 2.0, 3.0]]).to(dtype)
    check(coalesce, torch.tensor([1, 1, 0]), rows)


def test_gradients_of_an_embedding_are_those_of_autograd(coalesce):
    table = torch.nn.Embedding(50, 4, sparse=True)
    tokens = torch.randint(0, 50, (200,))
    # Small integers: all sums are exact.
    factor = torch.randint(-5, 5, (200, 4)).float()
    (table(tokens) * factor).sum().backward()
    ids, rows = tokens, factor  # what autograd makes of them, a row for each token
    unique, sums = coalesce(ids, rows.requires_grad_())
    expected = table.weight.grad.coalesce()
    assert torch.equal(unique, expected.indices()[0])
    assert torch.equal(sums, expected.values())
    assert not sums.requires_grad
