"""The keys of ``wavemare.sparse_collective``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from wavemare.comm.compress import CompressorConfig
from wavemare.section import Section

__all__ = ["MODES", "Mode", "SparseCollectiveConfig"]

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
