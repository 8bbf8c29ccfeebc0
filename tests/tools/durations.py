# SPDX-License-Identifier: Apache-2.0
"""Write the tables of docs/results/test-durations.md from the junit XML of test runs.

python tests/tools/durations.py build/tests/*.xml > docs/results/test-durations.md
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections import Counter, defaultdict
from pathlib import Path
from xml.etree import ElementTree

DEAREST = 60
SHORT_S = 5.0
"""Files that take less are added up by folder."""


def rows(header, lines):
    yield f"| {header} |"
    yield "|" + "---|" * (header.count("|") + 1)
    for cells in lines:
        yield "| " + " | ".join(map(str, cells)) + " |"
    yield ""


def main(reports):
    ends: Counter[str] = Counter()
    by_file: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    dearest = []
    print("# How long the tests take\n\nMade by `tests/tools/durations.py`.\n")
    lines = []
    for report in reports:
        suite = ElementTree.parse(report).getroot()[0]
        cases = list(suite.iter("testcase"))
        minutes = float(suite.get("time", 0)) / 60
        start = suite.get("timestamp", "")[:16]
        lines.append((report.stem, len(cases), suite.get("skipped"), f"{minutes:.1f}", start))
        for case in cases:
            seconds = float(case.get("time", 0))
            file = case.get("classname", "").replace(".", "/") + ".py"
            ends["failed" if case.find("failure") is not None else "ran"] += 1
            by_file[file] += seconds
            counts[file] += 1
            dearest.append((seconds, f"`{file}::{case.get('name')}`".replace("|", "\\|")))
    cores = len(os.sched_getaffinity(0))
    print(f"Machine: {cores} cores, {platform.machine()}, Python {platform.python_version()}.\n")
    print("\n".join(rows("run | tests | skipped | minutes | started", lines)))
    print(f"## The {DEAREST} dearest tests\n")
    top = sorted(dearest, reverse=True)[:DEAREST]
    print("\n".join(rows("seconds | test", ((f"{seconds:.1f}", name) for seconds, name in top))))
    print("## Minutes per file\n\nOf two tests at a time, each counts in full.\n")
    rest: defaultdict[str, float] = defaultdict(float)
    files = []
    for file, seconds in sorted(by_file.items(), key=lambda item: -item[1]):
        if seconds >= SHORT_S:
            files.append((f"{seconds / 60:.2f}", counts[file], f"`{file}`"))
        else:
            rest[str(Path(file).parent)] += seconds
    files += [(f"{s / 60:.2f}", "", f"other files of `{folder}`") for folder, s in rest.items()]
    print("\n".join(rows("minutes | tests | file", files)))
    if ends["failed"]:
        sys.exit(f"{ends['failed']} tests failed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reports", nargs="+", type=Path)
    main(parser.parse_args().reports)
