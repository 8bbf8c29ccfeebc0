# SPDX-License-Identifier: Apache-2.0
"""The reader of Megatron's index under a fuzzer that is guided by coverage, where there is one."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "indexed.py"


@pytest.mark.slow
def test_a_minute_of_atheris_finds_no_crash(tmp_path):
    pytest.importorskip("atheris", reason="no atheris (pip install atheris)")
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), "-max_total_time=60"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert not list(tmp_path.glob("crash-*"))
