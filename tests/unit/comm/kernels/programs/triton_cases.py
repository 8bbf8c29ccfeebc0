# SPDX-License-Identifier: Apache-2.0
"""Compare Triton's kernels with slow twins; leaves a JSON file of what differed in which case.

Usage: triton_cases.py RESULT.json [--long]. On a GPU, or with TRITON_INTERPRET=1 on the CPU.
"""

import json
import sys
import warnings
from pathlib import Path

import block_cases
import reduce_cases
import torch
from slow_twins import Subject

from wavemare.comm.triton_kernels import TritonKernels


def main():
    # Sums that overflow, and infinities that cancel, are meant.
    warnings.simplefilter("ignore", RuntimeWarning)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    subject = Subject(TritonKernels(tile=4096), TritonKernels(), device, "--long" in sys.argv)
    results = {}
    for name, check in {**vars(block_cases), **vars(reduce_cases)}.items():
        if name.startswith("check_"):
            cases = list(check(subject))
            failures = [case for case, right in cases if not right]
            results[name[6:]] = {"cases": len(cases), "failures": failures}
    Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
