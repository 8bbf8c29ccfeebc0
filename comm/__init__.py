# SPDX-License-Identifier: Apache-2.0
"""Collectives: gradients travel as their non-zero blocks, over MPI, gloo or NCCL.

Useful by itself, without DeepSpeed: `SparseComm` for plain calls, `register_ddp_hook` for torch's
DistributedDataParallel. In: a flat tensor of each rank. Out: their sum, in its place. Read
`sparse.py` first. Names are imported at first use.
"""

if __name__ == "comm":  # a second import would duplicate its classes
    raise ImportError("'comm' is part of wavemare: import 'wavemare.comm' instead")

from typing import TYPE_CHECKING

from wavemare.lazy import at_first_use

if TYPE_CHECKING:
    from wavemare.comm.collective_queue import Handle
    from wavemare.comm.compressor import make_compressor
    from wavemare.comm.config import CompressorConfig, SparseCollectiveConfig
    from wavemare.comm.ddp import register_ddp_hook
    from wavemare.comm.masks import Masks, OwnedRange
    from wavemare.comm.sparse import SparseComm

__all__ = [
    "CompressorConfig",
    "Handle",
    "Masks",
    "OwnedRange",
    "SparseCollectiveConfig",
    "SparseComm",
    "make_compressor",
    "register_ddp_hook",
]

_HOME = {
    "CompressorConfig": "config",
    "Handle": "collective_queue",
    "Masks": "masks",
    "OwnedRange": "masks",
    "SparseCollectiveConfig": "config",
    "SparseComm": "sparse",
    "make_compressor": "compressor",
    "register_ddp_hook": "ddp",
}

__getattr__ = at_first_use(__name__, _HOME)
