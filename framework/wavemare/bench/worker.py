# SPDX-License-Identifier: Apache-2.0
"""One rank of any benchmark: ``python -m wavemare.bench.worker MODULE:REQUEST ASKED ANSWERED``.

ASKED is the file of the request, and rank 0 writes the result to the file ANSWERED.
"""

from __future__ import annotations

import json
import os
import pkgutil
import sys
from pathlib import Path

import torch.distributed as dist

from wavemare.bench.ranks import describe_machine
from wavemare.bench.request import Request
from wavemare.engine.launch.group import environment_rank, init_distributed
from wavemare.failure import run_main
from wavemare.files import atomic_write_text
from wavemare.observe import quiet_libraries

__all__ = ["main"]


def main() -> None:
    """Join the group, measure, and write the result."""
    kind, asked, answered = sys.argv[1:]
    request: Request = pkgutil.resolve_name(kind).model_validate_json(Path(asked).read_text())
    quiet_libraries()
    request.prepare()
    if "RANK" not in os.environ:  # MPICH and Open MPI have variables of their own
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(environment_rank())
    init_distributed()
    quiet_libraries()
    result = pkgutil.resolve_name(request.measured_by)(request)
    if dist.get_rank() == 0:
        text = json.dumps({"machine": describe_machine(), **result})
        atomic_write_text(Path(answered), text)
    dist.barrier()
    dist.destroy_process_group()  # gloo's threads must not outlive the interpreter


if __name__ == "__main__":
    run_main(main)
