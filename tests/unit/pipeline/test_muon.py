# SPDX-License-Identifier: Apache-2.0
"""Our Muon is torch's for matrices and torch's AdamW for the rest, on flat partitions too."""

import pytest
import torch

from wavemare.errors import ConfigError
from wavemare.optim import Muon
from wavemare.pipeline.optim import soap_muon

SHAPES = ((6, 4), (5,), (4, 6))


def grads(steps=8):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield [torch.randn(shape, generator=generator) for shape in SHAPES]


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def step(optimizer, weights, gradients):
    for weight, grad in zip(weights, gradients, strict=True):
        weight.grad = grad.clone()
    optimizer.step()


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_equals_torchs_muon_and_adamw(adjust, nesterov):
    own, expected = parameters(), parameters()
    common = {"lr": 0.02, "weight_decay": 0.1}
    settings = {"momentum": 0.9, "nesterov": nesterov, "adjust_lr_fn": adjust}
    ours = Muon(own, **common, **settings, betas=(0.9, 0.99))
    matrices = torch.optim.Muon([expected[0], expected[2]], **common, **settings)
    rest = torch.optim.AdamW([expected[1]], **common, betas=(0.9, 0.99))
    for gradients in grads():
        step(ours, own, gradients)
        step(matrices, expected, gradients)
        rest.step()
    for a, b in zip(own, expected, strict=True):
        assert float((a - b).detach().abs().max()) < 1e-6


def test_groups_without_muon_are_stepped_by_adamw():
    own, expected = parameters(), parameters()
    ours = Muon([{"params": own, "use_muon": False}], lr=0.02, betas=(0.9, 0.99))
    adam = torch.optim.AdamW(expected, lr=0.02, betas=(0.9, 0.99), weight_decay=0)
    for gradients in grads():
        step(ours, own, gradients)
        step(adam, expected, gradients)
    for a, b in zip(own, expected, strict=True):
        assert float((a - b).detach().abs().max()) < 1e-6


@pytest.mark.parametrize(
    ("key", "value"),
    [("momentum", 1.0), ("ns_steps", 0), ("ns_steps", 100), ("adjust_lr_fn", "orginal")],
)
def test_wrong_values_are_refused_by_name(key, value):
    with pytest.raises(ConfigError) as error:
        Muon(parameters(), **{key: value})
    assert error.value.key == key


STACKED = [(6, 4), (4, 6), (6, 4), (5, 5), (1, 3), (5, 5), (4, 6)]


@pytest.mark.parametrize("limit", [1, 50, 2**24])  # one matrix at a time, two, all
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_matrices_of_one_shape_are_stepped_together_as_one_by_one(limit, dtype, monkeypatch):
    """At zero weights and a rate of 1 a step is the update itself: no bit may differ."""
    monkeypatch.setattr(soap_muon, "STACK", limit)
    own, expected = (
        [torch.nn.Parameter(torch.zeros(s, dtype=dtype)) for s in STACKED] for _ in "ab"
    )
    settings = {"lr": 1.0, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
    ours, theirs = Muon(own, **settings), torch.optim.Muon(expected, **settings)
    oblong = [max(s) >= 2 * min(s) for s in STACKED]
    generator = torch.Generator().manual_seed(2)
    for _ in range(4):
        for a, b in zip(own, expected, strict=True):
            a.data.zero_()
            b.data.zero_()
            a.grad = torch.randn(a.shape, generator=generator).to(dtype)
            b.grad = a.grad.clone()
        own[2].grad = expected[2].grad = torch.zeros(6, 4, dtype=dtype)
        ours.step()
        theirs.step()
        for a, b, by_gram in zip(own, expected, oblong, strict=True):
            # torch averages gradients of 16 bits in 16 bits; ours in fp32.
            error = (a - b).detach().abs().max()
            assert float(error) <= (0.03 if dtype == torch.bfloat16 or by_gram else 0.0)
    assert all(w.detach().abs().max() > 0.1 for i, w in enumerate(own) if i != 2)


def spectrum(kind, rows, columns, generator):
    """Return matrices whose singular values are alike, of few directions, or of five decades."""
    matrix = torch.randn(rows, columns, generator=generator)
    if kind == "random":
        return matrix
    if kind == "low rank":
        few = torch.randn(rows, 3, generator=generator) @ torch.randn(
            3, columns, generator=generator
        )
        return few + 1e-3 * matrix
    if kind == "zero rows":
        matrix[rows // 2 :] = 0
        return matrix
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left * torch.logspace(0, -5, rows) @ right


@pytest.mark.parametrize("shape", [(48, 96), (64, 256), (40, 320), (64, 80)])
@pytest.mark.parametrize("kind", ["random", "low rank", "zero rows", "decades"])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 12])
def test_the_iteration_is_its_polynomial_of_the_singular_values(shape, kind, steps):
    """In fp64 by a decomposition; the error may be twice that of torch's own products in bf16."""
    generator = torch.Generator().manual_seed(7)
    stack = torch.stack([spectrum(kind, *shape, generator) for _ in range(3)])
    stack = (stack / torch.linalg.matrix_norm(stack, keepdim=True)).bfloat16()
    left, values, right = torch.linalg.svd(stack.double(), full_matrices=False)
    plain = stack.clone()
    a, b, c = 3.4445, -4.7750, 2.0315  # torch's
    for _ in range(steps):
        values = a * values + b * values**3 + c * values**5
        gram = plain @ plain.mT
        plain = a * plain + (b * gram + c * gram @ gram) @ plain
    exact = left @ (values[..., None] * right)
    found = soap_muon.orthogonalize(stack.clone(), steps)
    own, torchs = (float((x.double() - exact).norm() / exact.norm()) for x in (found, plain))
    assert own <= 2.5 * torchs + 0.02
    assert torch.linalg.matrix_norm(found.float(), 2).max() < values.max() + 0.15


@pytest.mark.parametrize("shape", [(64, 80), (64, 256)])
def test_a_processor_without_bf16_rounds_like_one_with_it(shape, monkeypatch):
    stack = torch.randn(3, *shape, generator=torch.Generator().manual_seed(5)).bfloat16()
    found = {}
    for capability in ("AVX2", "AVX512"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        found[capability] = soap_muon.orthogonalize(stack.clone(), 5)
    assert all(each.dtype == torch.bfloat16 for each in found.values())
    other, usual = (each.double() for each in found.values())
    assert float((other - usual).norm() / usual.norm()) < 0.01  # two roundings of bf16: 2**-7
