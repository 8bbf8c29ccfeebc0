# SPDX-License-Identifier: Apache-2.0
"""A rank does not outlive the process that started it, however early that one goes."""

import os
import signal
import subprocess
import sys
from functools import partial

from wavemare.cli.warded import WardedRank, end_with_parent


def test_a_rank_whose_parent_has_gone_before_it_could_ask_ends_at_once():
    # Its parent is this process, not the one that is named: as after that one's end.
    for parent, code in ((os.getppid(), 137), (os.getpid(), 0)):
        begin = partial(end_with_parent, parent)
        process = subprocess.run(["true"], preexec_fn=begin, check=False, timeout=60)
        assert process.returncode == code


def test_a_rank_ends_with_its_supervisor():
    program = """
import os, sys
from wavemare.cli.warded import WardedRank
rank = WardedRank(["sleep", "1000"], os.environ)
print(rank.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )  # returns when the rank, too, has closed its output
    assert ended.returncode == -signal.SIGKILL
    assert int(ended.stdout) > 0


def test_a_rank_runs_to_its_end(wait_for):
    with WardedRank([sys.executable, "-c", "raise SystemExit(7)"], os.environ) as rank:
        wait_for(lambda: rank.poll() is not None)
        assert rank.poll().code == 7
