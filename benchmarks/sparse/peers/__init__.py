# SPDX-License-Identifier: Apache-2.0
"""Systems of papers beside wavemare's executors, one module for each paper.

All get the same dense bucket with the numbers of its non-zero blocks, and leave the sum in it.
Read `base` first, which has what they share.
"""

from collections.abc import Mapping

from benchmarks.sparse.peers.base import Peer, agsparse, plain
from benchmarks.sparse.peers.deepreduce import DeepReduce4, DeepReduce8
from benchmarks.sparse.peers.hitopk import HiTopK
from benchmarks.sparse.peers.omnireduce import OmniReduce, Streaming
from benchmarks.sparse.peers.parallax import parallax
from benchmarks.sparse.peers.sparcml import (
    Qsgd4,
    Qsgd8,
    dsar,
    recursive_double,
    split_allgather,
)
from benchmarks.sparse.peers.zen import zen

__all__ = ["PEERS", "OmniReduce", "Peer"]

PEERS: Mapping[str, type[Peer]] = {
    "agsparse": plain(agsparse),
    "sparcml": plain(recursive_double),
    "sparcml-split": plain(split_allgather),
    "sparcml-dsar": plain(dsar),
    "sparcml-dsar-qsgd8": Qsgd8,
    "sparcml-dsar-qsgd4": Qsgd4,
    "parallax": plain(parallax),
    "zen": plain(zen),
    "hitopk": HiTopK,
    "deepreduce8": DeepReduce8,
    "deepreduce4": DeepReduce4,
    "streaming": Streaming,
    "omnireduce": OmniReduce,
}
"""By the names of `benchmarks.sparse.request.PEERS`."""
