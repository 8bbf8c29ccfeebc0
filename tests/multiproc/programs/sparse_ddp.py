# SPDX-License-Identifier: Apache-2.0
"""Train with DistributedDataParallel, plainly and through the hook of the sparse collective.

Arguments: result folder, then the names of cases.
"""

import io
import sys
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from common import leave
from torch.nn.parallel import DistributedDataParallel

from wavemare.comm import CompressorConfig, register_ddp_hook
from wavemare.comm.cost import Constants
from wavemare.engine import init_distributed

VOCABULARY, HIDDEN, LENGTH, SIZE, STEPS = 5_000, 8, 6, 4, 6


class Model(torch.nn.Module):
    """Two tables and a few layers; ``unused`` has a gradient on one rank alone."""

    def __init__(self, *, sparse=False, skips=False, halves=False):
        super().__init__()
        self.words = torch.nn.Embedding(VOCABULARY, HIDDEN, sparse=sparse)
        self.bags = torch.nn.EmbeddingBag(VOCABULARY, HIDDEN, sparse=sparse)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.unused = torch.nn.Linear(HIDDEN, HIDDEN)
        self.out = torch.nn.Linear(HIDDEN, 3)
        if halves:
            self.layers[1].to(torch.bfloat16)
        self.skips = skips

    def forward(self, ids):
        hidden = self.words(ids).mean(1) + self.bags(ids)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden.to(layer.weight.dtype))).float()
        if not self.skips or dist.get_rank() == 0:
            hidden = hidden + self.unused(hidden)
        return self.out(hidden)


def ordered_sum(state, bucket):
    """The twin: all gradients are gathered and summed in the order of the ranks, in float32."""
    buffer = bucket.buffer()
    parts = [torch.empty_like(buffer) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, buffer)
    total = torch.zeros_like(buffer, dtype=torch.float32)
    for part in parts:
        total += part.float()
    total *= 1 / len(parts)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(total.to(buffer.dtype))
    return future


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "auto": {"options": {"mode": "auto"}},
    "static": {"ddp": {"static_graph": True}},
    "views": {"ddp": {"gradient_as_bucket_view": True}},
    "unused": {"model": {"skips": True}, "ddp": {"find_unused_parameters": True}},
    "accumulation": {"accumulation": 3},
    "types": {"model": {"halves": True}},
    "sparse": {"model": {"sparse": True}},
}


def batches():
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    while True:
        yield torch.randint(0, VOCABULARY, (SIZE, LENGTH), generator=generator)


def build(case):
    torch.manual_seed(7)
    # Small buckets, so that there are several.
    return DistributedDataParallel(
        Model(**case.get("model", {})), bucket_cap_mb=0.001, **case.get("ddp", {})
    )


def train(model, data, steps, accumulation=1):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        for number in range(accumulation):
            last = number == accumulation - 1
            with nullcontext() if last else model.no_sync():
                ids = next(data)
                loss = torch.nn.functional.cross_entropy(model(ids), ids[:, 0] % 3)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model):
    return [parameter.detach().double().sum().item() for parameter in model.parameters()]


def differences(name):
    """Train three twins: by torch's own sum, by the ordered one, and by the hook."""
    case = CASES[name]
    found = {}
    models = {}
    for kind in ("torch", "ordered", "ours"):
        # Gathered and summed in order, rows are what a dense table would be.
        twin = {**case, "model": {**case.get("model", {}), "sparse": False}}
        model = models[kind] = build(twin if kind == "ordered" else case)
        if kind == "ordered":
            model.register_comm_hook(None, ordered_sum)
        if kind == "ours":
            options = {"mode": "pushpull", "block": 64, "constants": Constants()}
            comm = register_ddp_hook(model, **{**options, **case.get("options", {})})
        train(model, batches(), STEPS, case.get("accumulation", 1))
    for kind in ("torch", "ordered"):
        found[kind] = max(
            (a.detach().float() - b.detach().float()).abs().max().item()
            for a, b in zip(models[kind].parameters(), models["ours"].parameters(), strict=True)
        )
    found["calls"] = comm.totals.num_calls
    begin = "sparse_calls_"
    found["executors"] = sorted(
        name.removeprefix(begin) for name in comm.totals.take() if name.startswith(begin)
    )
    found["weights"] = weights(models["ours"])
    comm.close()
    return found


def compressed():
    """Train six steps; train three, save, and train three more in new objects."""
    config = CompressorConfig(type="block_topk", ratio=0.3)
    options = {"mode": "pushpull", "block": 16, "compressor": config}
    whole, kept = build({}), None
    data = batches()
    comm = register_ddp_hook(whole, **options)
    for step in range(STEPS):
        if step == STEPS // 2:
            buffer = io.BytesIO()
            torch.save({"model": whole.state_dict(), "comm": comm.state_dict()}, buffer)
            kept = buffer.getvalue()
        train(whole, data, 1)
    comm.close()
    state = torch.load(io.BytesIO(kept or b""))
    models = {}
    for name in ("resumed", "forgetful"):
        model = models[name] = build({})
        model.load_state_dict(state["model"])
        comm = register_ddp_hook(model, **options)
        if name == "resumed":
            comm.load_state_dict(state["comm"])
        train(model, islice(batches(), STEPS // 2, None), STEPS - STEPS // 2)
        comm.close()
    residuals = state["comm"]["compressor"]["residuals"]
    return {
        "whole": weights(whole),
        **{name: weights(model) for name, model in models.items()},
        "names": sorted(residuals),
        "waiting": max(part.abs().max().item() for part in residuals.values()),
    }


def mismatch():
    """Rank 0's model has another bucket: the error is the collective's own."""
    torch.manual_seed(7)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    comm = register_ddp_hook(model, mode="pushpull")
    if dist.get_rank() == 0:
        comm.allreduce_(torch.ones(3), async_op=True)
    error = None
    try:
        model(torch.ones(2, 4)).sum().backward()
    except Exception as caught:
        error = [type(caught).__name__, str(caught)]
    comm.close()
    return {"error": error}


if __name__ == "__main__":
    init_distributed()
    special = {"compressed": compressed, "mismatch": mismatch}
    leave(
        {name: special[name]() if name in special else differences(name) for name in sys.argv[2:]}
    )
