# SPDX-License-Identifier: Apache-2.0
"""Messages of few bits: their size, their error, numbers that are not finite, and means."""

import numpy as np
import pytest
import torch

from support import message_twin as twin
from wavemare.engine.local_steps.codec import GROUP, Code
from wavemare.engine.local_steps.wire import decode_ranges, encode_mean, encode_ranges, ranges_of

CODES = [Code(bits) for bits in (8, 4, 2)]


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, GROUP - 1, GROUP, 3 * GROUP + 5, 100 * GROUP])
def test_a_message_has_a_fixed_size_and_the_numbers_of_a_slow_twin(code, numel):
    values = twin.unlike_numbers(numel, numel)
    message = code.encode(torch.from_numpy(values))
    assert message.numel() == code.size(numel) == twin.size_of(numel, code.bits)
    assert np.array_equal(code.decode(message, numel).numpy(), twin.arrived(values, code.bits))


@pytest.mark.parametrize("code", CODES[:2], ids=str)
def test_an_integer_is_off_by_half_a_step(code):
    values = torch.from_numpy(twin.unlike_numbers(5 * GROUP))
    found = code.decode(code.encode(values), len(values))
    for part, back in zip(values.split(GROUP), found.split(GROUP), strict=True):
        step = part.abs().max() / (2 ** (code.bits - 1) - 1)
        assert (part - back).abs().max() <= step * 0.5001


@pytest.mark.parametrize("code", CODES, ids=str)
def test_zeros_stay_and_numbers_that_are_not_finite_do_not_become_finite(code):
    assert not code.decode(code.encode(torch.zeros(300)), 300).any()
    for bad in (float("nan"), float("inf"), float("-inf")):
        values = torch.ones(300)
        values[200] = bad
        found = code.decode(code.encode(values), 300)
        assert not found[200].isfinite()
        assert found[:GROUP].eq(1).all()


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_means_have_the_bits_of_a_slow_twin_and_forget_nothing(code, ranks):
    numel = 40 * GROUP + 77
    slow = twin.Messages(ranks, numel, code.bits)
    waiting, owed = torch.zeros(ranks, numel), torch.zeros(numel)
    given, arrived = torch.zeros(numel), torch.zeros(numel)
    for turn in range(3):
        changes = [twin.unlike_numbers(numel, 10 * turn + rank) for rank in range(ranks)]
        expected = slow.mean(changes)
        changes = [torch.from_numpy(change) for change in changes]
        pairs = zip(changes, waiting, strict=True)
        sent = [encode_ranges(code, change, kept, ranks) for change, kept in pairs]
        owners = zip(zip(*sent, strict=True), ranges_of(numel, ranks), strict=True)
        means = [encode_mean(code, messages, owed[own]) for messages, own in owners]
        mean = decode_ranges(code, means, numel)
        assert np.array_equal(mean.numpy(), expected)
        given, arrived = given + sum(changes) / ranks, arrived + mean
    assert np.array_equal(owed.numpy(), slow.owed)
    assert torch.allclose(given, arrived + waiting.mean(0) + owed, atol=1e-5)
