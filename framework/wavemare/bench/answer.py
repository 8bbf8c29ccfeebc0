# SPDX-License-Identifier: Apache-2.0
"""The frame of a rank that measures: a file tells it what, and another one gets the result."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from wavemare.bench.machine import describe_machine
from wavemare.bench.options import Request
from wavemare.engine.launch.group import environment_rank, init_distributed
from wavemare.files import atomic_write_text
from wavemare.observe import quiet_libraries

__all__ = ["answer"]

_Request = TypeVar("_Request", bound=Request)


def answer(request_type: type[_Request], measure: Callable[[_Request], dict[str, Any]]) -> None:
    """Join the group that a launcher started, measure, and leave the result.

    Args:
        request_type: Of what is asked.
        measure: Called on all ranks. What it returns on rank 0 is written, with the machine.
    """
    options = _options()
    request = request_type.from_json(options.request.read_text(encoding="utf-8"))
    quiet_libraries()
    if "RANK" not in os.environ:  # MPICH and Open MPI have variables of their own
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(environment_rank())
    init_distributed()
    quiet_libraries()
    result = measure(request)
    if dist.get_rank() == 0:
        atomic_write_text(options.result, json.dumps({"machine": describe_machine(), **result}))
    dist.barrier()
    dist.destroy_process_group()  # gloo's threads must not outlive the interpreter


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--request", type=Path, required=True, help="file of the request")
    parser.add_argument("--result", type=Path, required=True, help="file for the result")
    parser.add_argument("--local_rank", type=int, help="set by the deepspeed launcher")
    return parser.parse_args()
