# SPDX-License-Identifier: Apache-2.0
"""How processes end: one message, the right exit code, no hang."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from multiprocessing import forkserver

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from wavemare.engine.launch.environment import free_port

pytestmark = pytest.mark.long

MESSAGE = "key = 'value': the reason. The remedy.\n"
RAISE = "raise ConfigError('key', 'value', 'the reason', 'The remedy')"


@dataclass
class Ended:
    """What a process left."""

    code: int
    stdout: str
    stderr: str


@pytest.fixture
def start(tmp_path):
    """Start a process whose main function has the given body."""

    def run(body, *, grace_s=0.2, **variables):
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


def end(process):
    stdout, stderr = process.communicate(timeout=600)
    return Ended(process.returncode, stdout, stderr)


def test_success_is_silent(start):
    assert end(start("print('done')")) == Ended(0, "done\n", "")


def test_user_error_is_one_message_without_traceback(start):
    assert end(start(RAISE)) == Ended(2, "", f"error: {MESSAGE}")


def test_torchrun_finds_the_message_for_the_end_of_its_report(start, tmp_path):
    file = tmp_path / "error.json"
    assert end(start(RAISE, TORCHELASTIC_ERROR_FILE=str(file))).code == 2
    assert ProcessFailure(0, 1, 2, str(file)).message == f"error: {MESSAGE}".strip()


def test_other_exception_keeps_its_traceback(start):
    ended = end(start("{}['missing']"))
    assert ended.code == 1
    assert ended.stderr.startswith("Traceback (most recent call last):")
    assert ended.stderr.endswith("KeyError: 'missing'\n")


def test_exit_passes_through(start):
    assert end(start("sys.exit(7)")) == Ended(7, "", "")


def test_interrupt_is_silent(start):
    process = start("print('up', flush=True)\ntime.sleep(900)")
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert end(process) == Ended(130, "", "")


@pytest.mark.parametrize("name", ["RANK", "SLURM_PROCID"])
def test_only_rank_0_prints_if_the_launcher_ends_the_others(start, name):
    other = start(RAISE, grace_s=300, **{name: "1"})
    assert end(start(RAISE, **{name: "0"})).stderr == f"error: {MESSAGE}"
    other.terminate()
    assert end(other) == Ended(-signal.SIGTERM, "", "")


def test_rank_that_fails_alone_prints_in_the_end(start):
    assert end(start(RAISE, RANK="3")) == Ended(2, "", f"error: {MESSAGE}")


def test_a_rank_that_its_launcher_tells_to_end_does_not_wait_for_it(start):
    """Not even if it can say nothing of the rank that it has lost."""
    process = start(
        """
        import signal
        from wavemare.comm.waits import told_to_end
        signal.signal(signal.SIGTERM, lambda *_: told_to_end.set())
        print("up", flush=True)
        raise RuntimeError("Connection closed by peer")
        """,
        grace_s=900,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    assert end(process).code == 1


# All are there before one ends: joining a group whose store has gone is another case.
RANK = """
import os, sys, threading, time
import torch, torch.distributed as dist
from wavemare.errors import ConfigError
from wavemare.failure import run_main

os.environ |= {variables!r}
for name, stream in {files!r}.items():
    os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), stream)

def main():
    dist.init_process_group("gloo")
    dist.barrier()
{body}

run_main(main, grace_s=0.2)
"""


@pytest.fixture(scope="module")
def imported():
    """A process that has imported torch, and is forked for each rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "wavemare.failure"])
    forkserver.ensure_running()
    yield context
    forkserver._forkserver._stop()  # else it lasts as long as this process


@pytest.fixture
def ranks(tmp_path, imported):
    """Run the ranks of a group."""

    def run(body, *, number=2):
        port = free_port()
        common = {"WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        processes = []
        for rank in range(number):
            program = RANK.format(
                variables={name: str(it) for name, it in {**common, "RANK": rank}.items()},
                files={str(tmp_path / f"{rank}.{stream}"): stream for stream in (1, 2)},
                body=textwrap.indent(body, "    "),
            )
            processes.append(imported.Process(target=exec, args=(program, {})))
            processes[-1].start()
        for process in processes:
            process.join(600)
        texts = [
            [(tmp_path / f"{rank}.{stream}").read_text() for stream in (1, 2)]
            for rank in range(number)
        ]
        ended = [Ended(p.exitcode, *text) for p, text in zip(processes, texts, strict=True)]
        for process in processes:
            process.close()
        return ended

    return run


def test_in_a_group_the_first_to_fail_prints(ranks):
    ended = ranks(RAISE)
    assert [process.code for process in ended] == [2, 2]
    messages = "".join(process.stderr for process in ended)
    assert messages.count(MESSAGE) == 1
    assert messages.startswith("error on rank ")


@pytest.mark.parametrize("cause", [RAISE, "raise TypeError('the bug')"])
def test_lost_peer_does_not_bury_the_cause(ranks, cause):
    body = f"if os.environ['RANK'] == '1':\n    {cause}\ndist.all_reduce(torch.ones(2))"
    survivor, culprit = ranks(body)
    assert survivor == Ended(1, "", "")
    if "TypeError" in cause:
        assert culprit.code == 1
        assert culprit.stderr.startswith("rank 1 failed:\nTraceback")
        assert culprit.stderr.endswith("TypeError: the bug\n")
    else:
        assert culprit == Ended(2, "", f"error on rank 1: {MESSAGE}")


def test_peer_that_dies_without_a_word_is_reported(ranks):
    body = "if os.environ['RANK'] == '1':\n    os._exit(9)\ndist.all_reduce(torch.ones(2))"
    survivor, culprit = ranks(body)
    assert culprit == Ended(9, "", "")
    assert survivor.code == 1
    assert survivor.stderr.count("rank 0 failed:\nTraceback") == 1
    assert "by peer" in survivor.stderr


@pytest.mark.parametrize("cause", ["raise TypeError('the bug')", "os._exit(9)"])
def test_the_end_of_rank_0_and_its_store_is_one_line_of_a_peer(ranks, cause):
    body = f"if os.environ['RANK'] == '0':\n    {cause}\ndist.all_reduce(torch.ones(2))"
    culprit, survivor = ranks(body)
    assert culprit.stderr.count("TypeError: the bug\n") == ("TypeError" in cause)
    assert survivor.code == 1
    line = survivor.stderr.splitlines()[-1]  # torch may say above that the store is gone
    assert "Traceback" not in survivor.stderr
    assert line.startswith("rank 1 ends because rank 0 has ended or cannot be reached (")
    assert "by peer" in line


def test_an_error_waits_for_the_checkpoint_that_a_thread_writes(ranks):
    body = (
        "from types import SimpleNamespace\n"
        "from wavemare.engine.checkpoint.save import BackgroundSave\n"
        "save = lambda group: (time.sleep(1), print('saved', flush=True))\n"
        f"BackgroundSave(SimpleNamespace(complete=save), None)\n{RAISE}"
    )
    (ended,) = ranks(body, number=1)
    assert (ended.code, ended.stdout.splitlines()[-1:]) == (2, ["saved"])


def test_handlers_of_the_script_run_at_an_error(ranks):
    handlers = "import atexit\natexit.register(print, 'last', flush=True)\n"
    handlers += "atexit.register(lambda: 1 / 0)\natexit.register(print, 'first', flush=True)\n"
    for error, code in ((RAISE, 2), ("raise RuntimeError('own')", 1)):
        (ended,) = ranks(handlers + error, number=1)
        assert (ended.code, ended.stdout) == (code, "first\nlast\n")


def test_what_still_runs_in_a_group_does_not_keep_the_process(ranks):
    # Stands for the threads of a process group that wait for peers which never answer.
    body = f"threading.Thread(target=time.sleep, args=(300,)).start()\n{RAISE}"
    (ended,) = ranks(body, number=1)
    assert ended == Ended(2, "", f"error on rank 0: {MESSAGE}")
