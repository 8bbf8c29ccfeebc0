# SPDX-License-Identifier: Apache-2.0
"""``wavemare launch``: any script as ranks, on this host or those of a hostfile."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from wavemare.cli import launch
from wavemare.cli.job import Job, read_hosts, split_options
from wavemare.errors import LaunchError

Nproc = Annotated[
    int | None,
    typer.Option("--nproc", min=1, help="Processes on each host. (Default: slots, or 2.)"),
]
Hostfile = Annotated[Path | None, typer.Option(help="DeepSpeed hostfile: run on its hosts.")]
LauncherArguments = Annotated[
    str, typer.Option(help="More options of deepspeed, as one quoted text.")
]
PrintCommand = Annotated[bool, typer.Option("--print-command", help="Show the command and leave.")]


def launch_script(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="Python script, with its options after it.")],
    nproc: Nproc = None,
    hostfile: Hostfile = None,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a Python module.")
    ] = False,
    launcher_args: LauncherArguments = "",
    print_command: PrintCommand = False,
) -> None:
    """Run a script as several ranks; the first error is the last line, with the right exit code.

    For example: wavemare launch --nproc 4 train.py --epochs 3

    Unlike the launchers themselves it fails if the hostfile is wrong or a rank is killed.
    """
    # The script may exist on the other hosts alone.
    elsewhere = module or print_command or hostfile is not None
    if script.startswith("-") or not (elsewhere or Path(script).is_file()):
        reason = "there is no such file or option"
        raise LaunchError("SCRIPT", script, reason, "Name a Python script, or a module with -m")
    job = Job(
        program=script,
        options=context.args,
        module=module,
        num_processes=nproc,
        hosts=read_hosts(hostfile),
        hostfile=hostfile,
        launcher_options=split_options(launcher_args),
    )
    start(job, print_command=print_command)


def start(job: Job, *, print_command: bool) -> None:
    """Run a job to its end, and leave with its exit code; or print its command for a shell.

    Raises:
        LaunchError: The launcher cannot be used.
    """
    if not print_command:
        raise typer.Exit(job.run())
    assignments = [
        f"{name}={shlex.quote(value)}" for name, value in launch.extra_environment().items()
    ]
    typer.echo(" ".join([*assignments, shlex.join(job.command())]))
