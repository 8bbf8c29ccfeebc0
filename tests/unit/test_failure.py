# SPDX-License-Identifier: Apache-2.0
"""How processes end: one message, the right exit code, no hang."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from wavemare.engine.job_environment import reserved_port

MESSAGE = "key = 'value': the reason. The remedy.\n"
RAISE = "raise ConfigError('key', 'value', 'the reason', 'The remedy')"


@dataclass
class Ended:
    """What a process left."""

    code: int
    stdout: str
    stderr: str


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Start a process whose main function has the given body."""

    def run(body: str, *, grace_s: float = 0.2, **variables: str) -> "subprocess.Popen[str]":
        program = tmp_path / f"program{len(list(tmp_path.iterdir()))}.py"
        program.write_text(
            "import os, sys, time\n"
            "from wavemare.errors import ConfigError\n"
            "from wavemare.failure import run_main\n"
            f"def main():\n{textwrap.indent(textwrap.dedent(body), '    ')}\n"
            f"run_main(main, grace_s={grace_s})\n"
        )
        names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
        environment = {k: v for k, v in os.environ.items() if k not in names}
        return subprocess.Popen(
            [sys.executable, str(program)],
            env={**environment, "OMP_NUM_THREADS": "1", **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return run


def end(process: "subprocess.Popen[str]") -> Ended:
    stdout, stderr = process.communicate(timeout=60)
    return Ended(process.returncode, stdout, stderr)


def test_success_is_silent(start: Start) -> None:
    assert end(start("print('done')")) == Ended(0, "done\n", "")


def test_user_error_is_one_message_without_traceback(start: Start) -> None:
    assert end(start(RAISE)) == Ended(2, "", f"error: {MESSAGE}")


def test_other_exception_keeps_its_traceback(start: Start) -> None:
    ended = end(start("{}['missing']"))
    assert ended.code == 1
    assert ended.stderr.startswith("Traceback (most recent call last):")
    assert ended.stderr.endswith("KeyError: 'missing'\n")


def test_exit_passes_through(start: Start) -> None:
    assert end(start("sys.exit(7)")) == Ended(7, "", "")


def test_interrupt_is_silent(start: Start) -> None:
    process = start("print('up', flush=True)\ntime.sleep(60)")
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert end(process) == Ended(130, "", "")


@pytest.mark.parametrize("name", ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"])
def test_only_rank_0_prints_if_the_launcher_ends_the_others(start: Start, name: str) -> None:
    other = start(RAISE, grace_s=60, **{name: "1"})
    assert end(start(RAISE, **{name: "0"})).stderr == f"error: {MESSAGE}"
    other.terminate()
    assert end(other) == Ended(-signal.SIGTERM, "", "")


def test_rank_that_fails_alone_prints_after_a_moment(start: Start) -> None:
    started = time.monotonic()
    ended = end(start(RAISE, grace_s=0.5, RANK="3"))
    assert ended == Ended(2, "", f"error: {MESSAGE}")
    assert time.monotonic() - started > 0.5


def test_terminal_gets_a_panel(tmp_path: Path) -> None:
    program = (
        "from wavemare.errors import ConfigError\n"
        "from wavemare.failure import run_main\n"
        f"def main(): {RAISE}\n"
        "run_main(main)\n"
    )
    primary, secondary = os.openpty()
    process = subprocess.Popen([sys.executable, "-c", program], stderr=secondary)
    os.close(secondary)
    assert process.wait(timeout=30) == 2
    text = os.read(primary, 65536).decode()
    os.close(primary)
    for part in ("error", "key", "'value'", "The reason.", "The remedy.", "\u256d"):
        assert part in text


# All are there before one ends: joining a group whose store has gone is another case.
JOIN = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
"""


def ranks(start: Start, body: str, *, number: int = 2) -> list[Ended]:
    common = {"WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1"}
    with reserved_port() as port:
        processes = [
            start(JOIN + body, grace_s=2.0, RANK=str(rank), MASTER_PORT=str(port), **common)
            for rank in range(number)
        ]
        return [end(process) for process in processes]


def test_in_a_group_the_first_to_fail_prints(start: Start) -> None:
    ended = ranks(start, RAISE)
    assert [process.code for process in ended] == [2, 2]
    messages = "".join(process.stderr for process in ended)
    assert messages.count(MESSAGE) == 1
    assert messages.startswith("error on rank ")


@pytest.mark.parametrize("cause", [RAISE, "raise TypeError('the bug')"])
def test_lost_peer_does_not_bury_the_cause(start: Start, cause: str) -> None:
    body = f"if os.environ['RANK'] == '1':\n    {cause}\ndist.all_reduce(torch.ones(2))"
    survivor, culprit = ranks(start, body)
    assert survivor == Ended(1, "", "")
    if "TypeError" in cause:
        assert culprit.code == 1
        assert culprit.stderr.startswith("rank 1 failed:\nTraceback")
        assert culprit.stderr.endswith("TypeError: the bug\n")
    else:
        assert culprit == Ended(2, "", f"error on rank 1: {MESSAGE}")


def test_peer_that_dies_without_a_word_is_reported(start: Start) -> None:
    body = "if os.environ['RANK'] == '1':\n    os._exit(9)\ndist.all_reduce(torch.ones(2))"
    survivor, culprit = ranks(start, body)
    assert culprit == Ended(9, "", "")
    assert survivor.code == 1
    assert survivor.stderr.count("rank 0 failed:\nTraceback") == 1
    assert "by peer" in survivor.stderr


@pytest.mark.parametrize("cause", ["raise TypeError('the bug')", "os._exit(9)"])
def test_the_end_of_rank_0_and_its_store_is_one_line_of_a_peer(start: Start, cause: str) -> None:
    body = f"if os.environ['RANK'] == '0':\n    {cause}\ndist.all_reduce(torch.ones(2))"
    culprit, survivor = ranks(start, body)
    assert culprit.stderr.count("TypeError: the bug\n") == ("TypeError" in cause)
    assert survivor.code == 1
    line = survivor.stderr.splitlines()[-1]  # torch may say above that the store is gone
    assert "Traceback" not in survivor.stderr
    assert line.startswith("rank 1 ends because rank 0 has ended or cannot be reached (")
    assert "by peer" in line


def test_what_still_runs_in_a_group_does_not_keep_the_process(start: Start) -> None:
    # Stands for the threads of a process group that wait for peers which never answer.
    body = f"import threading\nthreading.Thread(target=time.sleep, args=(300,)).start()\n{RAISE}"
    (ended,) = ranks(start, body, number=1)
    assert ended == Ended(2, "", f"error on rank 0: {MESSAGE}")
