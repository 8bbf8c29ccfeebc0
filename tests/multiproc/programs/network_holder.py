# SPDX-License-Identifier: Apache-2.0
"""Hold a cluster whose ranks sleep, print its parts, and wait to be ended."""

import json
import sys
import time

import psutil

from benchmarks.cluster import EmulatedCluster


def sleeping():
    children = psutil.Process().children(recursive=True)
    return [child.pid for child in children if child.name() == "sleep"]


def main():
    with EmulatedCluster(2, 500.0) as cluster:
        group = cluster.start_ranks(["sleep", "1000"], ranks_per_host=2)
        while len(ranks := sleeping()) < 4:
            time.sleep(0.01)
        parts = {"pids": ranks, "folder": str(cluster.folder)}
        print(json.dumps(parts), flush=True)
        if sys.argv[1:] == ["raise"]:
            raise ValueError("as asked")
        group.wait(timeout_s=1000)


main()
