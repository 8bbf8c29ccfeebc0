# SPDX-License-Identifier: Apache-2.0
"""Sums of the papers' systems on ranks that are threads, against sums made by numpy alone."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from benchmarks.sparse.measure import make_gradient
from benchmarks.sparse.peers import PEERS, OmniReduce
from benchmarks.sparse.request import PEERS as NAMES
from benchmarks.sparse.request import Case, SparseRequest

BLOCK = 16
CASE = Case("zipf", 0.3)
EXACT = [name for name in NAMES if not name.startswith(("sparcml-dsar-", "hitopk", "deepreduce"))]
SIZES = (1, 2, 3, 4, 5)


def request(ranks):
    return SparseRequest(ranks=max(ranks, 2), mib=37 * BLOCK * 4 / 2**20, block=BLOCK)


def gradients(ranks, density, pattern="zipf"):
    # 37 blocks: neither ranks nor lanes share them equally.
    case = Case(pattern, density)
    found = [make_gradient(case, 37 * BLOCK, BLOCK, rank) for rank in range(ranks)]
    if ranks > 2:
        found[1].zero_()  # a rank without any block
    found[0][5] = -0.0
    return found


def ordered_sum(inputs):
    total = np.zeros(inputs[0].shape, np.float32)
    for tensor in inputs:
        total = total + tensor.numpy()
    return torch.from_numpy(total)


def sums(on_ranks, name, inputs, calls=1):
    """Return each rank's results of all calls, and what it left out of the last one."""
    asked = request(len(inputs))

    def work(transport):
        peer = PEERS[name](name, transport, asked)
        found = []
        for _ in range(calls):
            flat = inputs[transport.rank].clone()
            peer.prepare(CASE, flat)
            peer.sum()
            found.append(flat)
        return found, peer.left_out()

    return on_ranks(len(inputs), work)


@pytest.mark.parametrize("density", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("name", [name for name in EXACT if name != "omnireduce"])
def test_exact_systems_sum_on_any_number_of_ranks(on_ranks, name, density):
    for ranks in SIZES:
        inputs = gradients(ranks, density)
        bound = ranks * 2.0**-23 * sum(tensor.abs() for tensor in inputs)
        for (result,), left_out in sums(on_ranks, name, inputs):
            assert left_out is None
            if name != "sparcml":  # which adds in another order
                assert torch.equal(result, ordered_sum(inputs))
            assert ((result - ordered_sum(inputs)).abs() <= bound).all()


def with_aggregators(on_ranks, workers, aggregators, cases):
    """Return each worker's results of all cases, and its traffic."""
    asked = request(workers).model_copy(update={"ranks": workers, "aggregators": aggregators})

    def work(transport):
        peer, found = OmniReduce("omnireduce", transport, asked), []
        for density, pattern in cases:
            if transport.rank < workers:
                found.append(gradients(workers, density, pattern)[transport.rank])
                peer.prepare(CASE, found[-1])
                peer.sum()
            else:
                peer.aggregate()
        return found, peer.traffic

    return on_ranks(workers + aggregators, work)[:workers]


@pytest.mark.parametrize("aggregators", [1, 2, 3])
@pytest.mark.parametrize("workers", SIZES)
def test_workers_and_aggregators_sum_call_after_call(on_ranks, workers, aggregators):
    cases = [(0.5, "zipf"), (0.0, "zipf"), (1.0, "random")]
    for results, _ in with_aggregators(on_ranks, workers, aggregators, cases):
        for case, result in zip(cases, results, strict=True):
            assert torch.equal(result, ordered_sum(gradients(workers, *case)))


def test_a_worker_of_omnireduce_moves_as_much_whatever_the_number_of_workers(on_ranks):
    found = [
        {traffic for _, traffic in with_aggregators(on_ranks, workers, 2, [(0.3, "identical")])}
        for workers in (1, 2)
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 1


def error_bound(tensor, block, bits):
    """Return what an element's code may be off by: a step of its block's scale."""
    steps = 2 ** (bits - 1) - 1
    blocks = [tensor[start : start + block] for start in range(0, len(tensor), block)]
    return torch.cat([part.abs().max().expand(len(part)) / steps for part in blocks])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("ranks", SIZES)
def test_quantized_sums_are_within_a_step_and_the_same_on_all_ranks(on_ranks, ranks, bits):
    inputs = gradients(ranks, 0.3)
    exact = ordered_sum(inputs)
    found = sums(on_ranks, f"sparcml-dsar-qsgd{bits}", inputs)
    (result,), _ = found[0]
    assert all(torch.equal(other, result) for (other,), _ in found)
    cuts = [len(exact) * rank // ranks for rank in range(ranks + 1)]
    parts = [exact[start:stop] for start, stop in pairwise(cuts)]
    bound = torch.cat([error_bound(part, 512, bits) for part in parts])
    assert ((result - exact).abs() <= 1.001 * bound).all()
    assert not torch.equal(result, exact)
    assert torch.allclose(result + sum(left_out for _, left_out in found), exact, atol=1e-6)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("ranks", SIZES)
def test_coded_blocks_are_within_a_step_and_errors_come_later(on_ranks, ranks, bits):
    inputs = gradients(ranks, 0.3)
    exact = ordered_sum(inputs)
    found = sums(on_ranks, f"deepreduce{bits}", inputs, calls=3)
    for results, _ in found:
        assert all(map(torch.equal, results, found[0][0]))
    first, *_ = results = found[0][0]
    bound = sum(error_bound(tensor, BLOCK, bits) for tensor in inputs)
    assert ((first - exact).abs() <= 1.001 * bound).all()
    assert not torch.equal(first, exact)
    # What three calls gave and what still waits is what three gradients have.
    residual = sum(left_out for _, left_out in found)
    assert torch.allclose(sum(results) + residual, 3 * exact, atol=1e-5)


@pytest.mark.parametrize("ranks", SIZES)
def test_top_k_of_hosts_is_what_a_sort_finds(on_ranks, ranks):
    inputs = gradients(ranks, 1.0)
    found = sums(on_ranks, "hitopk", inputs, calls=3)
    size = 2 if ranks % 2 == 0 else 1
    cuts = [len(inputs[0]) * rank // size for rank in range(size + 1)]
    hosts = [ordered_sum(inputs[first : first + size]) for first in range(0, ranks, size)]
    waits = [torch.zeros_like(host) for host in hosts]
    for call in range(3):
        expected = torch.zeros_like(inputs[0])
        for host, residual in zip(hosts, waits, strict=True):
            residual.add_(host)
            for start, stop in pairwise(cuts):
                count = round(0.01 * (stop - start))
                chosen = start + residual[start:stop].abs().argsort(descending=True)[:count]
                expected[chosen] += residual[chosen]
                residual[chosen] = 0
        for results, _ in found:
            assert torch.equal(results[call], expected)
    assert torch.equal(sum(left_out for _, left_out in found), ordered_sum(waits))
