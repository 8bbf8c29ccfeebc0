# SPDX-License-Identifier: Apache-2.0
"""The elastic agent of one host: it starts the ranks there, and again after one has failed.

With ``--max-restarts`` the launcher starts ``python -m wavemare.cli.agent N PROGRAM...`` in place
of the ranks. The first process of each host becomes torch's elastic agent; the others end at once.
Before each attempt the agents of all hosts meet, so all ranks restart together.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from wavemare.engine.launch.environment import host_address
from wavemare.errors import LaunchError, WavemareError
from wavemare.failure import run_main

_SHARE_NO_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def main(words: Sequence[str]) -> None:
    """Run the agent, or end if another process of this host does."""
    if os.environ["LOCAL_RANK"] == "0":
        sys.exit(run_agent(int(words[0]), words[1:]))


def run_agent(max_restarts: int, words: Sequence[str]) -> int:
    """Run the ranks of this host to their end, and return the exit code.

    DeepSpeed's launcher has set the variables that say how many hosts and ranks there are.

    Raises:
        LaunchError: The agents of the other hosts cannot be reached.
    """
    logging.disable(logging.CRITICAL)  # torch's agent logs what `_Agent` says in one line
    # Ranks of a later attempt would find the addresses of dead ranks in a shared store:
    # https://github.com/pytorch/pytorch/issues/135712
    os.environ[_SHARE_NO_STORE] = "1"
    hosts, host = int(os.environ["CROSS_SIZE"]), int(os.environ["CROSS_RANK"])
    meeting = RendezvousParameters(
        backend="c10d",
        endpoint=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        run_id="wavemare",
        min_nodes=hosts,
        max_nodes=hosts,
        local_addr=host_address(os.environ) if host else os.environ["MASTER_ADDR"],
        is_host=host == 0,
    )
    try:
        handler = get_rendezvous_handler(meeting)
        spec = WorkerSpec(
            role="rank",
            local_world_size=int(os.environ["LOCAL_SIZE"]),
            entrypoint=sys.executable,
            # torch replaces variables such as ${local_rank} in the words.
            args=("-u", *(word.replace("$", "$$") for word in words)),
            rdzv_handler=handler,
            max_restarts=max_restarts,
            local_addr=meeting.local_addr,
        )
        try:
            result = _Agent(spec, DefaultLogsSpecs()).run()
        finally:
            handler.shutdown()
    except SignalException as error:
        return 128 + error.sigval
    except RendezvousError as error:
        reason = f"the rendezvous for another attempt failed ({error})"
        remedy = "Look at the output of the other hosts, and resume with --resume"
        raise LaunchError("--max-restarts", max_restarts, reason, remedy) from error
    return exit_code(failure.exitcode for failure in result.failures.values())


class _Agent(LocalElasticAgent):
    """Reports each restart, does not restart after typed errors, and lets ranks stop on SIGTERM."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        processes: dict[int, Any] = super()._start_workers(worker_group)
        # In place of torch's handler, which kills the ranks after 30 seconds.
        signal.signal(signal.SIGTERM, self._stop)
        return processes

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Have the ranks save a checkpoint and leave, and do not restart them."""
        self._remaining_restarts = 0
        group = self._worker_group
        if group.state is not WorkerState.HEALTHY:
            raise SignalException("stopped between two attempts", signal.Signals(number))
        for worker in group.workers:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(worker.id, number)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        code = exit_code(failure.exitcode for failure in result.failures.values())
        if code == WavemareError.exit_code:
            self._remaining_restarts = 0
        if code and self._remaining_restarts:
            total = worker_group.spec.max_restarts
            attempt = total - self._remaining_restarts + 1
            sys.stderr.write(
                f"wavemare: the ranks ended with {code}; restart {attempt} of {total}\n"
            )
        return result


def exit_code(codes: Iterable[int]) -> int:
    """Return the exit code of a job from those of its failed ranks; 0 if none has failed.

    Priority: signal, typed error, other, SIGTERM (which the agent sends to the other ranks).

    Args:
        codes: Negative for signals, as `subprocess` gives them.
    """
    return min((128 - code if code < 0 else code for code in codes), key=_priority, default=0)


def _priority(code: int) -> int:
    if code == 128 + signal.SIGTERM:
        return 3
    if code > 128:  # noqa: PLR2004 - another signal
        return 0
    return 1 if code == WavemareError.exit_code else 2


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
