# SPDX-License-Identifier: Apache-2.0
"""Messages of few bits and of few numbers: their size, their error, and odd numbers."""

from itertools import product

import numpy as np
import pytest
import torch

from support import message_twin as twin
from wavemare.engine.local_steps.codec import CHUNK, GROUP, Code
from wavemare.engine.local_steps.wire import decode_ranges, encode_mean, encode_ranges, ranges_of

CODES = [Code(bits, top_k) for bits, top_k in product((32, 8, 4, 2), (0, 4, 64))]
ROUNDED = [code for code in CODES if code.bits < 32]
WHOLE = [code for code in ROUNDED if not code.top_k]
SPARSE = [code for code in CODES if code.top_k]


def numbers(numel, seed=0):
    """Return numbers of very unlike sizes, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    values[: numel // 2] *= 1e-3
    values[numel // 3 : numel // 2] = 0
    return values


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, GROUP, CHUNK, 3 * CHUNK + 5])
def test_a_message_has_a_fixed_size_and_the_numbers_of_a_slow_twin(code, numel):
    values = numbers(numel, numel)
    message = code.encode(values)
    assert message.numel() == code.size(numel) == twin.size_of(numel, code.bits, code.top_k)
    expected = twin.arrived(values.numpy(), code.bits, code.top_k)
    assert np.array_equal(code.decode(message, numel).numpy(), expected)


@pytest.mark.parametrize("code", [Code(8), Code(4)], ids=str)
def test_an_integer_is_off_by_half_a_step(code):
    values = numbers(5 * GROUP)
    found = code.decode(code.encode(values), len(values))
    for part, back in zip(values.split(GROUP), found.split(GROUP), strict=True):
        step = part.abs().max() / (2 ** (code.bits - 1) - 1)
        assert (part - back).abs().max() <= step * 0.5001


@pytest.mark.parametrize("code", SPARSE, ids=str)
def test_the_largest_numbers_arrive_and_no_others(code):
    values = numbers(3 * CHUNK + 5)
    found = code.decode(code.encode(values), len(values))
    for part, back in zip(values.split(CHUNK), found.split(CHUNK), strict=True):
        count = min(code.top_k, int(part.count_nonzero()))
        chosen = set(part.abs().topk(count).indices.tolist())
        assert set(back.nonzero().flatten().tolist()) <= chosen
        if code.bits in (32, 2):  # others round small ones to zero
            assert set(back.nonzero().flatten().tolist()) == chosen
        assert torch.equal(part.sign() * (back != 0), back.sign())


@pytest.mark.parametrize("code", CODES, ids=str)
def test_zeros_stay_and_numbers_that_are_not_finite_do_not_become_finite(code):
    assert not code.decode(code.encode(torch.zeros(CHUNK + 9)), CHUNK + 9).any()
    for bad in (float("nan"), float("inf"), float("-inf")):
        values = torch.ones(2 * CHUNK)
        values[CHUNK + 7] = bad
        found = code.decode(code.encode(values), len(values))
        assert not found[CHUNK + 7].isfinite()
        assert found[:CHUNK].isfinite().all()


@pytest.mark.parametrize("code", [code for code in CODES if not code.is_exact], ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_means_have_the_bits_of_a_slow_twin_and_forget_nothing(code, ranks):
    numel = 5 * CHUNK + 77
    slow = twin.Messages(ranks, numel, code.bits, code.top_k)
    waiting, owed = torch.zeros(ranks, numel), torch.zeros(numel)
    given, arrived = torch.zeros(numel), torch.zeros(numel)
    for turn in range(3):
        changes = [numbers(numel, 10 * turn + rank) for rank in range(ranks)]
        pairs = zip(changes, waiting, strict=True)
        sent = [encode_ranges(code, change, kept, ranks) for change, kept in pairs]
        means = [
            encode_mean(code, messages, owed[own])
            for messages, own in zip(zip(*sent, strict=True), ranges_of(numel, ranks), strict=True)
        ]
        mean = decode_ranges(code, means, numel)
        assert np.array_equal(mean.numpy(), slow.mean([change.numpy() for change in changes]))
        given, arrived = given + sum(changes) / ranks, arrived + mean
    assert np.array_equal(owed.numpy(), slow.owed)
    if not code.top_k:  # where nothing decays
        assert torch.allclose(given, arrived + waiting.mean(0) + owed, atol=1e-5)
