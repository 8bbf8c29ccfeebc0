# SPDX-License-Identifier: Apache-2.0
"""Optimizers of whole matrices, over ZeRO's flat partitions too: SOAP and Muon.

SOAP is Adam in the eigenbasis of Shampoo's preconditioner, which delay harms less. Muon steps
matrices, and AdamW the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wavemare.errors import ConfigError, check_number, did_you_mean
from wavemare.pipeline.optim.matrix_optimizer import (
    SIDES,
    MatrixOptimizer,
    Piece,
    Shape,
    State,
    adam_denominator,
    adam_update,
    check_betas,
)


class SOAP(MatrixOptimizer):
    r"""AdamW in a rotated basis (SOAP, arXiv 2409.11321, algorithm 3).

    Adam works best if its coordinates are the axes of the curvature; otherwise it oscillates, and
    delayed gradients amplify that (basis rotation, arXiv 2602.03515). For the gradient
    ``G`` of a matrix, with ``b = shampoo_beta`` and ``Q`` the eigenvectors of ``L`` and ``R``:

    .. math::
        G' = Q_L^T G Q_R, \quad M = \beta_1 M + (1 - \beta_1) G, \quad
        V = \beta_2 V + (1 - \beta_2) G'^2 \\
        W = W - lr \, (Q_L \frac{Q_L^T M Q_R / (1 - \beta_1^t)}
        {\sqrt{V / (1 - \beta_2^t)} + \epsilon} Q_R^T + decay \, W) \\
        L = b L + (1 - b) G G^T, \quad R = b R + (1 - b) G^T G

    Every ``refresh`` steps one power iteration brings the bases up to date: the columns of ``Q``,
    and rows and columns of ``V`` with them, are sorted by ``diag(Q^T L Q)``, largest first, and
    ``Q`` becomes the orthogonal factor of ``L Q``. ``L`` and ``R`` begin at zero, and the first
    bases are eigenvectors of those of the first gradient. That gradient takes no step, as in the
    paper: in its own basis Adam would step by the signs of rounding errors.

    A side longer than ``max_size`` keeps its own axes, and a matrix with two such sides, as every
    tensor that is not a matrix, is stepped as by AdamW.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        betas: Decays of the averages of gradients and of their squares.
        shampoo_beta: Decay of ``L`` and ``R``.
        eps: Is added to the denominator.
        weight_decay: Decoupled, times the learning rate.
        refresh: Steps between two refreshes of the bases.
        max_size: Longest side that is rotated. The default rotates widths, not vocabularies and the
            longer sides of feed-forward layers, as work grows with the cube of a side.
        stage_aware: Whether the engine of an asynchronous pipeline sets ``refresh`` by the stage.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        shampoo_beta: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        refresh: int = 10,
        max_size: int = 1024,
        stage_aware: bool = True,
    ) -> None:
        check_number(ConfigError, "lr", lr, 0)
        check_betas("betas", betas)
        check_number(ConfigError, "shampoo_beta", shampoo_beta, 0, 1)
        check_number(ConfigError, "eps", eps, 0)
        check_number(ConfigError, "weight_decay", weight_decay, 0)
        check_number(ConfigError, "refresh", refresh, 1, whole=True)
        check_number(ConfigError, "max_size", max_size, 0, whole=True)
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "shampoo_beta": shampoo_beta,
            "eps": eps,
            "weight_decay": weight_decay,
            "refresh": refresh,
            "max_size": max_size,
            "stage_aware": bool(stage_aware),
        }
        super().__init__(params, defaults)

    def is_matrix(self, group: Mapping[str, Any], shape: Shape) -> bool:
        """Return whether a tensor has two sides, one of which at least is rotated."""
        return len(shape) == SIDES and any(1 < side <= group["max_size"] for side in shape)

    def updates(
        self, group: Mapping[str, Any], pieces: Sequence[Piece]
    ) -> Iterator[tuple[Piece, Tensor | None]]:
        """See `MatrixOptimizer.updates`."""
        for piece in pieces:
            if piece.is_matrix:
                # The last digits of matrix products depend on the memory's alignment: a copy has
                # the same alignment on all ranks, and as without ZeRO.
                grad = piece.matrix().clone() if piece.grad.ndim == 1 else piece.matrix()
                yield piece, self._update(group, piece.state, grad)
            else:
                yield piece, adam_update(piece, group["betas"], group["eps"])

    def _update(self, group: Mapping[str, Any], state: State, grad: Tensor) -> Tensor | None:
        betas, eps = group["betas"], group["eps"]
        sides = [side for side in (0, 1) if 1 < grad.shape[side] <= group["max_size"]]
        if "exp_avg" not in state:
            _begin(state, grad, sides, group["shampoo_beta"])
            return None
        denominator = adam_denominator(state, grad, _rotate(state, grad), betas, eps)
        update = _rotate_back(state, _rotate(state, state["exp_avg"]) / denominator)
        for side in sides:
            state[f"covariance_{side}"].lerp_(_covariance(grad, side), 1 - group["shampoo_beta"])
        if state["step"] % group["refresh"] == 0:
            for side in sides:
                _refresh(state, side)
        return update


def refresh_of(stage: int, num_stages: int, base: int = 10) -> int:
    """Return how many steps a stage of an asynchronous pipeline keeps its bases.

    Early stages refresh more often, as delay makes a basis that does not fit more harmful. The rate
    is proportional to the delay in micro-batches plus a half, so that the last stage refreshes too.
    The period is ``base * P / (2 (P - s) - 1)``, rounded: all stages together do as much work as
    with ``base`` everywhere.

    Args:
        stage: From 0.
        num_stages: P.
        base: The period of a stage on the average of rates.

    Returns:
        Optimizer steps, 1 or more.
    """
    return max(1, round(base * num_stages / (2 * (num_stages - stage) - 1)))


def _begin(state: State, grad: Tensor, sides: list[int], shampoo_beta: float) -> None:
    """Make the first bases, of a gradient that has any direction; covariances begin at zero."""
    if not 0 < float(grad.abs().sum()) < math.inf:  # nor is it if it is not a number
        return
    state.update(step=0, exp_avg=torch.zeros_like(grad), exp_avg_sq=torch.zeros_like(grad))
    for side in sides:
        covariance = _covariance(grad, side)
        state[f"basis_{side}"] = _eigenvectors(covariance)
        state[f"covariance_{side}"] = covariance.mul_(1 - shampoo_beta)


def _eigenvectors(covariance: Tensor) -> Tensor:
    """Return the eigenvectors as columns, by decreasing eigenvalue."""
    # Of a tall gradient's rows few differ: in fp32, solvers give up on that many equal eigenvalues.
    wide = covariance.double()
    try:
        vectors = torch.linalg.eigh(wide).eigenvectors
    except RuntimeError:  # torch's LinAlgError, which has no public name for types
        ramp = torch.linspace(0, 1e-9, len(wide), dtype=wide.dtype, device=wide.device)
        vectors = torch.linalg.eigh(wide + (ramp * wide.trace()).diag()).eigenvectors
    return vectors.flip(1).to(covariance.dtype).contiguous()


def _covariance(grad: Tensor, side: int) -> Tensor:
    return grad @ grad.T if side == 0 else grad.T @ grad


def _rotate(state: State, matrix: Tensor) -> Tensor:
    """Return a matrix in the basis of the state."""
    if "basis_0" in state:
        matrix = state["basis_0"].T @ matrix
    return matrix @ state["basis_1"] if "basis_1" in state else matrix


def _rotate_back(state: State, matrix: Tensor) -> Tensor:
    if "basis_0" in state:
        matrix = state["basis_0"] @ matrix
    return matrix @ state["basis_1"].T if "basis_1" in state else matrix


def _refresh(state: State, side: int) -> None:
    covariance, basis = state[f"covariance_{side}"], state[f"basis_{side}"]
    image = covariance @ basis
    order = (basis * image).sum(0).argsort(descending=True, stable=True)
    state[f"basis_{side}"] = torch.linalg.qr(image[:, order]).Q.contiguous()
    state["exp_avg_sq"] = state["exp_avg_sq"].index_select(side, order)


_ADJUSTMENTS = ("original", "match_rms_adamw")


class Muon(MatrixOptimizer):
    """``torch.optim.Muon`` for matrices, all of one shape together; AdamW for other tensors.

    DeepSpeed's own Muon is not used for pipelines: it refuses them in bf16, its ZeRO 1 clips the
    orthogonal updates rather than the gradients, and it compiles its iteration.

    A parameter group with ``use_muon`` false is stepped by AdamW: for embeddings and output heads.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        momentum: Decay of the average of gradients of matrices.
        nesterov: Whether the update is of that average a step ahead.
        weight_decay: Decoupled, times the learning rate.
        ns_steps: Steps of the Newton-Schulz iteration, in bf16 as in torch.
        adjust_lr_fn: Factor of the update of a matrix of m rows and n columns: ``original`` is
            ``sqrt(max(1, m / n))``, ``match_rms_adamw`` ``0.2 sqrt(max(m, n))``, at which AdamW's
            learning rates do.
        betas: AdamW's.
        eps: AdamW's.

    Raises:
        ConfigError: A number is out of range, or there is no such adjustment.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
        adjust_lr_fn: str = "original",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        check_number(ConfigError, "lr", lr, 0)
        check_number(ConfigError, "momentum", momentum, 0, 1)
        check_number(ConfigError, "weight_decay", weight_decay, 0)
        check_number(ConfigError, "ns_steps", ns_steps, 1, 100, whole=True)
        check_betas("betas", betas)
        check_number(ConfigError, "eps", eps, 0)
        if adjust_lr_fn not in _ADJUSTMENTS:
            remedy = did_you_mean(str(adjust_lr_fn), _ADJUSTMENTS)
            raise ConfigError("adjust_lr_fn", adjust_lr_fn, "there is no such adjustment", remedy)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": bool(nesterov),
            "weight_decay": weight_decay,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": tuple(betas),
            "eps": eps,
            "use_muon": True,
        }
        super().__init__(params, defaults)

    def is_matrix(self, group: Mapping[str, Any], shape: Shape) -> bool:
        """Return whether a tensor has two sides, in a group that is stepped by Muon."""
        return len(shape) == SIDES and bool(group["use_muon"])

    def scale(self, group: Mapping[str, Any], shape: Shape) -> float:
        """Return the factor that ``adjust_lr_fn`` names."""
        rows, columns = shape
        if group["adjust_lr_fn"] == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1, rows / columns))

    def updates(
        self, group: Mapping[str, Any], pieces: Sequence[Piece]
    ) -> Iterator[tuple[Piece, Tensor | None]]:
        """See `MatrixOptimizer.updates`."""
        alike: dict[tuple[Any, ...], list[Piece]] = {}
        for piece in pieces:
            if piece.is_matrix:
                kind = sorted(piece.shape), piece.grad.dtype, piece.grad.device
                alike.setdefault(tuple(map(str, kind)), []).append(piece)
            else:
                yield piece, adam_update(piece, group["betas"], group["eps"])
        for matrices in alike.values():
            count = max(1, STACK // max(1, matrices[0].grad.numel()))
            for first in range(0, len(matrices), count):
                yield from _step_stack(group, matrices[first : first + count])


STACK = 2**24
"""Elements that are orthogonalized together: enough for small matrices, 32 MiB in bf16."""

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # torch's, after Keller Jordan
_SMALLEST = 1e-7  # torch's


def _step_stack(
    group: Mapping[str, Any], matrices: Sequence[Piece]
) -> Iterator[tuple[Piece, Tensor]]:
    """Yield the updates of matrices of one shape, or of its transpose: in bf16."""
    momentum, (short, long) = group["momentum"], sorted(matrices[0].shape)
    first = matrices[0].grad
    stack = first.new_empty(len(matrices), short, long, dtype=torch.bfloat16)
    for place, piece in zip(stack, matrices, strict=True):
        grad = piece.matrix()
        if "momentum_buffer" not in piece.state:
            piece.state["momentum_buffer"] = torch.zeros_like(grad)
        average = piece.state["momentum_buffer"].lerp_(grad, 1 - momentum)
        if group["nesterov"]:
            average = torch.lerp(grad, average, momentum)
        # Rounded first: half of the memory is then read across.
        place.copy_(average.bfloat16().mT if len(average) > short else average)
    stack = orthogonalize(stack, group["ns_steps"])
    for piece, found in zip(matrices, stack, strict=True):
        yield piece, found.mT.contiguous() if len(piece.grad.view(piece.shape)) > short else found


def orthogonalize(stack: Tensor, steps: int) -> Tensor:
    """Return the Newton-Schulz iteration of matrices: about U V^T of each U S V^T.

    The products of a matrix that is nearly square are those of ``torch.optim.Muon``, in its order,
    to the bit where the processor multiplies in bf16. Others go by their Gram matrices, with about
    the rounding error of torch's products: with four columns for each row that takes three
    quarters of the operations.

    Args:
        stack: (matrices, rows, columns), bf16, rows <= columns; it is overwritten.
        steps: Of the iteration.
    """
    norms = torch.linalg.vector_norm(stack, dim=(1, 2), keepdim=True)
    stack.div_(norms.clamp_(min=_SMALLEST))
    if stack.shape[2] >= _OBLONG * stack.shape[1]:
        return _by_gram(stack, steps)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(steps):
        gram = _bmm(stack, stack.mT)
        stack = _baddbmm(stack, _baddbmm(gram, gram, gram, b, c), stack, a)
    return stack


def _in_fp32(stack: Tensor) -> bool:
    """Return whether torch multiplies bf16 on this processor tens of times as slowly as fp32."""
    return stack.device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in _WITHOUT_BF16


_WITHOUT_BF16 = ("DEFAULT", "NO AVX", "AVX2")


def _bmm(left: Tensor, right: Tensor) -> Tensor:
    """Return the products of bf16 matrices, each rounded once."""
    if _in_fp32(left):
        return torch.bmm(left.float(), right.float()).bfloat16()
    return torch.bmm(left, right)


def _baddbmm(summand: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float = 1) -> Tensor:
    """Return ``beta * summand + alpha * left @ right`` of bf16 matrices, each rounded once."""
    if _in_fp32(left):
        wide = (each.float() for each in (summand, left, right))
        return torch.baddbmm(*wide, beta=beta, alpha=alpha).bfloat16()
    return torch.baddbmm(summand, left, right, beta=beta, alpha=alpha)


_OBLONG = 2
"""Columns for each row from which on the Gram matrix takes fewer operations."""


_SPAN = 2
"""Steps for which a Gram matrix is good: after 3, small singular values may become large."""


def _by_gram(stack: Tensor, steps: int) -> Tensor:
    """Iterate on the Gram matrices G = X X^T, whose sides are the short ones.

    A step is X' = P X with P = a + b G + c G^2, so that G' = P G P, and all factors commute. The
    rounding of G may grow by a^2 in a step, so that G is soon made of X again.
    """
    a, b, c = _NEWTON_SCHULZ
    done = 0
    while done < steps:
        count = min(_SPAN, steps - done)
        gram, product = _bmm(stack, stack.mT), None
        for left in reversed(range(count)):
            poly = _baddbmm(gram, gram, gram, b, c)  # P - a
            if product is None:
                product = poly.clone()
                product.diagonal(dim1=1, dim2=2).add_(a)
            else:
                product = _baddbmm(product, poly, product, a)
            if left:
                half = _baddbmm(gram, poly, gram, a)
                gram = _baddbmm(half, half, poly, a)
        assert product is not None
        stack, done = _bmm(product, stack), done + count
    return stack
