# SPDX-License-Identifier: Apache-2.0
"""What is shown on the screen."""

from typing import Any

from rich.console import Console

from wavemare.bench.table import result_table, skipped_lines, with_ends

ROW = {
    "system": "no-communication-bound",
    "stages": 2,
    "micro_batches": 1,
    "median_s": 0.0123,
    "ratio": 1.5,
    "ideal": None,
    "bound_fraction": None,
    "waiting": 0.031,
}


def text(result: dict[str, Any]) -> str:
    console = Console(width=80, record=True, quiet=True)
    with console.capture() as capture:
        console.quiet = False
        console.print(result_table(result))
    return capture.get()


def test_full_rows_fit_a_narrow_screen() -> None:
    full = {**ROW, "median_s": 1.2345, "ideal": 2.0, "bound_fraction": 1.0, "busy": 0.971}
    shown = text({"rows": [full], "stage_s": [0.1, 0.3], "imbalance": 0.5})
    (line,) = (line for line in shown.splitlines() if "no-communication-bound" in line)
    assert line.split() == [
        "1",
        "no-communication-bound",
        "1234.5",
        "1.50",
        "2.00",
        "1.000",
        "3.1%",
        "97.1%",
    ]
    headings = ["M", "system", "ms/step", "ratio", "ideal", "bound", "waiting", "busy"]
    assert headings in [line.split() for line in shown.splitlines()]
    assert "100.0, 300.0 ms" in shown
    assert "50.0% above" in shown


def test_columns_that_no_row_fills_are_left_out() -> None:
    result = {"rows": [ROW, {**ROW, "ratio": None}], "stage_s": [0.1, 0.1], "imbalance": 0.0}
    shown = text(result)
    assert "waiting" in shown
    assert "ideal" not in shown
    assert "busy" not in shown
    lines = [line for line in shown.splitlines() if "no-communication-bound" in line]
    assert lines[1].split()[3] == "-"


def test_skipped_systems_are_told() -> None:
    entry = {"system": "torch-1f1b", "stages": 2, "micro_batches": 1, "reason": "too few"}
    assert skipped_lines({"skipped": [entry]}) == ["torch-1f1b at M=1 is left out: too few"]


def test_a_group_ends_where_the_next_row_is_of_another() -> None:
    rows = [{"group": 1}, {"group": 1}, {"group": 2}]
    found = [ends for _, ends in with_ends(rows, lambda row: row["group"])]
    assert found == [False, True, False]  # nothing ends behind the last one
    assert list(with_ends([], lambda row: row)) == []
