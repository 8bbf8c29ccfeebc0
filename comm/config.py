"""The keys of ``wavemare.sparse_collective``; this file imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from wavemare.section import Section

__all__ = ["MODES", "CompressorConfig", "Mode", "SparseCollectiveConfig"]

Mode = Literal[
    "auto",
    "dense",
    "ordered",
    "packed",
    "pushpull",
    "allgather",
    "streaming",
    "agsparse",
    "sparcml",
]
MODES: tuple[str, ...] = Mode.__args__  # type: ignore[attr-defined]


Kind = Literal["block_topk", "block_randomk", "block_threshold", "block_topk_ratio"]


class CompressorConfig(Section):
    """How gradients are made sparse before they are sent."""

    type: Kind = "block_topk"
    """Which blocks are sent: the largest, random ones, those that reach a threshold, or the
    largest beside the norm of their weights."""

    ratio: float = Field(default=0.01, gt=0, le=1)
    """Share of the blocks of a bucket that is sent; not for ``block_threshold``."""

    threshold: float | None = Field(default=None, gt=0, allow_inf_nan=False, validate_default=True)
    """L2 norm from which on a block is sent; for ``block_threshold`` alone."""

    seed: int = Field(default=0, ge=0)
    """Of the choice of blocks; for ``block_randomk`` alone."""

    error_feedback: bool = True
    """Whether blocks that are not sent are added to the next gradient; else they are lost."""

    warmup_steps: int = Field(default=0, ge=0)
    """So many first optimizer steps send everything."""

    # Defaults are let through, so that a configuration that was written out in full can be read.
    @field_validator("ratio", "threshold", "seed")
    @classmethod
    def _check_effect(cls, value: float | None, info: ValidationInfo) -> float | None:
        kind, name = info.data.get("type"), str(info.field_name)
        if kind is None:  # its own error is told
            return value
        users = {"threshold": {"block_threshold"}, "seed": {"block_randomk"}}.get(
            name, {"block_topk", "block_randomk", "block_topk_ratio"}
        )
        if kind not in users and value != cls.model_fields[name].default:
            context = {"kind": kind, "users": ", ".join(sorted(users))}
            raise PydanticCustomError("no_effect", "{kind} ignores it, it is for {users}", context)
        if kind in users and value is None:
            raise PydanticCustomError("missing", "{kind} needs a number here", {"kind": kind})
        return value


class SparseCollectiveConfig(Section):
    """How gradients are summed over the data ranks.

    Attributes:
        mode: ``off``: by DeepSpeed. ``auto``: whatever is predicted to be the fastest, bucket by
            bucket. Or one executor by its name.
        block: Elements per block.
        transport: ``mpi``, ``torch`` or what the launch offers.
        deterministic: Whether sums are made in the order of the ranks, so that they are the same
            bit for bit whichever executor makes them.
        hierarchical: Whether ranks of one node first sum densely among themselves.
        staging: How an accelerator's tensors travel: ``direct``, ``pinned`` or ``auto``.
        compressor: What each rank leaves out, and adds to its next gradient instead.
        bucket_bytes: Largest bucket; embeddings have buckets of their own.
    """

    mode: Literal["off"] | Mode = "off"
    block: Annotated[int, Field(ge=1)] = 256
    transport: Literal["auto", "mpi", "torch"] = "auto"
    deterministic: bool = True
    hierarchical: bool = False
    staging: Literal["auto", "direct", "pinned"] = "auto"
    compressor: CompressorConfig | None = None
    bucket_bytes: Annotated[int, Field(ge=1)] = 64 << 20
