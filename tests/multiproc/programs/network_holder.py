# SPDX-License-Identifier: Apache-2.0
"""Hold a laboratory whose ranks sleep, tell what it consists of, and wait to be ended."""

import json
import sys
import time

from wavemare.bench.network import Laboratory


def main():
    with Laboratory(2, 500.0) as laboratory:
        group = laboratory.start_ranks(["sleep", "1000"], ranks_per_host=2)
        while len(group.pids()) < 4:
            time.sleep(0.01)
        parts = {"pids": list(group.pids().values()), "folder": str(laboratory.folder)}
        print(json.dumps(parts), flush=True)
        if sys.argv[1:] == ["raise"]:
            raise ValueError("as asked")
        group.wait(timeout_s=1000)


main()
