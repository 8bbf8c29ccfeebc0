# SPDX-License-Identifier: Apache-2.0
"""The path of GPUs on a fake one: equal bits, and no needless wait of the host.

Over torch the code for NCCL runs over gloo; over MPI a communicator takes the fake GPU's memory, as
a CUDA-aware one would, for messages alone.
"""

import time

import fake_gpu
import torch
from fake_gpu import GPU, RECORD, Event, download, upload
from inputs import buckets
from oracle import close, ordered_sum, same_bits, summed_rows

from wavemare.comm.cost import Constants
from wavemare.comm.sparse import SparseComm
from wavemare.comm.transport.staging import StagedTransport
from wavemare.engine.sparse.buckets import Bucket, BucketReducer, Slot

BLOCK = 256
NUMEL = BLOCK * 61 + 7
HUGE = 1 << 21
WORKER = "wavemare-collectives"
HEADER = ["up, not pinned"]
"""A message of 80 bytes; copies of so few do not wait."""
READS = ["down, not pinned", "down, not pinned"]
"""What the thread of the collectives must know to launch more: headers and masks of all ranks."""
SYNCS = {
    "item": lambda flat: flat[0].item(),
    "tolist": lambda flat: flat[:3].tolist(),
    "bool": lambda flat: bool(flat[0] == 0),
    "int": lambda flat: int(flat[0].view(torch.int32)),
    "cpu": lambda flat: flat.cpu(),
    "nonzero": lambda flat: flat.nonzero(),
    "mask": lambda flat: flat[flat != 0],
    "unique": lambda flat: torch.unique(flat[:5]),
    "synchronize": lambda flat: torch.cuda.current_stream().synchronize(),
    "pageable": lambda flat: torch.ones(3).to(flat.device, non_blocking=True),
    "blocking": lambda flat: torch.empty(flat.shape, pin_memory=True).copy_(flat),
}


def transports(world):
    """Return transports that send the GPU's memory, and such as copy it, by name."""
    if world.kind == "torch":
        from wavemare.comm.transport.torch_transport import TorchTransport

        return {
            "on_stream": lambda: TorchTransport(device="cuda", timeout_s=600, on_stream=True),
            "staged": lambda: StagedTransport(TorchTransport(timeout_s=600)),
        }
    from fake_mpi import aware

    from wavemare.comm.transport.mpi_transport import MpiTransport

    return {
        "direct": lambda: StagedTransport(MpiTransport(aware(), 600, takes_device=True)),
        "staged": lambda: StagedTransport(MpiTransport(timeout_s=600)),
    }


def on_gpu(world, checks, sizes):
    """Every collective gives the bits of the host."""
    fake_gpu.install()
    for name, opened in transports(world).items():
        for mode in ("ordered", "pushpull", "allgather", "auto", "dense", "packed"):
            exact = mode not in ("dense", "packed")
            settings = {"constants": Constants(), "mode": mode, "deterministic": exact}
            with fake_gpu.on_stream(None), SparseComm(opened(), device=GPU, **settings) as comm:
                for dtype in (torch.float32, torch.bfloat16):
                    _reduced(checks, comm, (name, mode, dtype), dtype, exact)
                if mode in ("pushpull", "ordered"):
                    _others(checks, comm, (name, mode))
        with fake_gpu.on_stream(None):
            _chunks(checks, opened(), name)


def _reduced(checks, comm, what, dtype, exact):
    everyone = buckets("half", comm.size, NUMEL, BLOCK, dtype)
    flat = upload(everyone[comm.rank])
    handle = comm.allreduce_(flat)
    checks(handle.wait() is flat, *what, "gave another tensor")
    found, scale = download(flat), 1 / comm.size
    right = (
        same_bits(found, ordered_sum(everyone, scale)) if exact else close(found, everyone, scale)
    )
    checks(right, *what)
    checks(handle.stats.bytes_up > 0 and handle.stats.actual_s > 0, *what, handle.stats)


def _others(checks, comm, what):
    everyone = buckets("half", comm.size, NUMEL, BLOCK, torch.float32)
    borders = [NUMEL * rank // comm.size for rank in range(comm.size + 1)]
    flat = upload(everyone[comm.rank])
    comm.reduce_scatter_(flat, borders)
    comm.allgather_(flat, borders)
    checks(same_bits(download(flat), ordered_sum(everyone, 1 / comm.size)), *what, "halves")
    ids = [[5, 5, 2, rank, 7][: 3 + rank % 3] for rank in range(comm.size)]
    rows = [torch.randn(len(own), 3, generator=torch.Generator().manual_seed(9)) for own in ids]
    for bound in (9, None):
        mine = upload(torch.tensor(ids[comm.rank])), upload(rows[comm.rank])
        found, sums = (download(each) for each in comm.allreduce_rows_(*mine, bound).wait())
        expected = summed_rows(ids, rows, 1 / comm.size)
        checks(found.tolist() == sorted({i for own in ids for i in own}), *what, "ids", bound)
        checks(same_bits(sums, expected[1]), *what, "rows", bound)


def _chunks(checks, transport, name):
    with SparseComm(
        transport, device=GPU, mode="pushpull", block=HUGE, constants=Constants()
    ) as comm:
        everyone = buckets("half", comm.size, 4 * HUGE + 7, HUGE, torch.bfloat16)
        flat = upload(everyone[comm.rank])
        comm.allreduce_(flat)
        checks(same_bits(download(flat), ordered_sum(everyone, 1 / comm.size)), name, "chunks")


def waits(world, checks, sizes):
    """Between a gradient and the optimizer's step the training thread waits for nothing."""
    fake_gpu.install()
    opened = next(iter(transports(world).values()))
    names = [f"layer{number}" for number in range(4)]
    parts = [Bucket(name, torch.float32, NUMEL, (Slot(name, 0, NUMEL),)) for name in names]
    written = {}
    with fake_gpu.on_stream(None):
        comm = SparseComm(opened(), device=GPU, mode="pushpull", constants=Constants())
        reducer = BucketReducer(
            comm,
            parts,
            device=GPU,
            write=lambda name, reduced, here: written.update({name: reduced.clone()}),
        )
        everyone = buckets("half", comm.size, NUMEL, BLOCK, torch.float32)
        gradient = upload(everyone[comm.rank])
        for calls in (0, len(names)):
            RECORD.clear()
            written.clear()
            for number, name in enumerate(names):
                reducer.put(name, gradient)
                Event.running = True
                reducer.send_complete()
                _until(lambda ended=calls + number + 1: comm.totals.num_calls == ended)
                time.sleep(0.01)
                # All is launched, but the stream would have to wait for the GPU.
                reducer.take_reduced()
                checks(len(written) == number, "taken early", sorted(written))
                Event.running = False
                _until(lambda wanted=number + 1: reducer.take_reduced() or len(written) == wanted)
                checks(len(written) == number + 1, "not taken", sorted(written))
            reducer.end()
        checks(RECORD.of("MainThread") == [], "training thread", RECORD.waits)
        _of_worker(checks, comm, len(names))
        for name in names:
            expected = ordered_sum(everyone, 1 / comm.size)
            checks(same_bits(download(written[name]), expected), "reduced", name)
        checks((comm.totals.take() or {}).get("sparse_calls_pushpull") == 2 * len(names), "totals")
        for name, sync in SYNCS.items():
            RECORD.clear()
            RECORD.inserted = sync
            comm.allreduce_(upload(everyone[comm.rank]))
            RECORD.inserted = None
            checks(len(RECORD.of(WORKER)) > 3, "not noticed:", name)
        comm.close()


def _until(condition):
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)


def _of_worker(checks, comm, calls):
    found = RECORD.of(WORKER)
    expected = (
        HEADER + READS if comm.transport.on_stream else ["down, not pinned", *["synchronize"] * 2]
    )
    checks(sorted(found) == sorted(calls * expected), "worker", RECORD.waits)
    launches = [name for name in RECORD.launches if not name.startswith("set_device")]
    checks(launches == calls * ["mask", "gather", "reduce", "scatter"], launches)
    checks(f"set_device {GPU}" in RECORD.launches, "set_device")
    kept = [stream for shape, stream in RECORD.kept if shape == (NUMEL,)]
    checks(any(stream.startswith(WORKER) for stream in kept), "inputs are kept", RECORD.kept)
