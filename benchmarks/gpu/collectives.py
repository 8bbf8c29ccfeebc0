# SPDX-License-Identifier: Apache-2.0
"""Part ``collectives``: sums of two ranks over NCCL and gloo, beside the backend's all-reduce."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.request import DENSE
from benchmarks.gpu.run import skip
from benchmarks.gpu.timing import Scene, make_rows
from wavemare.comm import SparseComm
from wavemare.comm.config import Mode
from wavemare.engine.launch.group import gather

_MODES: tuple[Mode, ...] = ("ordered", "pushpull", "allgather", "auto")
_BLOCK = 256
_NUM_BYTES, _TINY_BYTES = 100 * 2**20, 2**18


def measure(scene: Scene) -> Iterator[dict[str, Any]]:
    """Yield the rows; a system whose sum is not the all-reduce's is left out.

    A sum of two numbers is the same in each order, so all sums are equal to the last bit.
    """
    backend = scene.job.backend
    numel = (_TINY_BYTES if scene.job.tiny else _NUM_BYTES) // torch.float32.itemsize
    comms = {
        f"{backend}-{mode}": SparseComm(mode=mode, average=False, block=_BLOCK, transport="torch")
        for mode in _MODES
    }
    work = torch.empty(numel, device=scene.device)
    systems: dict[str, Callable[[], Any]] = {
        f"{backend}-{DENSE}": partial(dist.all_reduce, work),
        **{name: partial(comm.allreduce_, work) for name, comm in comms.items()},
    }
    for density in (1.0, 0.1, 0.01):
        case = f"d = {density:g}"
        gradient = _gradient(numel, density, scene.device)
        expected = gradient.clone()
        dist.all_reduce(expected)
        right = {}
        for name, run in systems.items():
            work.copy_(gradient)
            run()
            right[name] = all(gather(torch.equal(work, expected)))
        chosen = {name: run for name, run in systems.items() if right[name]}
        for name in systems.keys() - chosen.keys():
            yield skip(
                "collectives", "its sum is not that of the all-reduce", case=case, system=name
            )

        def before(gradient: Tensor = gradient) -> None:
            work.copy_(gradient)
            scene.meet()

        samples = scene.rounds(chosen, before=before, slowest=True)
        yield from make_rows("collectives", case, samples)
    for comm in comms.values():
        comm.close()


def _gradient(numel: int, density: float, device: torch.device) -> Tensor:
    """Return (numel,) in fp32, other values and blocks on each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    blocks = torch.rand(numel // _BLOCK, 1, generator=generator) < density
    values = torch.randn(numel // _BLOCK, _BLOCK, generator=generator)
    return (values * blocks).flatten().abs().to(device)
