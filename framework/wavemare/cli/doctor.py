# SPDX-License-Identifier: Apache-2.0
"""``wavemare doctor``: what this machine has, what is wrong with it and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from wavemare.cli.checks.finding import Finding

__all__ = ["diagnose", "doctor"]

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    hostfile: Annotated[
        Path | None,
        typer.Option(help="DeepSpeed hostfile: check its lines, and its hosts by ssh."),
    ] = None,
    master_port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, help="Port of rank 0, to be free on the hostfile's first host."
        ),
    ] = 29500,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Check this machine for what keeps a run from starting; nothing is changed.

    The exit code is 1 if a check failed. Warnings do not count.
    """
    findings = diagnose(hostfile, master_port)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _draw(findings)
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(1)


def diagnose(hostfile: Path | None = None, master_port: int = 0) -> list[Finding]:
    """Run all checks, in the order of the table.

    Args:
        hostfile: A hostfile to check as well.
        master_port: To be free on its first host; 0 if it does not matter.
    """
    from wavemare.cli.checks import hostfile as hosts
    from wavemare.cli.checks import machine, mpi, network, software

    checks: list[Callable[[], Iterable[Finding]]] = [
        software.check_python,
        software.check_packages,
        software.check_accelerator,
        software.check_compiler,
        mpi.check_mpi,
        machine.check_launchers,
        network.check_loopback,
        network.check_hostname,
        network.check_interface_variables,
        machine.check_extension_locks,
        machine.check_shared_memory,
        machine.check_descriptors,
    ]
    if hostfile is not None:
        checks.append(partial(hosts.check_hostfile, hostfile, master_port))
    return list(_run(checks))


def _run(checks: Sequence[Callable[[], Iterable[Finding]]]) -> Iterator[Finding]:
    for check in checks:
        yield from check()


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
