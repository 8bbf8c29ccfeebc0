# SPDX-License-Identifier: Apache-2.0
"""Write the tables of docs/results/test-durations.md from the junit XML of test runs.

python tests/tools/durations.py build/tests/*.xml > docs/results/test-durations.md
"""

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


def show(tier, reports):
    """Print the tables of some runs; return how many tests failed in them."""
    failed, by_file, counts = 0, defaultdict(float), Counter()
    runs, dearest = [], []
    for report in reports:
        suite = ElementTree.parse(report).getroot()[0]
        cases = list(suite.iter("testcase"))
        minutes, start = float(suite.get("time", 0)) / 60, suite.get("timestamp", "")[:16]
        runs.append((report.stem, len(cases), suite.get("skipped"), f"{minutes:.1f}", start))
        failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        for case in cases:
            seconds = float(case.get("time", 0))
            file = case.get("classname", "").replace(".", "/") + ".py"
            by_file[file] += seconds
            counts[file] += 1
            dearest.append((seconds, f"`{file}::{case.get('name')}`".replace("|", "\\|")))
    print(f"## {tier}\n")
    print("\n".join(rows("run | tests | skipped | minutes | started", runs)))
    print(f"### {tier}: the {DEAREST} dearest tests\n")
    top = sorted(dearest, reverse=True)[:DEAREST]
    print("\n".join(rows("seconds | test", ((f"{seconds:.1f}", name) for seconds, name in top))))
    print(f"### {tier}: minutes per file\n\nOf two tests at a time, each counts in full.\n")
    rest, files = defaultdict(float), []
    for file, seconds in sorted(by_file.items(), key=lambda item: -item[1]):
        if seconds >= SHORT_S:
            files.append((f"{seconds / 60:.2f}", counts[file], f"`{file}`"))
        else:
            rest[str(Path(file).parent)] += seconds
    files += [(f"{s / 60:.2f}", "", f"other files of `{folder}`") for folder, s in rest.items()]
    print("\n".join(rows("minutes | tests | file", files)))
    return failed


def main(reports):
    cores = len(os.sched_getaffinity(0))
    print("# How long the tests take\n\nMade by `tests/tools/durations.py`.")
    print(f"Machine: {cores} cores, {platform.machine()}, Python {platform.python_version()}.\n")
    nightly = [report for report in reports if report.stem.startswith("nightly")]
    others = [report for report in reports if report not in nightly]
    tiers = {"make test, test-ci": others, "make test-nightly": nightly}
    if failed := sum(show(tier, runs) for tier, runs in tiers.items() if runs):
        sys.exit(f"{failed} tests failed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reports", nargs="+", type=Path)
    main(parser.parse_args().reports)
