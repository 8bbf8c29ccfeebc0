# SPDX-License-Identifier: Apache-2.0
"""SOAP against a slow twin, its invariance under rotations, and what it is for."""

import copy
import math

import numpy as np
import pytest
import torch

from support.refusals import refuses
from wavemare.errors import CheckpointError, ConfigError, ModelError
from wavemare.optim import SOAP, refresh_of
from wavemare.pipeline.optim.matrix_optimizer import Partition

STEPS = 30


class Twin:
    """Algorithm 3 of arXiv 2409.11321 in float64, entry by entry where that is readable."""

    def __init__(self, weight, lr, betas, beta, eps, decay, refresh, max_size):
        self.weight = weight.astype(np.float64)
        self.lr, self.betas, self.beta, self.eps = lr, betas, beta, eps
        self.decay, self.refresh, self.steps = decay, refresh, 0
        self.rotated = [1 < n <= max_size for n in weight.shape] if weight.ndim == 2 else []
        self.bases = None if any(self.rotated) else [None, None]
        self.first = self.second = np.zeros_like(self.weight)

    def step(self, grad):
        grad = grad.astype(np.float64)
        if self.bases is None:
            if not grad.any():
                return
            # Averages from zero.
            self.products = [(1 - self.beta) * grad @ grad.T, (1 - self.beta) * grad.T @ grad]
            # Singular vectors rather than eigenvectors of the products.
            left, _, right = np.linalg.svd(grad)
            self.bases = [left if self.rotated[0] else None, right.T if self.rotated[1] else None]
            return
        self.steps += 1
        one, two = self.betas
        self.first = one * self.first + (1 - one) * grad
        self.second = two * self.second + (1 - two) * self.turn(grad) ** 2
        first = self.turn(self.first) / (1 - one**self.steps)
        second = self.second / (1 - two**self.steps)
        update = self.turn_back(first / (np.sqrt(second) + self.eps))
        self.weight = self.weight - self.lr * (update + self.decay * self.weight)
        if not any(self.rotated):
            return
        for side, product in enumerate([grad @ grad.T, grad.T @ grad]):
            self.products[side] = self.beta * self.products[side] + (1 - self.beta) * product
            basis = self.bases[side]
            if basis is None or self.steps % self.refresh:
                continue
            values = [column @ self.products[side] @ column for column in basis.T]
            order = sorted(range(len(values)), key=lambda i: -values[i])
            self.bases[side] = gram_schmidt(self.products[side] @ basis[:, order])
            self.second = self.second[order] if side == 0 else self.second[:, order]

    def turn(self, matrix):
        left, right = self.bases
        matrix = matrix if left is None else left.T @ matrix
        return matrix if right is None else matrix @ right

    def turn_back(self, matrix):
        left, right = self.bases
        matrix = matrix if left is None else left @ matrix
        return matrix if right is None else matrix @ right.T


def gram_schmidt(columns):
    found = []
    for column in columns.T:
        rest = column
        for q in found + found:  # twice, as the first round leaves some
            rest = rest - (q @ rest) * q
        found.append(rest / np.linalg.norm(rest))
    return np.stack(found, axis=1)


def gradients(shape, steps=STEPS, seed=0):
    """Return gradients with a basis of their own, that changes slowly, and noise."""
    generator = np.random.default_rng(seed)
    grads = []
    for step in range(steps):
        grad = generator.normal(size=shape)
        if len(shape) == 2:
            scales = [np.geomspace(1, 0.03, n) for n in shape]
            turns = [np.linalg.qr(np.random.default_rng(n).normal(size=(n, n)))[0] for n in shape]
            tilt = np.eye(shape[0]) + 0.02 * step * np.diag(np.ones(shape[0] - 1), 1)
            grad = tilt @ turns[0] @ (scales[0][:, None] * grad * scales[1]) @ turns[1]
        grads.append(grad)
    return grads


@pytest.mark.parametrize(
    ("shape", "max_size", "refresh"),
    [
        ((5, 5), 8, 3),
        ((4, 4), 8, 1),
        ((9, 5), 5, 3),  # the longer side keeps its axes
        ((5, 9), 5, 7),
        ((9, 9), 8, 3),  # both do
        ((7,), 8, 3),
        ((2, 3, 4), 8, 3),
        ((1, 9), 8, 3),
        ((2, 9), 2, 3),
    ],
)
def test_soap_equals_a_slow_twin_in_numpy(shape, max_size, refresh):
    weight = np.random.default_rng(1).normal(size=shape)
    settings = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-8}
    twin = Twin(weight, 0.02, (0.8, 0.95), 0.9, 1e-8, 0.1, refresh, max_size)
    parameter = torch.nn.Parameter(torch.tensor(weight))
    soap = SOAP(
        [parameter],
        **settings,
        shampoo_beta=0.9,
        weight_decay=0.1,
        refresh=refresh,
        max_size=max_size,
    )
    # No rotated side is longer than the rank of the first gradient, beyond which bases are any.
    grads = gradients(shape)
    for step, grad in enumerate([np.zeros(shape), *grads] if len(shape) == 2 else grads):
        parameter.grad = torch.tensor(grad)
        soap.step()
        twin.step(grad)
        found = parameter.detach().numpy()
        assert np.abs(found - twin.weight).max() < 1e-9, step
    assert np.abs(twin.weight - weight).max() > 0.1


def test_the_first_gradient_that_is_not_zero_makes_the_basis_and_no_step():
    parameter = torch.nn.Parameter(torch.ones(3, 3))
    soap = SOAP([parameter], weight_decay=0.1)
    for grad in (torch.zeros(3, 3), torch.full((3, 3), math.nan), torch.eye(3)):
        parameter.grad = grad
        soap.step()
        assert torch.equal(parameter.detach(), torch.ones(3, 3))
    soap.step()
    assert float((parameter.detach() - 1).abs().max()) > 1e-4


def test_half_precision_parameters_are_stepped_in_fp32():
    parameters = [torch.nn.Parameter(torch.ones(6, 6, dtype=d)) for d in (torch.bfloat16,) * 2]
    parameters[1] = torch.nn.Parameter(torch.ones(6, 6))
    optimizers = [SOAP([p], lr=0.1) for p in parameters]
    for grad in gradients((6, 6), steps=4):
        for parameter, soap in zip(parameters, optimizers, strict=True):
            parameter.grad = torch.tensor(grad).bfloat16().to(parameter.dtype)
            soap.step()
    half, whole = (p.detach().float() for p in parameters)
    assert {v.dtype for v in optimizers[0].state[parameters[0]].values() if torch.is_tensor(v)} == {
        torch.float32
    }
    assert float((half - whole).abs().max()) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_is_loaded_bit_for_bit(dtype):
    def make():
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(5, 4, dtype=dtype))
        return parameter, SOAP([parameter], lr=0.1, refresh=2)

    grads = [torch.tensor(g, dtype=dtype) for g in gradients((5, 4), steps=12)]
    parameter, soap = make()
    other, resumed = make()
    for step, grad in enumerate(grads):
        if step == 7:
            other.data.copy_(parameter)
            resumed.load_state_dict(copy.deepcopy(soap.state_dict()))
        parameter.grad = other.grad = grad
        soap.step()
        if step >= 7:
            resumed.step()
            assert torch.equal(parameter, other)


def test_a_state_of_other_tensors_is_refused():
    optimizers = []
    for shape in ((4, 6), (6, 4)):
        parameter = torch.nn.Parameter(torch.ones(shape))
        parameter.grad = torch.randn(shape)
        optimizers.append(SOAP([parameter]))
        optimizers[-1].step()
    with refuses(CheckpointError, "optimizer", "SOAP"):
        optimizers[1].load_state_dict(optimizers[0].state_dict())
    flat = torch.nn.Parameter(torch.ones(24))
    soap = SOAP([flat])
    soap.set_partition(flat, Partition(((4, 6),), (0,), 0, 24))
    flat.grad = torch.randn(24)
    soap.step()
    with refuses(CheckpointError, "optimizer", "SOAP"):
        optimizers[0].load_state_dict(soap.state_dict())


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8, 32])
def test_early_stages_refresh_more_often_for_the_same_work_together(num_stages):
    periods = [refresh_of(stage, num_stages, base=1000) for stage in range(num_stages)]
    assert periods == sorted(periods)
    assert periods[-1] == 1000 * num_stages
    # Rounded to whole steps.
    assert sum(1 / p for p in periods) == pytest.approx(num_stages / 1000, rel=2e-3)
    assert len(set(periods)) == num_stages


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", -1.0),
        ("lr", "1e-3"),
        ("lr", math.nan),
        ("betas", (0.9,)),
        ("betas", (0.9, 1.0)),
        ("betas", 0.9),
        ("shampoo_beta", 1.5),
        ("eps", -1e-8),
        ("weight_decay", -0.1),
        ("refresh", 0),
        ("refresh", 2.5),
        ("refresh", True),
        ("max_size", -1),
    ],
)
def test_wrong_values_are_refused_by_name(key, value):
    with pytest.raises(ConfigError) as error:
        SOAP([torch.nn.Parameter(torch.ones(2, 2))], **{key: value})
    assert error.value.key == key


def test_sparse_gradients_are_refused_by_name():
    embedding = torch.nn.Embedding(4, 3, sparse=True)
    soap = SOAP(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with refuses(ModelError, "optimizer", "SOAP"):
        soap.step()
