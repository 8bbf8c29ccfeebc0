# SPDX-License-Identifier: Apache-2.0
"""Compressors choose the blocks of a bucket that are sent; error feedback keeps the others.

The names of the methods are OmniReduce's (SIGCOMM'21). Each step splits ``a = gradient + residual``
by whole blocks: the chosen blocks are *sent*, all others become the new residual. No element is
divided or rounded, so ``sent + residual == a`` holds bitwise. In 16 bits, a is a rounded sum.

The norm of a block is computed in float32 (float64 for float64): 0 for elements below about 1e-23,
infinite beyond about 1e19. A block whose norm is not finite is always chosen, even beyond k, so NaN
and infinities never stay in a residual; one whose norm is 0 never is.

The residual is as large as the bucket. A step reads 3 and writes 2 buckets, without error feedback
1 and 1, and then moves the chosen blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wavemare.comm.config import COMPRESSOR_OPTIONS, CompressorConfig, CompressorKind
from wavemare.comm.kernels import num_blocks, sum_dtype
from wavemare.errors import CheckpointError, ConfigError, check_number

# Elements that are converted or moved at a time: enough to hide the cost of a call, few enough
# to stay in a core's cache.
_CHUNK = 1 << 18


def make_compressor(config: CompressorConfig, block: int) -> Compressor:
    """Return the compressor that a configuration asks for.

    Args:
        config: Its settings.
        block: Elements per block.

    Raises:
        ConfigError: The block is out of range.
    """
    return Compressor(block, config)


class Compressor:
    """Splits buckets into blocks to send and residuals.

    Residual and step count of each bucket are kept under its key.

    Args:
        block: Elements per block.
        config: Its settings.

    Raises:
        ConfigError: The block is out of range.
    """

    def __init__(self, block: int, config: CompressorConfig) -> None:
        check_number(ConfigError, "block", block, 1, whole=True)
        self.block = block
        self.config = config
        self._steps: dict[str, int] = {}
        self._residuals: dict[str, Tensor] = {}

    def select(self, accumulated: Tensor, draw: int = 0, ratio: float | None = None) -> Tensor:
        """Choose blocks, none whose norm is 0; nothing is changed.

        Args:
            accumulated: (E,), gradient plus residual.
            draw: Seeds a random choice, together with the seed.
            ratio: Share of the blocks; the configuration's if omitted.

        Returns:
            (ceil(E / block),), bool, on the device of the bucket.
        """
        norms = block_norms(accumulated, self.block)
        k = self.count(len(norms), ratio)
        return _SELECT[self.config.type](self, norms, draw, k) & (norms != 0)

    def count(self, blocks: int, ratio: float | None = None) -> int:
        """Return k for a bucket: a share of its blocks, 1 or more."""
        ratio = self.config.ratio if ratio is None else ratio
        return min(blocks, max(1, round(ratio * blocks)))

    @torch.no_grad()
    def step(self, key: str, gradient: Tensor) -> Tensor | None:
        """Split ``gradient + residual``.

        Args:
            key: Name of the bucket.
            gradient: (E,), the bucket; overwritten with the chosen blocks, +0.0 elsewhere.

        Returns:
            (ceil(E / block),), bool, on the device of the bucket: the chosen blocks; None while all
            are sent.

        Raises:
            ConfigError: The gradient is no tensor of floats, or does not fit what was given before.
        """
        self.check(key, gradient)
        count = self._steps.get(key, 0)
        chosen = None
        if count < self.config.warmup_steps:
            pass
        elif self.config.error_feedback:
            residual = self._residual_for(key, gradient).add_(gradient)
            chosen = self.select(residual, _draw(key, count), self.config.share(count))
            _move(residual, gradient, chosen, self.block)
        else:
            chosen = self.select(gradient, _draw(key, count), self.config.share(count))
            _clear(gradient, ~chosen, self.block)
        self._steps[key] = count + 1
        return chosen

    def settings(self) -> dict[str, Any]:
        """Return all that the choice of blocks depends on, by its name in the configuration."""
        names = ("error_feedback", "warmup_steps", *COMPRESSOR_OPTIONS[self.config.type])
        settings = {name: getattr(self.config, name) for name in names}
        return {"type": self.config.type, "block": self.block, **settings}

    def state_dict(self) -> dict[str, Any]:
        """Return the state, from which `load_state_dict` goes on bitwise.

        The residuals are not copied: later steps change them.
        """
        return {
            "settings": self.settings(),
            "steps": dict(self._steps),
            "residuals": dict(self._residuals),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state; residuals are copied, and follow their buckets to their devices.

        Args:
            state: From `state_dict`.

        Raises:
            CheckpointError: It is of another kind, or of a compressor with other settings.
        """
        parts = {"settings", "steps", "residuals"}
        if state.keys() != parts:
            reason = f"the state of a compressor has {', '.join(sorted(parts))}"
            raise CheckpointError("compressor", sorted(state), reason, "Load a compressor's state")
        own, saved = self.settings(), state["settings"]
        # Other types have other settings.
        for name in ("type", *sorted(own.keys() | saved.keys())):
            if saved.get(name, _default(name)) != own.get(name):
                reason = f"the residuals were made with it, and now it is {own.get(name)!r}"
                remedy = "Use the settings of the checkpoint, or start without its residuals"
                raise CheckpointError(f"compressor.{name}", saved.get(name), reason, remedy)
        self._steps = dict(state["steps"])
        self._residuals = {key: kept.detach().clone() for key, kept in state["residuals"].items()}

    def _residual_for(self, key: str, gradient: Tensor) -> Tensor:
        kept = self._residuals.get(key)
        if kept is None or kept.device != gradient.device:
            kept = torch.zeros_like(gradient) if kept is None else kept.to(gradient.device)
            self._residuals[key] = kept
        return kept

    def check(self, key: str, gradient: Tensor) -> None:
        """Check what `step` would be given.

        Raises:
            ConfigError: As `step`.
        """
        if not gradient.dtype.is_floating_point:
            reason = "only gradients of floats of 16 to 64 bits can be compressed"
            remedy = "Send this bucket without compression"
            raise ConfigError(f"bucket {key}", gradient.dtype, reason, remedy)
        kept = self._residuals.get(key)
        if kept is not None and (kept.shape, kept.dtype) != (gradient.shape, gradient.dtype):
            reason = f"what waits under this key has {len(kept)} elements of {kept.dtype}"
            remedy = "Give each bucket a key of its own"
            value = f"{len(gradient)} elements of {gradient.dtype}"
            raise ConfigError(f"bucket {key}", value, reason, remedy)


def _default(name: str) -> Any:
    """Return what a checkpoint of an older version means, which does not have the setting."""
    field = CompressorConfig.model_fields.get(name)
    return None if field is None else field.default


def _top_k(compressor: Compressor, norms: Tensor, draw: int, k: int) -> Tensor:
    """Choose the k blocks of largest L2 norm; the first of equal ones.

    It is a contraction: ``||C(a) - a||^2 <= (1 - k / nb) * ||a||^2`` for nb blocks.
    """
    return _largest(norms, ~norms.isfinite(), k)


def _random_k(compressor: Compressor, norms: Tensor, draw: int, k: int) -> Tensor:
    """Choose k blocks by seed and draw: the same on all ranks, different ones in each step.

    In expectation it contracts as `_top_k` does. Blocks are not divided by their probability, as
    error feedback sends the others later. Ranks agree without a message, except for blocks that are
    not finite. All ranks must run the same release of numpy.
    """
    random = np.random.Generator(np.random.PCG64([compressor.config.seed, draw]))
    # Without an order the cost grows with k, not with the number of blocks.
    drawn = random.choice(len(norms), k, replace=False, shuffle=False)
    chosen = ~norms.isfinite()
    chosen[torch.from_numpy(drawn).to(norms.device)] = True
    return chosen


def _threshold(compressor: Compressor, norms: Tensor, draw: int, k: int) -> Tensor:
    """Choose the blocks whose L2 norm is at least a threshold.

    What waits is bounded: ``||C(a) - a||^2 <= nb * threshold^2`` for nb blocks.
    """
    assert compressor.config.threshold is not None, "the validator has checked it"
    return (norms >= compressor.config.threshold) | ~norms.isfinite()


_SELECT: Mapping[CompressorKind, Callable[[Compressor, Tensor, int, int], Tensor]] = {
    "block_topk": _top_k,
    "block_randomk": _random_k,
    "block_threshold": _threshold,
}


def _largest(scores: Tensor, urgent: Tensor, k: int) -> Tensor:
    """Return the mask of the k largest scores, of equal ones the first, and of all urgent ones."""
    if k == len(scores):
        return torch.ones_like(urgent)
    scores = scores.masked_fill(urgent, torch.inf)
    least = scores.topk(k, sorted=False).values.min()
    above, equal = scores > least, scores == least
    return above | (equal & (equal.cumsum(0) <= k - above.sum())) | urgent


def block_norms(flat: Tensor, block: int) -> Tensor:
    """Return the L2 norm of each block, in one pass over the bucket.

    Args:
        flat: (E,), floats, contiguous.
        block: Elements per block; the last one may be short.

    Returns:
        (ceil(E / block),), float32; float64 for float64.
    """
    wide = sum_dtype(flat.dtype)
    norms = torch.empty(num_blocks(len(flat), block), dtype=wide, device=flat.device)
    whole = len(flat) // block
    rows = flat[: whole * block].view(whole, block)
    if flat.dtype == wide or flat.device.type != "cpu":
        norms[:whole] = torch.linalg.vector_norm(rows, dim=1, dtype=wide)
    else:
        # On CPUs, converting inside of the reduction takes seven times as long.
        size = max(1, _CHUNK // block)
        for part, place in zip(rows.split(size), norms[:whole].split(size), strict=True):
            place.copy_(torch.linalg.vector_norm(part.to(wide), dim=1))
    if whole < len(norms):
        norms[whole] = torch.linalg.vector_norm(flat[whole * block :], dtype=wide)
    return norms


def _draw(key: str, count: int) -> int:
    # Python's own hash of a string differs between processes.
    digest = blake2b(f"{count} {key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _move(source: Tensor, target: Tensor, chosen: Tensor, block: int) -> None:
    """Move the chosen blocks; their source and the rest of the target become +0.0."""
    whole = len(source) // block
    rows = source[: whole * block].view(whole, block)
    places = target[: whole * block].view(whole, block)
    target.zero_()
    # Part by part, so that no copy of all chosen blocks is needed.
    for index in chosen[:whole].nonzero().squeeze(1).split(max(1, _CHUNK // block)):
        places.index_copy_(0, index, rows.index_select(0, index))
        rows.index_fill_(0, index, 0.0)
    if whole < len(chosen):
        rest, waits = source[whole * block :], ~chosen[whole]
        target[whole * block :] = rest.masked_fill(waits, 0.0)
        rest.masked_fill_(~waits, 0.0)


def _clear(flat: Tensor, gone: Tensor, block: int) -> None:
    """Make blocks +0.0."""
    whole = len(flat) // block
    index = gone[:whole].nonzero().squeeze(1)
    flat[: whole * block].view(whole, block).index_fill_(0, index, 0.0)
    if whole < len(gone):
        flat[whole * block :].masked_fill_(gone[whole], 0.0)
