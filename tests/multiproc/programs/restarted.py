# SPDX-License-Identifier: Apache-2.0
"""A rank that ends in a given way in its first attempt, or in each, and records its place."""

import json
import os
import signal
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    folder, end = Path(sys.argv[1]), sys.argv[2]
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    names = ("LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
    place = {name: os.environ[name] for name in names} | {"words": sys.argv[3:]}
    (folder / f"attempt_{attempt}_rank_{rank}.json").write_text(json.dumps(place))
    while rank == "1" and not (folder / f"attempt_{attempt}_rank_0.json").exists():
        time.sleep(0.02)  # the end of a rank ends the other one
    if rank == "1" and end.isdigit():
        sys.exit(int(end))
    if rank == "1" and end == "kill" and attempt == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + 600
    while not stopped and not (end == "kill" and attempt == "1"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
