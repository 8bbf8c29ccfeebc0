# SPDX-License-Identifier: Apache-2.0
"""Go on as a script does that srun has started. Arguments: result folder, script."""

import os
import runpy
import sys

if __name__ == "__main__":
    _, folder, script = sys.argv
    rank, ranks = os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    os.environ |= {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NTASKS": ranks,
        "SLURM_STEP_NUM_TASKS": ranks,
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
    }
    sys.argv = [script, folder]
    runpy.run_path(script, run_name="__main__")
