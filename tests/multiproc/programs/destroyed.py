# SPDX-License-Identifier: Apache-2.0
"""Build, train and destroy engines; leave what the process goes on holding.

Arguments: result folder, then kinds of engines, or ``times`` for the ways in which one can end.
"""

import gc
import os
import sys
import tempfile
import weakref

import pytest
import torch
from common import LENGTH, MICRO, VOCABULARY, build_gpt2, build_moe, configuration, leave
from torch import distributed
from torch.distributed import distributed_c10d

import wavemare

ENGINES = 4
STAGES = {"stages": 2}
SPLIT = {"tensor_parallel": {"size": 2}}
SPARSE = {"sparse_collective": {"mode": "auto"}}
KINDS = {
    "zero_0": (0, {}),
    "zero_1": (1, {}),
    "background": (1, {"checkpoint": {"background": True}}),
    "waves": (0, {**SPLIT, "wavelet": {"mode": "sync"}}),
    "sparse": (0, SPARSE),
    "sparse_1": (1, SPARSE),
    "local_steps": (1, {"local_steps": {"mode": "diloco", "replica": 1, "every": 2}}),
    "experts": (0, {"expert_parallel": {"size": 2}}),
    "tensor_parallel": (0, SPLIT),
    "1f1b": (0, {"pipeline": {**STAGES, "schedule": "1f1b"}}),
    "zb-h1": (0, {"pipeline": {**STAGES, "schedule": "zb-h1"}}),
    "zbv": (0, {"pipeline": {**STAGES, "schedule": "zbv"}}),
    "pipemare": (0, {"pipeline": {**STAGES, "schedule": "pipemare"}}),
}
"""ZeRO stage, and the section ``wavemare``."""


def batches(kind):
    """Yield micro-batches: of ranks that share a model the same ones."""
    shares = {"pipeline", "tensor_parallel"} & KINDS[kind][1].keys()
    generator = torch.Generator().manual_seed(0 if shares else distributed.get_rank())
    while True:
        tokens = torch.randint(0, VOCABULARY, (MICRO, LENGTH), generator=generator)
        yield {"input_ids": tokens, "labels": tokens}


def start(kind):
    zero, section = KINDS[kind]
    model = build_moe() if kind == "experts" else build_gpt2(n_layer=4)
    return wavemare.initialize(model=model, config=configuration(zero, wavemare=section))[0]


def use(kind, engine):
    engine.train_batch(batches(kind))
    if kind == "background":
        with tempfile.TemporaryDirectory() as folder:
            names = [folder]
            distributed.broadcast_object_list(names, 0)
            engine.save_checkpoint(names[0])
            engine.finish_saving()
            distributed.barrier()


def groups():
    return len(distributed_c10d._world.pg_map)


def held():
    gc.collect()
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "groups": groups(),
    }


def left(kind):
    """Return what each engine has left, on average over those after the first."""
    counts = []
    for _ in range(ENGINES + 1):
        engine = start(kind)
        use(kind, engine)
        engine.destroy()
        del engine
        distributed.barrier()
        counts.append(held())
    return {name: (counts[-1][name] - first) / ENGINES for name, first in counts[0].items()}


def ended_at_other_times():
    """Destroy on rank 0, then on rank 1, and each a second time."""
    engine, rank = start("tensor_parallel"), distributed.get_rank()
    use("tensor_parallel", engine)
    for turn in range(2):
        if turn == rank:
            engine.destroy()
            engine.destroy()
        distributed.barrier()


def ended_by_the_collector():
    """Collect an engine on one rank alone; return the groups before and after."""
    engine, rank = start("tensor_parallel"), distributed.get_rank()
    use("tensor_parallel", engine)
    grid, reference, before = engine.mpu, weakref.ref(engine), groups()
    if rank == 0:
        del engine
        gc.collect()
        assert reference() is None
    # Both ranks can go on with them.
    distributed.all_reduce(torch.ones(1), group=grid.get_tensor_model_parallel_group())
    return [before, groups()]


def ended_one_by_one():
    """Destroy one of two engines of a model; return the groups before, between and after."""
    before = groups()
    first = start("tensor_parallel")
    config = configuration(0, wavemare={})
    second = wavemare.initialize(model=first.module, mpu=first.mpu, config=config)[0]
    first.destroy()
    second.train_batch(batches("tensor_parallel"))
    between = groups()
    second.destroy()
    return [before, between, groups()]


def ended_before_it_began():
    """Ask for an engine that DeepSpeed refuses; return the groups before and after."""
    config = configuration(0, wavemare=SPLIT, optimizer={"type": "AdamW", "params": {"lrr": 1}})
    before = groups()
    with pytest.raises(TypeError, match="lrr"):
        wavemare.initialize(model=build_gpt2(), config=config)
    gc.collect()
    after = groups()
    start("zero_0").destroy()
    return [before, after]


def ended_too_late():
    """Destroy an engine after the process group; another one can follow."""
    engine = start("tensor_parallel")
    store, rank, size = distributed_c10d._get_default_store(), distributed.get_rank(), 2
    distributed.barrier()
    distributed.destroy_process_group()
    engine.destroy()
    store = distributed.PrefixStore("second", store)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    engine.destroy()
    distributed.all_reduce(torch.ones(1))


if __name__ == "__main__":
    wavemare.init_distributed()
    if sys.argv[2:] == ["times"]:
        ended_at_other_times()
        found = {
            "collected": ended_by_the_collector(),
            "destroyed": ended_one_by_one(),
            "refused": ended_before_it_began(),
        }
        ended_too_late()
    else:
        found = {kind: left(kind) for kind in sys.argv[2:]}
    leave(found)
