# SPDX-License-Identifier: Apache-2.0
"""The memory estimate against hand-computed cases and the papers' numbers."""

import pytest

from wavemare.observe.memory import estimate_activations, estimate_memory

BILLION = 10**9


def test_fp32_adam_is_16_bytes_per_parameter():
    estimate = estimate_memory(1000)
    assert (estimate.weights, estimate.gradients, estimate.optimizer) == (4000, 4000, 8000)
    assert estimate.total == 16_000


@pytest.mark.parametrize(
    ("stage", "gigabytes"),
    # Rajbhandari et al. 2020, figure 1: 7.5 billion parameters, 64 ranks, mixed-precision Adam.
    [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)],
)
def test_zero_paper_figure_1(stage, gigabytes):
    estimate = estimate_memory(
        7_500_000_000, bytes_per_parameter=2, zero_stage=stage, data_world_size=64
    )
    assert estimate.total / BILLION == pytest.approx(gigabytes, abs=0.05)


def test_shares_round_up_and_plain_sgd_has_no_state():
    assert estimate_memory(10, zero_stage=3, data_world_size=4).weights == 3 * 4
    assert estimate_memory(10, optimizer_states=0).optimizer == 0


SHAPE = {"batch": 4, "sequence": 2048, "hidden": 6144, "heads": 64, "layers": 1}


@pytest.mark.parametrize("t", [1, 8])
def test_activations_of_the_22b_models_layer(t):
    # Korthikanti et al. 2022, equation 2 (with t = 1 it is 1): s b h (10 + 24 / t + 5 a s / (h t)).
    expected = 2048 * 4 * 6144 * (10 + 24 / t + 5 * 64 * 2048 / (6144 * t))
    found = estimate_activations(**SHAPE, bytes_per_value=2, tensor_world_size=t)
    assert found == pytest.approx(expected)


def test_activations_by_hand_in_fp32():
    # s b h (16 * 4 + 2) + a s s b (2 * 4 + 1), two layers, three micro-batches, logits on top.
    layer = 8 * 2 * 16 * 66 + 4 * 8 * 8 * 2 * 9
    output = 8 * 2 * (4 * 16 + 4 * 100)
    shape = {"batch": 2, "sequence": 8, "hidden": 16, "heads": 4, "layers": 2}
    assert estimate_activations(**shape) == 2 * layer
    found = estimate_activations(**shape, vocabulary=100, micro_batches=3)
    assert found == 3 * (2 * layer + output)


def test_text_names_the_parts():
    text = str(estimate_memory(2**28, activations=2**29))
    assert text == "4.5 GiB (weights 1.0, gradients 1.0, optimizer 2.0, activations 0.5)"
