# SPDX-License-Identifier: Apache-2.0
"""Messages of few bits: their size, their error, and numbers that are not finite."""

import pytest
import torch

from wavemare.engine.local_steps.wire import GROUP, decode, encode


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("numel", [1, GROUP - 1, GROUP, 1000])
def test_a_message_has_a_fixed_size_and_an_error_of_half_a_step(bits, numel):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    values[: numel // 2] *= 1e-3  # a scale of its own
    message = encode(values, bits)
    groups = -(-numel // GROUP)
    assert message.numel() == groups * (4 + GROUP * bits // 8)
    found = decode(message, numel, bits)
    for part, back in zip(values.split(GROUP), found.split(GROUP), strict=True):
        step = part.abs().max() / (2 ** (bits - 1) - 1)
        assert (part - back).abs().max() <= step * 0.5001
        assert torch.equal(part.sign() * (back != 0), back.sign())


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_stay_and_numbers_that_are_not_finite_do_not_become_finite(bits):
    assert not decode(encode(torch.zeros(300), bits), 300, bits).any()
    for bad in (float("nan"), float("inf")):
        values = torch.ones(300)
        values[200] = bad
        found = decode(encode(values, bits), 300, bits)
        assert not found[200].isfinite()
        assert found[:GROUP].eq(1).all()
