# SPDX-License-Identifier: Apache-2.0
"""The squared norm of tensors of any type, read in one pass."""

import math

import pytest
import torch

from wavemare.engine.optim.gradients import gradient_values, squared_norm

CPU = torch.device("cpu")


def test_a_norm_of_fp16_does_not_end_at_the_largest_number_of_fp16():
    gradients = [torch.full((100_000,), 300.0, dtype=torch.float16)]
    assert float(squared_norm(gradients, CPU)) == pytest.approx(300.0**2 * 100_000, rel=1e-3)


def test_tensors_of_several_types_and_sizes_are_added_up():
    torch.manual_seed(1)
    types = torch.float16, torch.bfloat16, torch.float32, torch.float64
    tensors = [torch.randn(3, 5).to(dtype) for dtype in types] + [torch.ones(()), torch.empty(0)]
    expected = sum(float(tensor.double().square().sum()) for tensor in tensors)
    assert float(squared_norm(tensors, CPU)) == pytest.approx(expected, rel=1e-6)
    assert float(squared_norm([], CPU)) == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16, torch.float64])
def test_one_bad_element_is_seen(value, dtype):
    tensors = [torch.ones(3, dtype=dtype), torch.ones(2, 2, dtype=dtype)]
    assert squared_norm(tensors, CPU).isfinite()
    tensors[1][0, 1] = value
    assert not squared_norm(tensors, CPU).isfinite()


def test_repeated_rows_of_a_sparse_gradient_are_added_first():
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 1, 3])).sum().backward()
    found = float(squared_norm(gradient_values([table.weight]), CPU))
    assert found == pytest.approx(2 * 2.0**2 + 2 * 1.0, rel=1e-6)
    assert table.weight.grad.to_dense().tolist() == [[0, 0], [2, 2], [0, 0], [1, 1]]
