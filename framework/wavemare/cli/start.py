"""``wavemare launch``: any script as ranks, on this host or those of a hostfile."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["launch_script", "show"]


def launch_script(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="Python script, with its options after it.")],
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", min=1, help="Processes on each host. (Default: slots, or 2.)"),
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="DeepSpeed hostfile: run on its hosts.")
    ] = None,
    launcher: Annotated[
        str, typer.Option(help="deepspeed (several hosts: by pdsh) or mpirun.")
    ] = "deepspeed",
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a Python module.")
    ] = False,
    launcher_args: Annotated[
        str, typer.Option(help="More options of the launcher, as one quoted text.")
    ] = "",
    print_command: Annotated[
        bool, typer.Option("--print-command", help="Show the command and leave.")
    ] = False,
) -> None:
    """Run a script as several ranks; the exit code is right, and the first error the last line.

    For example: wavemare launch --nproc 4 train.py --epochs 3

    Unlike the launchers by themselves it fails if the hostfile is wrong or a rank is killed.
    """
    from wavemare.cli.job import Job, check_launcher, read_hosts, split_options

    job = Job(
        program=script,
        options=context.args,
        module=module,
        num_processes=nproc,
        hosts=read_hosts(hostfile),
        hostfile=hostfile,
        launcher=check_launcher(launcher),
        launcher_options=split_options(launcher_args),
    )
    if print_command:
        show(job.command(), job.variables())
        return
    raise typer.Exit(job.run())


def show(command: list[str], variables: dict[str, str]) -> None:
    """Print a command as a shell takes it."""
    assignments = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    typer.echo(" ".join([*assignments, shlex.join(command)]))
