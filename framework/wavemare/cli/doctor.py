# SPDX-License-Identifier: Apache-2.0
"""``wavemare doctor``: what this machine has, what is wrong with it and what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from wavemare.cli.checks import Finding

__all__ = ["diagnose", "doctor"]

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    hostfile: Annotated[
        Path | None,
        typer.Option(help="DeepSpeed hostfile: check its lines, and its hosts by ssh."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Check this machine for what keeps a run from starting; nothing is changed.

    The exit code is 1 if a check failed. Warnings do not count.
    """
    findings = list(diagnose(hostfile))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _draw(findings)
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(1)


def diagnose(hostfile: Path | None = None) -> Iterator[Finding]:
    """Run all checks, in the order of the table.

    Args:
        hostfile: A hostfile to check as well.
    """
    from wavemare.cli import checks

    yield from checks.check_versions()
    yield from checks.check_accelerator()
    yield from checks.check_mpi()
    yield from checks.check_launchers()
    yield from checks.check_network()
    yield from checks.check_shared_memory()
    yield from checks.check_extension_locks()
    if hostfile is not None:
        from wavemare.cli.host_checks import check_hostfile

        yield from check_hostfile(hostfile)


def _draw(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(overflow="fold")
    for finding in findings:
        value = Text(finding.value)
        if finding.remedy:
            value.append(f"\n-> {finding.remedy}", style="cyan")
        status = Text(finding.status, style=_STYLES[finding.status])
        table.add_row(status, Text(finding.check), value)
    console = Console(highlight=False)
    console.print(table)
    counts = {name: sum(f.status == name for f in findings) for name in _STYLES}
    console.print(f"\n{counts['ok']} ok, {counts['warn']} warnings, {counts['fail']} failures")
