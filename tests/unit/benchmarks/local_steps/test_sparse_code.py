# SPDX-License-Identifier: Apache-2.0
"""Messages of the largest numbers alone: their size, what arrives, and what waits."""

import numpy as np
import pytest
import torch

from benchmarks.local_steps.sparse_code import CHUNK, DECAY, SparseCode
from support import message_twin as twin

CODES = [SparseCode(bits, top_k) for bits in (8, 4, 2) for top_k in (4, 64)]


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, CHUNK, 3 * CHUNK + 5])
def test_a_message_has_a_fixed_size_and_the_numbers_of_a_slow_twin(code, numel):
    values = twin.unlike_numbers(numel, numel)
    message = code.encode(torch.from_numpy(values))
    assert message.numel() == code.size(numel) == twin.size_of(numel, code.bits, code.top_k)
    expected = twin.arrived(values, code.bits, code.top_k)
    assert np.array_equal(code.decode(message, numel).numpy(), expected)


@pytest.mark.parametrize("code", CODES, ids=str)
def test_the_largest_numbers_arrive_and_no_others(code):
    values = torch.from_numpy(twin.unlike_numbers(3 * CHUNK + 5))
    found = code.decode(code.encode(values), len(values))
    for part, back in zip(values.split(CHUNK), found.split(CHUNK), strict=True):
        count = min(code.top_k, int(part.count_nonzero()))
        chosen = set(part.abs().topk(count).indices.tolist())
        assert set(back.nonzero().flatten().tolist()) <= chosen
        if code.bits == 2:  # the others round small ones to zero
            assert set(back.nonzero().flatten().tolist()) == chosen
        assert torch.equal(part.sign() * (back != 0), back.sign())


@pytest.mark.parametrize("code", CODES, ids=str)
def test_what_waits_decays_and_equal_numbers_are_taken_in_order(code):
    numbers, residual = torch.ones(CHUNK), torch.zeros(CHUNK)
    first = code.decode(code.encode_with(numbers, residual), CHUNK)
    assert first.nonzero().flatten().tolist() == list(range(code.top_k))
    assert torch.allclose(residual, numbers - first)
    second = code.decode(code.encode_with(torch.zeros(CHUNK), residual), CHUNK)
    assert second.nonzero().flatten().tolist() == list(range(code.top_k, 2 * code.top_k))
    assert torch.allclose(second + residual, (numbers - first) * DECAY)
