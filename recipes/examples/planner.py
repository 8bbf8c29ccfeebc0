# SPDX-License-Identifier: Apache-2.0
"""Which layout is fastest on which devices: predicted in one process, without any of them.

python recipes/examples/planner.py
"""

import json

from wavemare.parallel.planner import find_layouts

CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {}}}


def main() -> None:
    """Search for a GPT-2 on two fast and two slow cards; print the best layout's configuration."""
    found = find_layouts("gpt2", "2xV100,2xP100", global_batch=64, sequence_length=1024)
    print(found)
    config = found.best.configure(CONFIG)
    print(json.dumps(config, indent=2))


if __name__ == "__main__":
    main()
