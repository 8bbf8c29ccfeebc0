# SPDX-License-Identifier: Apache-2.0
"""Trains on two ranks or more, and lets one of them fail in the way that is asked for."""

import argparse
import contextlib
import fcntl
import itertools
import os
import signal
import sys
import termios
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
from common import build_gpt2, configuration, token_batches

import wavemare

STEPS, AT = 6, 3
MICRO_STEPS = 2

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("fault")
parser.add_argument("engine")
parser.add_argument("--rank", type=int, default=1)
parser.add_argument("--timeout", type=float, default=4.0)
parser.add_argument("--local_rank", type=int)
options = parser.parse_args()


def tell_when():
    options.folder.mkdir(exist_ok=True, parents=True)
    (options.folder / "when").write_text(str(time.time()))


def most_bytes_to_be_sent():
    """Return how many bytes a socket of this process holds that the other side has not."""
    sizes = [0]
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # no socket
            held = fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4))
            sizes.append(int.from_bytes(held, sys.byteorder))
    return max(sizes)


def fail():
    """Do what goes wrong on the rank of the fault."""
    tell_when()
    match options.fault:
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise ValueError("this rank's own fault")
        case "exit":
            os._exit(0)
        case "cut":
            pass  # the test does it, from outside
        case "half":
            sending = torch.distributed.isend(torch.empty(1 << 26), 0)
            while most_bytes_to_be_sent() < 1 << 16:
                assert not sending.is_completed()
            os.kill(os.getpid(), signal.SIGKILL)
        case "loader":
            time.sleep(2 * options.timeout)
        case "receive":
            torch.distributed.recv(torch.empty(1), 0)


def batches(engine, rank):
    source = token_batches(0 if options.engine != "data" else rank)
    for number in range((1000 if options.fault == "cut" else STEPS) * MICRO_STEPS):
        if options.fault == "cut":
            time.sleep(0.05)
        if rank == options.rank and options.engine != "waves" and number >= AT * MICRO_STEPS:
            if options.fault == "batches":
                tell_when()
                return
            if number == AT * MICRO_STEPS:
                fail()
        elif options.fault == "half" and number == AT * MICRO_STEPS:
            torch.distributed.recv(torch.empty(1 << 26), options.rank)
        tokens = next(source)
        yield {"input_ids": tokens, "labels": tokens}


def main():
    section = {
        "watchdog": {"timeout_s": options.timeout, "folder": str(options.folder / "watchdog")}
    }
    changes = {}
    if options.engine == "waves":  # of a tensor-parallel model
        section |= {"tensor_parallel": {"size": 2}, "wavelet": {"mode": "sync"}}
    elif options.engine != "data":
        section["pipeline"] = {"stages": 2, "schedule": options.engine}
    elif options.fault == "lock":
        # DeepSpeed compiles its Adam for CPUs when the engine is built.
        changes["zero_optimization"] = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
        changes["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2}}
        changes["zero_force_ds_cpu_optimizer"] = True
    config = configuration(1, wavemare=section) | changes
    model = build_gpt2()
    if "pipeline" in section:
        model.config.tie_word_embeddings = False
    initialize = wavemare.initialize  # here it is imported, with all that it needs
    if options.fault == "lock":
        tell_when()  # each rank: the last one counts
        threading.Timer(5 * options.timeout, os._exit, (3,)).start()  # DeepSpeed waits for ever
    engine, *_ = initialize(model=model, config=config)
    rank = torch.distributed.get_rank()
    if options.engine == "waves" and rank == options.rank:
        # In a backward pass beside a forward pass: each has a thread of its own.
        passes = itertools.count()
        engine.module.transformer.h[0].ln_2.weight.register_hook(
            lambda _: fail() if next(passes) == AT * MICRO_STEPS else None
        )
    if options.fault == "loader":
        for group in list(torch.distributed.distributed_c10d._world.pg_names):
            limit = timedelta(seconds=options.timeout / 2)
            torch.distributed.distributed_c10d._set_pg_timeout(limit, group)
        engine.watchdog.extend_deadline()
    data = batches(engine, rank)
    for _ in range(1000 if options.fault == "cut" else STEPS):
        try:
            engine.train_batch(data)
        except StopIteration:
            break
    (options.folder / f"trained_{rank}").write_text("")
    if options.fault != "batches":
        engine.destroy()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
