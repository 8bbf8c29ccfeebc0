# SPDX-License-Identifier: Apache-2.0
"""Probe two ranks: all get the same cluster; it becomes a file and a layout."""

import sys
from pathlib import Path

import torch
from common import HIDDEN, LENGTH, build_gpt2, leave

from wavemare.engine import init_distributed
from wavemare.parallel.planner import Cluster, find_layouts, read_cluster
from wavemare.parallel.planner.probe import BlockSize, probe_cluster

init_distributed()
block = BlockSize(width=HIDDEN, inner=4 * HIDDEN, heads=2, sequence=LENGTH)
random_state = torch.get_rng_state()
cluster = probe_cluster(block, limit_s=4.0)
untouched = bool(torch.equal(random_state, torch.get_rng_state()))

if torch.distributed.get_rank() == 0:
    cluster.save(Path(sys.argv[1], "cluster.json"))
torch.distributed.barrier()
again: Cluster = read_cluster(Path(sys.argv[1], "cluster.json"))
found = find_layouts(build_gpt2(), again, global_batch=8, sequence_length=LENGTH)
leave(
    {
        "cluster": cluster.to_json(),
        "again": again.to_json(),
        "untouched": untouched,
        "digest": found.best.digest,
        "world_size": found.best.world_size,
    }
)
