# SPDX-License-Identifier: Apache-2.0
"""The keys of ``wavemare.sparse_collective``; this file imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from wavemare.section import Section

Mode = Literal["auto", "dense", "ordered", "packed", "pushpull", "allgather"]
MODES: tuple[str, ...] = Mode.__args__  # type: ignore[attr-defined]
LOOSE_MODES = frozenset({"dense", "packed"})
"""Modes that do not sum in the order of the ranks."""
HALVES = ("ordered", "pushpull")
"""Modes whose first half is a reduce-scatter: it leaves the sums at their owners."""


CompressorKind = Literal["block_topk", "block_randomk", "block_threshold"]

COMPRESSOR_OPTIONS: Mapping[CompressorKind, tuple[str, ...]] = {
    "block_topk": ("ratio", "density_warmup_steps"),
    "block_randomk": ("ratio", "density_warmup_steps", "seed"),
    "block_threshold": ("threshold",),
}
"""Keys of the configuration that only some compressors have."""

_FIRST_SHARE = 0.25
"""Of the blocks, at the begin of a density warm-up."""


class CompressorConfig(Section):
    """How gradients are made sparse before they are sent."""

    type: CompressorKind = "block_topk"
    """Which blocks are sent: those with the largest norms, random ones, or those whose norm reaches
    a threshold."""

    ratio: float = Field(default=0.01, gt=0, le=1)
    """The share of the blocks of a bucket that is sent; not for ``block_threshold``."""

    threshold: float | None = Field(default=None, gt=0, allow_inf_nan=False, validate_default=True)
    """For ``block_threshold``: the smallest L2 norm of a block that is sent."""

    seed: int = Field(default=0, ge=0)
    """For ``block_randomk``: the seed of the choice."""

    error_feedback: bool = True
    """Adds blocks that are not sent to the next gradient. Otherwise they are lost."""

    warmup_steps: int = Field(default=0, ge=0)
    """The number of first optimizer steps that send everything."""

    density_warmup_steps: int = Field(default=0, ge=0)
    """For so many steps after these, the share of blocks that are sent falls geometrically from a
    quarter to ``ratio``; not for ``block_threshold``."""

    def share(self, step: int) -> float:
        """Return the share of the blocks that a step sends.

        DGC's warm-up (Lin et al. 2018, section 3.4), in steps rather than epochs: a geometric
        sequence from a quarter to ``ratio``.

        Args:
            step: Counted from 0.
        """
        past = step - self.warmup_steps
        if past < 0:
            return 1.0
        if past >= self.density_warmup_steps or self.ratio >= _FIRST_SHARE:
            return self.ratio
        return _FIRST_SHARE * (self.ratio / _FIRST_SHARE) ** (past / self.density_warmup_steps)

    # Defaults are let through, so that a configuration that was written out in full can be read.
    @field_validator("ratio", "threshold", "seed", "density_warmup_steps")
    @classmethod
    def _check_effect(cls, value: float | None, info: ValidationInfo) -> float | None:
        kind, name = info.data.get("type"), str(info.field_name)
        if kind is None:  # its own error is told
            return value
        users = {user for user, options in COMPRESSOR_OPTIONS.items() if name in options}
        if kind not in users and value != cls.model_fields[name].default:
            context = {"kind": kind, "users": ", ".join(sorted(users))}
            raise PydanticCustomError("no_effect", "{kind} ignores it, it is for {users}", context)
        if kind in users and value is None:
            raise PydanticCustomError("missing", "{kind} needs a number here", {"kind": kind})
        return value


class SparseCollectiveConfig(Section):
    """How gradients are summed over the data ranks."""

    mode: Literal["off"] | Mode = "off"
    """What sums gradients: DeepSpeed (``off``), the way that is predicted to be the fastest for
    each bucket (``auto``), or one way by name. ``dense`` and ``packed`` need ``deterministic`` to
    be false. ZeRO 1 and 2 with reduce-scatter take only ``auto``, ``ordered`` and ``pushpull``."""

    block: Annotated[int, Field(ge=1)] = 256
    """The number of elements in a block."""

    transport: Literal["auto", "mpi", "torch"] = "auto"
    """What carries the messages: ``mpi``, ``torch`` (gloo, NCCL), or what the launch offers
    (``auto``)."""

    deterministic: bool = True
    """Sums in the order of the ranks, so that the bits are the same whichever way is taken. If
    false, ``auto`` and ``dense`` hand buckets that stay dense to the library's own sum, and look at
    them in one call of 16."""

    hierarchical: bool = False
    """Ranks of one node first sum densely among themselves. Not with the reduce-scatters of ZeRO 1
    and 2."""

    staging: Literal["auto", "direct", "pinned"] = "auto"
    """How MPI gets the blocks of an accelerator: through the memory of the host (``pinned``), or
    ``direct``. ``auto`` is ``direct`` if the transport of all ranks takes the memory of the
    accelerator. gloo always takes ``pinned``."""

    known_rows: Literal["on", "off"] = "on"
    """``on``: the rows of an embedding's gradient come from the backward pass. Each call looks at a
    sample of the other rows, and some calls at all of them; if one of the first eight finds another
    row, the bucket is searched from then on, and later it is an error. ``off`` always searches."""

    updated_weights: Literal["auto", "changed", "all"] = "auto"
    """ZeRO 1 and 2: which weights are gathered after an optimizer step. ``changed``: of each rank's
    partition the blocks that differ from before the step, or all if more than 3/4 of them do.
    ``auto``: ``changed`` if the optimizer leaves the rows of a table alone that got no gradient
    (``SGD`` without momentum and weight decay, ``Adagrad`` without weight decay), and tables are a
    quarter of the weights or more. The weights are the same bit for bit."""

    compressor: CompressorConfig | None = None
    """Which blocks each rank holds back and adds to its next gradient. If omitted: none."""

    bucket_bytes: Annotated[int, Field(ge=1)] | None = None
    """The largest bucket. A larger parameter is a bucket by itself, and embeddings share no bucket
    with other layers. If omitted: a quarter of the other gradients, from 2 to 64 MiB, so that most
    leave during the backward pass; with a compressor 64 MiB."""
