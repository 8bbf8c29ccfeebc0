# SPDX-License-Identifier: Apache-2.0
"""The command line imports nothing heavy before it is needed, so that it answers at once."""

import json
import subprocess
import sys

HEAVY = {"torch", "deepspeed", "transformers", "datasets", "numpy", "matplotlib", "mpi4py"}
PROGRAM = """
import json, sys
from wavemare.cli import main
commands, heavy, file = sys.argv[1:]
found = []
for arguments in json.loads(commands):
    sys.argv = ["wavemare", *arguments]
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    found.append([arguments, code, sorted(sys.modules.keys() & set(json.loads(heavy)))])
open(file, "w").write(json.dumps(found))
"""


def test_help_plans_and_refusals_are_light(tmp_path):
    plan = ["plan", "show", "--stages", "4", "--micro-batches", "8"]
    codes = [
        (["--help"], 0),
        (["--version"], 0),
        (["doctor", "--help"], 0),
        (["train", "--help"], 0),
        (["layout", "search", "--help"], 0),
        (plan, 0),
    ]
    answer = tmp_path / "answer.json"
    words = [json.dumps([command for command, _ in codes]), json.dumps(sorted(HEAVY)), str(answer)]
    subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, check=True)
    assert json.loads(answer.read_text()) == [[command, code, []] for command, code in codes]
