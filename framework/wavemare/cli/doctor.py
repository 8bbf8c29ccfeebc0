# SPDX-License-Identifier: Apache-2.0
"""``wavemare doctor``: checks of this machine, with a remedy for each problem."""

from __future__ import annotations

import ipaddress
import json
import os
import platform
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from wavemare.cli.job import is_this_host_alone, read_hosts
from wavemare.cli.launch import find_deepspeed
from wavemare.errors import LaunchError
from wavemare.extras import EXTRAS, is_installed

if TYPE_CHECKING:
    from wavemare.comm.mpi_library import MpiInfo

INTERFACE = "GLOO_SOCKET_IFNAME"
_PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "mpi4py")
_CUDA = {True: "CUDA-aware", False: "not CUDA-aware", None: "CUDA support unknown"}
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True)
class Finding:
    """One row of the table.

    Attributes:
        status: ``fail`` if a run cannot work, ``warn`` if a run may behave unexpectedly.
    """

    check: str
    status: Literal["ok", "warn", "fail"]
    value: str
    remedy: str = ""


def doctor(
    hostfile: Annotated[
        Path | None,
        typer.Option(help="DeepSpeed hostfile: check its lines."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Check this machine for problems that keep a run from starting; nothing is changed.

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
    """Run all checks, in the order of the table."""
    yield from check_versions()
    yield from check_accelerator()
    yield from check_mpi()
    yield from check_launchers()
    yield from check_network()
    yield from check_extension_locks()
    if hostfile is not None:
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
    counts = (f"{sum(f.status == name for f in findings)} {name}" for name in _STYLES)
    console.print("\n" + ", ".join(counts))


def check_versions() -> Iterator[Finding]:
    """Check Python and the packages against the requirements of wavemare's own metadata."""
    version, wanted = platform.python_version(), metadata.metadata("wavemare")["Requires-Python"]
    if SpecifierSet(wanted).contains(version, prereleases=True):
        yield Finding("python", "ok", f"{version} ({sys.executable})")
    else:
        yield Finding("python", "fail", version, f"Use Python {wanted}")
    yield Finding("wavemare", "ok", metadata.version("wavemare"))
    requirements = [Requirement(text) for text in metadata.requires("wavemare") or []]
    floors = {item.name: item.specifier for item in requirements if item.marker is None}
    for name in _PACKAGES:
        yield check_version(name, floors.get(name, SpecifierSet()))
    for name, extra in EXTRAS.items():
        if not is_installed(name):
            yield Finding(name, "ok", "not installed; optional", f"pip install 'wavemare[{extra}]'")


def check_version(name: str, wanted: SpecifierSet) -> Finding:
    """Check the version of one package.

    Args:
        name: Its name on PyPI.
        wanted: Versions that work; a local build such as ``2.13.0+cpu`` counts as 2.13.0.
    """
    remedy = f'pip install "{name}{wanted}"'
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, "fail", "not installed", remedy)
    if not wanted.contains(version, prereleases=True):
        return Finding(name, "fail", f"{version}, but {wanted} is needed", remedy)
    return Finding(name, "ok", version)


def check_accelerator() -> Iterator[Finding]:
    """Name the devices that torch sees; a CPU alone is fine."""
    try:
        import torch
    except (ImportError, OSError) as error:
        value = f"torch cannot be imported: {str(error).splitlines()[0]}"
        yield Finding("accelerator", "fail", value, "Reinstall torch")
        return
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        yield Finding("accelerator", "ok", "none, runs use the CPU")
        return
    name = torch.cuda.get_device_name(0) if device.type == "cuda" else device.type
    yield Finding("accelerator", "ok", f"{torch.accelerator.device_count()} x {name}")


def check_mpi(info: MpiInfo | None = None) -> Iterator[Finding]:
    """Check that mpi4py finds a library, and that ``mpirun`` belongs to it."""
    from wavemare.comm.mpi_library import describe_mpi

    info = info or describe_mpi()
    if info.flavour is None:
        remedy = "For mpirun: pip install 'wavemare[mpi]', or use the cluster's own MPI"
        yield Finding("MPI", "ok", f"none ({info.problem}); optional", remedy)
        return
    threads = f"threads: {info.thread_level or 'unknown'}"
    value = f"{info.flavour} {info.version}, {threads}, {_CUDA[info.cuda_aware]}"
    if info.problem is not None:
        remedy = "Reinstall MPI, and check that only one MPI is installed"
        yield Finding("MPI", "warn", f"{value}; {info.problem}", remedy)
    else:
        yield Finding("MPI", "ok", value)
    if not info.launcher_matches:
        value = f"{info.launcher} is {info.launcher_flavour}'s, but mpi4py loads {info.flavour}"
        remedy = (
            f"Put {info.flavour}'s mpirun first in PATH, or set MPI4PY_LIBMPI to the library of "
            f"{info.launcher_flavour}"
        )
        yield Finding("mpirun", "fail", value, remedy)


def check_launchers() -> Iterator[Finding]:
    """Look for the programs that start ranks."""
    try:
        yield Finding("deepspeed launcher", "ok", find_deepspeed())
    except LaunchError as error:
        yield Finding("deepspeed launcher", "fail", error.reason, error.remedy)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    for name, use in (("mpirun", "MPI"), ("srun", "Slurm")):
        found = shutil.which(name, path=path) or f"not found (needed for {use})"
        yield Finding(name, "ok", found)


def check_network() -> Iterator[Finding]:
    """Check where gloo would listen: the interface that the user names, else the host's name."""
    interfaces, chosen = [name for _, name in socket.if_nameindex()], os.environ.get(INTERFACE)
    it_has = f"(it has {', '.join(interfaces)})"
    remedy = f"Name the interface between the hosts: export {INTERFACE}=..."
    if chosen in interfaces:
        yield Finding(INTERFACE, "ok", chosen)
        return
    if chosen:
        yield Finding(INTERFACE, "fail", f"there is no interface {chosen} {it_has}", remedy)
        return
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        yield Finding("host name", "warn", f"the address of {name} is unknown {it_has}", remedy)
        return
    if ipaddress.ip_address(address).is_loopback and interfaces != ["lo"]:
        value = f"{name} leads to {address}, where no other host reaches it {it_has}"
        yield Finding("host name", "warn", value, remedy)
    else:
        yield Finding("host name", "ok", f"{name} is {address}")


def check_extension_locks() -> Iterator[Finding]:
    """Look for locks of torch's builds: a build that was killed makes every later start wait."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(cache) / "torch_extensions")
    # Two levels by default (python and CUDA version, extension), one below TORCH_EXTENSIONS_DIR.
    locks = sorted({*folder.glob("*/lock"), *folder.glob("*/*/lock")})
    if not locks:
        yield Finding("extension locks", "ok", f"none in {folder}")
    for lock in locks:
        age = timedelta(seconds=round(time.time() - lock.stat().st_mtime))
        value = f"{lock} ({age} old): starts wait while it exists"
        remedy = f"If no process builds there: rm {shlex.quote(str(lock))}"
        yield Finding("extension locks", "warn", value, remedy)


def check_hostfile(file: Path) -> Iterator[Finding]:
    """Check the lines of a hostfile, and that the programs that log in to its hosts are here."""
    try:
        hosts = read_hosts(file)
    except LaunchError as error:
        yield Finding("hostfile", "fail", f"{file}: {error.reason}", error.remedy)
        return
    slots = sum(host.slots for host in hosts)
    yield Finding("hostfile", "ok", f"{file}: {len(hosts)} hosts, {slots} ranks")
    if is_this_host_alone(hosts):
        yield Finding(f"host {hosts[0].name}", "ok", "this host: ranks are started without ssh")
        return
    for name in ("ssh", "pdsh"):  # other launchers of DeepSpeed need no pdsh
        found = shutil.which(name)
        missing: Literal["warn", "fail"] = "fail" if name == "ssh" else "warn"
        remedy = "" if found else f"Install {name}, or start the ranks by mpirun"
        yield Finding(name, "ok" if found else missing, found or "not found", remedy)
