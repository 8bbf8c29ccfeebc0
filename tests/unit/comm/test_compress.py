# SPDX-License-Identifier: Apache-2.0
"""Compressors against slow twins, the conservation law of error feedback, and a training."""

import io
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from support.refusals import refuses
from wavemare.comm.compressor import block_norms, make_compressor
from wavemare.comm.config import CompressorConfig
from wavemare.errors import CheckpointError, ConfigError


def compressor_of(kind, block, **values):
    return make_compressor(CompressorConfig.parse({"type": kind, **values}), block)


top_k = partial(compressor_of, "block_topk")
random_k = partial(compressor_of, "block_randomk")
threshold_of = partial(compressor_of, "block_threshold")
MAKERS = {
    "block_topk": partial(top_k, 8, ratio=0.1),
    "block_randomk": partial(random_k, 8, ratio=0.1, seed=5),
    "block_threshold": partial(threshold_of, 8, threshold=12.0),
}
RAGGED = 8 * 29 + 3
DTYPES = (torch.float32, torch.bfloat16)
every_kind = pytest.mark.parametrize("kind", MAKERS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def bits(tensor):
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def same(a, b):
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def spread(mask, block, numel):
    """Return the mask of the elements of the chosen blocks."""
    return mask.repeat_interleave(block)[:numel]


def gradients(steps, dtype=torch.float32, seed=0, numel=RAGGED):
    """Yield noise whose size differs between blocks and steps; some of it is -0.0."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.rand(numel, generator=random) ** 3 * 4
    for _ in range(steps):
        noise = torch.randn(numel, generator=random) * sizes
        yield noise.masked_fill(torch.rand(numel, generator=random) < 0.05, -0.0).to(dtype)


def slow_split(mask, accumulated, block):
    """Return (sent, residual), element by element."""
    sent, residual = torch.zeros_like(accumulated), torch.zeros_like(accumulated)
    for i in range(len(accumulated)):
        (sent if mask[i // block] else residual)[i] = accumulated[i]
    return sent, residual


def waiting(compressor):
    """Return the residual of the bucket "b"; None if nothing of it was ever kept."""
    return compressor.state_dict()["residuals"].get("b")


def slow_largest(scores, k):
    order = sorted(range(len(scores)), key=lambda j: (-scores[j], j))
    return [j in order[:k] and scores[j] > 0 for j in range(len(scores))]


@every_kind
@every_dtype
@pytest.mark.parametrize("numel", [0, 1, 7, 8, 67, RAGGED])
def test_a_step_is_that_of_the_slow_twin(kind, dtype, numel):
    compressor = MAKERS[kind]()
    old = torch.zeros(numel, dtype=dtype)
    for gradient in gradients(20, dtype, numel=numel):
        accumulated = gradient + old
        mask = compressor.step("b", gradient)
        assert (mask.dtype, len(mask)) == (torch.bool, -(-numel // 8))
        sent, old = slow_split(mask, accumulated, 8)
        assert same(gradient, sent)
        assert same(waiting(compressor), old)


# Squares and sums of such numbers are exact, so that ties are ties.
SMALL = st.lists(st.integers(-3, 3), min_size=1, max_size=60)


@given(values=SMALL, k=st.integers(1, 12), block=st.integers(1, 7))
def test_largest_blocks_are_those_of_the_slow_twin(values, k, block):
    norms = [sum(v * v for v in values[j : j + block]) ** 0.5 for j in range(0, len(values), block)]
    k = min(k, len(norms))
    share = k / len(norms)
    for dtype in (*DTYPES, torch.float16, torch.float64):
        flat = torch.tensor(values, dtype=dtype)
        assert top_k(block, ratio=share).select(flat).tolist() == slow_largest(norms, k)
        threshold = sorted(norms)[len(norms) // 2] or 1.0
        expected = [norm >= threshold - 1e-6 for norm in norms]
        assert threshold_of(block, threshold=threshold - 1e-6).select(flat).tolist() == expected


@pytest.mark.parametrize(
    ("ratio", "blocks", "k"),
    [
        (0.01, 1000, 10),
        (0.07, 100, 7),
        (0.29, 100, 29),
        (0.01, 30, 1),
        (1.0, 13, 13),
        (0.5, 1, 1),
        (0.99, 0, 0),
    ],
)
def test_ratio_is_a_share_of_the_blocks_and_at_least_one(ratio, blocks, k):
    assert top_k(4, ratio=ratio).count(blocks) == k
    for kind in (top_k, random_k):
        assert kind(4, ratio=ratio).step("b", torch.randn(blocks * 4)).sum() == k


def test_random_blocks_are_the_same_on_all_ranks_and_others_in_each_step():
    ranks = [random_k(4, ratio=0.02, seed=9) for _ in range(2)]
    # Of other data on each rank.
    masks = [[rank.step("b", torch.randn(4000)) for _ in range(50)] for rank in ranks]
    assert torch.equal(torch.stack(masks[0]), torch.stack(masks[1]))
    assert all(not torch.equal(a, b) for a, b in pairwise(masks[0]))
    other = random_k(4, ratio=0.02, seed=10)
    assert not torch.equal(other.step("b", torch.randn(4000)), masks[0][0])
    # Another bucket has other blocks, and does not disturb the first one's.
    assert not torch.equal(ranks[0].step("c", torch.randn(4000)), masks[0][0])
    assert torch.equal(ranks[0].step("b", torch.randn(4000)), ranks[1].step("b", torch.randn(4000)))


def test_the_draw_is_the_same_in_all_processes():
    # Pinned, as all ranks and resumed runs must draw alike: no hash seed of Python, no clock.
    mask = random_k(1, ratio=0.1, seed=1).step("layer.0", torch.ones(40))
    assert mask.nonzero().flatten().tolist() == [7, 15, 22, 27]


@every_kind
@every_dtype
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_what_is_not_finite_is_sent_at_once(kind, dtype, value):
    compressor = MAKERS[kind]()
    bad = [0, 5, 6, 7, 20, 29]  # more than k, the ragged one too
    for step, gradient in enumerate(gradients(30, dtype)):
        if step % 10 == 3:
            gradient[[j * 8 + 1 for j in bad]] = value
        mask = compressor.step("b", gradient)
        assert waiting(compressor).isfinite().all()
        if step % 10 == 3:
            assert mask[bad].all()
            assert (~gradient.isfinite()).sum() == len(bad)
    assert gradient.isfinite().all()


def test_blocks_of_zeros_are_not_sent_and_wait_as_they_are():
    gradient = torch.tensor([0.0, -0.0, 3.0, 0.0, -0.0, -0.0])
    for kind in (top_k, random_k):
        compressor, sent = kind(2, ratio=1.0), gradient.clone()
        assert compressor.step("b", sent).tolist() == [False, True, False]
        assert same(sent, torch.tensor([0.0, 0.0, 3.0, 0.0, 0.0, 0.0]))  # no -0.0 any more


def test_one_block_that_is_not_finite_takes_a_place_of_the_largest():
    flat = torch.arange(20.0)
    flat[3] = torch.nan
    assert top_k(2, ratio=0.3).select(flat).nonzero().flatten().tolist() == [1, 8, 9]


def test_a_sum_that_overflows_is_sent():
    compressor = top_k(1, ratio=0.3)
    for _ in range(2):
        gradient = torch.tensor([40000.0, 65504.0, 1.0], dtype=torch.float16)
        mask = compressor.step("b", gradient)
    assert mask.tolist() == [True, False, False]
    assert gradient.tolist() == [torch.inf, 0.0, 0.0]
    assert waiting(compressor).tolist() == [0.0, 65504.0, 2.0]


@every_kind
def test_warmup_sends_everything_and_keeps_nothing(kind):
    compressor = MAKERS[kind](warmup_steps=3)
    for step, gradient in enumerate(gradients(5)):
        before = gradient.clone()
        mask = compressor.step("b", gradient)
        if step < 3:
            assert mask is None
            assert same(gradient, before)
            assert waiting(compressor) is None
        else:
            assert not mask.all()
            assert waiting(compressor).any()


def test_density_falls_geometrically_after_the_steps_that_send_all():
    compressor = top_k(1, ratio=0.01, warmup_steps=2, density_warmup_steps=4)
    masks = [compressor.step("b", torch.randn(1000)) for _ in range(8)]
    counts = [1000 if mask is None else int(mask.sum()) for mask in masks]
    falling = [round(1000 * 0.25 * 0.04 ** (i / 4)) for i in range(4)]
    assert counts == [1000, 1000, *falling, 10, 10]
    assert falling == [250, 112, 50, 22]
    # No step sends less than later ones.
    config = CompressorConfig(ratio=0.5, density_warmup_steps=9)
    assert [config.share(step) for step in (0, 9)] == [0.5, 0.5]


@every_kind
def test_without_error_feedback_nothing_is_kept(kind):
    compressor = MAKERS[kind](error_feedback=False)
    for gradient in gradients(50):
        before = gradient.clone()
        mask = compressor.step("b", gradient)
        sent = spread(mask, 8, RAGGED)
        assert same(gradient[sent], before[sent])
        assert not bits(gradient[~sent]).any()
        assert waiting(compressor) is None
    assert compressor.state_dict()["residuals"] == {}


@every_kind
@every_dtype
def test_a_saved_state_goes_on_bitwise(kind, dtype):
    warmups = {"warmup_steps": 2}
    if kind != "block_threshold":
        warmups["density_warmup_steps"] = 30
    straight, resumed = MAKERS[kind](**warmups), MAKERS[kind](**warmups)
    for step, gradient in enumerate(gradients(40, dtype)):
        twin = gradient.clone()
        mask = straight.step("b", gradient)
        if step == 20:
            file = io.BytesIO()
            torch.save(resumed.state_dict(), file)
            file.seek(0)
            resumed = MAKERS[kind](**warmups)
            resumed.load_state_dict(torch.load(file, weights_only=True))
        again = resumed.step("b", twin)
        assert mask is again is None if step < 2 else torch.equal(again, mask)
        assert same(twin, gradient)


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (top_k(16, ratio=0.1), "block"),
        (top_k(8, ratio=0.2), "ratio"),
        (top_k(8, ratio=0.1, error_feedback=False), "error_feedback"),
        (top_k(8, ratio=0.1, warmup_steps=1), "warmup_steps"),
        (top_k(8, ratio=0.1, density_warmup_steps=1), "density_warmup_steps"),
        (random_k(8, ratio=0.1), "type"),
        (random_k(8, ratio=0.1, seed=1), "seed"),
        (threshold_of(8, threshold=1.0), "threshold"),
    ],
)
def test_a_state_of_other_settings_is_refused_by_name(other, name):
    own = {"seed": random_k(8, ratio=0.1), "threshold": threshold_of(8, threshold=2.0)}.get(
        name, top_k(8, ratio=0.1)
    )
    with pytest.raises(CheckpointError) as caught:
        own.load_state_dict(other.state_dict())
    assert caught.value.key == f"compressor.{name}"
    with refuses(CheckpointError, "compressor", ["settings"]):
        own.load_state_dict({"settings": own.settings()})


@pytest.mark.parametrize("block", [1, 32, 256, 1000])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.float64], ids=str)
def test_norms_are_those_in_double_precision(block, dtype):
    flat = torch.randn((1 << 18) + 2 * block + block // 2).to(dtype)
    found = block_norms(flat, block)
    squares = flat.double().numpy() ** 2
    expected = np.add.reduceat(squares, np.arange(0, len(flat), block)) ** 0.5
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert np.allclose(found.double().numpy(), expected, rtol=1e-6, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("error_feedback", [True, False])
@every_dtype
def test_a_step_needs_no_temporary_as_large_as_the_bucket(error_feedback, dtype):
    compressor = top_k(256, ratio=0.5, error_feedback=error_feedback)
    gradient = torch.randn(1 << 21).to(dtype)
    compressor.step("b", gradient.clone())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        compressor.step("b", gradient)
    largest = max(event.self_cpu_memory_usage for event in recorded.events())
    assert 0 < largest < gradient.nbytes / 3


ONES = torch.ones(9)


@pytest.mark.parametrize(
    ("call", "key"),
    [
        (lambda: top_k(0), "block"),
        (lambda: top_k(8).step("b", ONES.int()), "bucket b"),
    ],
)
def test_what_cannot_be_used_is_refused(call, key):
    with pytest.raises(ConfigError) as caught:
        call()
    assert caught.value.key == key


@pytest.mark.parametrize("changed", [torch.ones(25), torch.ones(24, dtype=torch.bfloat16)])
def test_a_bucket_that_changes_is_refused_and_leaves_no_trace(changed):
    compressor = top_k(8)
    compressor.step("b", torch.arange(24.0))
    before = waiting(compressor).clone()
    with refuses(ConfigError, "bucket b", f"{changed.numel()} elements of {changed.dtype}"):
        compressor.step("b", changed)
    assert same(waiting(compressor), before)
    assert compressor.state_dict()["steps"] == {"b": 1}
    compressor.step("c", changed)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"threshold": 0.5}, "threshold"),
        ({"type": "block_threshold"}, "threshold"),
        ({"type": "block_threshold", "threshold": float("nan")}, "threshold"),
        ({"type": "block_threshold", "threshold": 0.5, "ratio": 0.1}, "ratio"),
        (
            {"type": "block_threshold", "threshold": 1, "density_warmup_steps": 2},
            "density_warmup_steps",
        ),
        ({"seed": 1}, "seed"),
        ({"type": "block_randomk", "seed": -1}, "seed"),
        ({"ratio": 1.5}, "ratio"),
        ({"type": "topk"}, "type"),
    ],
)
def test_configuration_that_is_refused_by_its_key(values, key):
    with pytest.raises(ConfigError) as caught:
        CompressorConfig.parse(values, "wavemare.comm.compressor")
    assert caught.value.key == f"wavemare.comm.compressor.{key}"
