# SPDX-License-Identifier: Apache-2.0
"""``wavemare launch``, and a program as ranks: on this host, or by DeepSpeed's launcher on several.

The supervisor starts and watches either.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer

from wavemare.cli import launch
from wavemare.cli.supervisor import Command, supervise, supervise_replicas
from wavemare.engine.launch.environment import (
    JOB_STARTED,
    LIGHTHOUSE,
    MAX_RESTARTS,
    REPLICA,
    RESTART_COUNT,
    free_port,
)
from wavemare.errors import ConfigError, LaunchError, os_errors
from wavemare.extras import require

# Prefixes of the variables that are passed on to other hosts.
_PASSED_ON = (
    "DS_",
    "GLOO_",
    "HF_",
    "NCCL_",
    "OMP_",
    "TORCH_",
    "TORCHELASTIC_",
    "TP_",
    "UCX_",
    "WAVEMARE_",
)
_ENVIRONMENT_FILE = "DS_ENV_FILE"
_WITHOUT_DEVICES = 2
_RESTARTS = 100
# A replica that does not come to a meeting is waited for by join_timeout at most, unless its
# process is dead, which is known after heartbeat_timeout.
_LIGHTHOUSE = (
    *("--min_replicas", "1", "--join_timeout_ms", "60000", "--heartbeat_timeout_ms", "3000"),
    *("--quorum_tick_ms", "20"),
)
_PORT_OPTION = "--master_port"
_PORTS = 1 << 16
_CHOOSE_DEVICES = {"-i", "--include", "-e", "--exclude", "--num_gpus", "--num_accelerators"}
_NAME_HOSTS = {"-H", "--hostfile"}
_LINE = re.compile(r"^(\S+)\s+slots=(\d{1,9})(?!\d)(?P<rest>.*)$")
_REMEDY = "Write 'HOST slots=N', N being the number of ranks on that host"


@dataclass(frozen=True)
class Host:
    """A line of a hostfile."""

    name: str
    slots: int


def read_hosts(file: Path | None) -> list[Host]:
    """Return the hosts of a hostfile; none without a file.

    DeepSpeed itself would run on this host alone if the file does not exist.

    Raises:
        LaunchError: The file cannot be read, or a line is wrong.
    """
    if file is None:
        return []
    remedy = "Name an existing file"
    with os_errors(LaunchError, "--hostfile", str(file), "it cannot be read", remedy):
        text = file.read_text(encoding="utf-8", errors="backslashreplace")
    return parse_hostfile(text, str(file))


def parse_hostfile(text: str, file: str = "") -> list[Host]:
    """Read a hostfile as DeepSpeed does, but refuse what DeepSpeed would ignore.

    Raises:
        LaunchError: A line is wrong, or there is no host.
    """
    if text.startswith("\ufeff"):
        reason = "it begins with a byte order mark, which deepspeed takes for a host's name"
        raise LaunchError("--hostfile", file, reason, "Save it as UTF-8 without the mark")
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        problem, remedy = None, _REMEDY
        match = _LINE.match(entry)
        if match is None:
            problem = f"{entry[:80]!r} is not a host with its slots"
        elif match["rest"] and not match["rest"].lstrip().startswith("#"):
            problem, remedy = f"deepspeed ignores {match['rest'].strip()!r}", "Remove it"
        elif int(match[2]) == 0:
            problem = f"{match[1]} has no slots"
        elif match[1] in hosts:
            problem, remedy = f"{match[1]} is listed twice", "Join the two lines"
        if match is None or problem is not None:
            raise LaunchError("--hostfile", file, f"line {number}: {problem}", remedy)
        hosts[match[1]] = Host(match[1], int(match[2]))
    if not hosts:
        raise LaunchError("--hostfile", file, "it names no host", _REMEDY)
    return list(hosts.values())


def is_this_host_alone(hosts: Sequence[Host]) -> bool:
    """Whether a hostfile names only this host, where ranks start without ssh."""
    here = ("localhost", "127.0.0.1", socket.gethostname())
    return len(hosts) == 1 and hosts[0].name in here


@dataclass(frozen=True, kw_only=True)
class Job:
    """A program that is to run as several ranks.

    Attributes:
        num_processes: On this host, or each of several; None for a hostfile's slots, or on this
            host one for each GPU, or 2 without GPUs.
        hosts: Hosts of a hostfile; empty for this host alone.
        launcher_options: More options of ``deepspeed``; they take precedence.
    """

    program: str
    options: Sequence[str] = ()
    module: bool = False
    num_processes: int | None = None
    hosts: Sequence[Host] = ()
    hostfile: Path | None = None
    launcher_options: Sequence[str] = field(default=())
    max_restarts: int = 0

    @property
    def chooses_devices(self) -> bool:
        """Whether options of the launcher say which devices are used, and so how many ranks."""
        return bool(self._given_options() & _CHOOSE_DEVICES)

    def processes(self) -> int | None:
        """Return the number of ranks on all hosts; None where options of the launcher decide it."""
        if self.chooses_devices or self._given_options() & _NAME_HOSTS:
            return None
        return self._count()

    def command(self) -> list[str]:
        """Return the words of DeepSpeed's launcher that start the job.

        Raises:
            LaunchError: The launcher is not installed.
        """
        options = list(self.launcher_options)
        if self.hostfile is not None:
            options = ["--hostfile", str(self.hostfile), *self._options_of_one_host(), *options]
        program, words = self.program, list(self.options)
        if self._by_pdsh():
            program = _through_pdsh(shlex.quote(program))
            words = [_as_pdsh_takes(word) for word in words]
        # The launcher would report the end of its children as an error, below their own message.
        # Launchers of torch and MPI give the rank in the environment alone.
        options = ["--log_level", "critical", "--no_local_rank", *options]
        count = self.num_processes or (None if self.hosts else self.processes())
        # A second run on this host would fail with the default port.
        if _PORT_OPTION not in self._given_options():
            options = [_PORT_OPTION, str(_port()), *options]
        if count is not None and not self.chooses_devices:
            options = ["--num_accelerators", str(count), *options]
        module = ["--module"] * self.module
        return [launch.find_deepspeed(), *options, *module, program, *words]

    def run(self) -> int:
        """Run the job to its end, and return an exit code as `supervise` does."""
        variables = launch.extra_environment()
        if self.max_restarts:  # by the names of torchrun, which restarts ranks as well
            variables[MAX_RESTARTS] = str(self.max_restarts)
            variables[JOB_STARTED] = str(time.time())
        if not self.launcher_options and (not self.hosts or is_this_host_alone(self.hosts)):
            return supervise(
                lambda attempt: self._ranks(variables | {RESTART_COUNT: str(attempt)}),
                self.max_restarts,
            )
        for name in ("ssh", "pdsh") if self._by_pdsh() else ():
            if shutil.which(name) is None:
                reason = f"{name} is not installed"
                raise LaunchError("--hostfile", str(self.hostfile), reason, f"Install {name}")
        with tempfile.NamedTemporaryFile("w", prefix="wavemare-environment-") as file:

            def launcher(attempt: int) -> list[Command]:
                exported = variables | {RESTART_COUNT: str(attempt)}
                if self.hosts:
                    write_environment(file.name, {**os.environ, **exported}, pdsh=self._by_pdsh())
                    exported[_ENVIRONMENT_FILE] = file.name
                return [Command(self.command(), exported, is_launcher=True)]

            return supervise(launcher, self.max_restarts)

    def run_replicas(self, count: int) -> int:
        """Run the job as so many replicas, with a lighthouse; see `supervise_replicas`.

        Raises:
            ConfigError: There are options for several hosts.
            LaunchError: torchft is not installed.
        """
        if self.hosts or self.launcher_options:
            reason = "the replicas of one command run on this host"
            remedy = "Leave out --hostfile and --launcher-args, and start one job per host"
            raise ConfigError("--replicas", count, reason, remedy)
        require("torchft", "--replicas")
        port = free_port()
        lighthouse = [launch.find_script("torchft_lighthouse", "torchft"), *_LIGHTHOUSE]
        lighthouse += ["--bind", f"[::]:{port}"]
        variables = launch.extra_environment() | {LIGHTHOUSE: f"http://localhost:{port}"}
        devices = 0 if "CUDA_VISIBLE_DEVICES" in os.environ else launch.device_count()
        each = self.num_processes or max(devices // count, 1)
        job = replace(self, num_processes=each)

        def replica(number: int) -> list[Command]:
            own = variables | {REPLICA: str(number)}
            if devices:
                first = number * each
                own["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(first, first + each)))
            return job._ranks(own, free_port())

        server = Command(lighthouse, {"RUST_LOG": os.environ.get("RUST_LOG", "error")})
        return supervise_replicas(server, replica, count, self.max_restarts)

    def _ranks(self, variables: Mapping[str, str], port: int | None = None) -> list[Command]:
        """Return the ranks of this host, with the variables that DeepSpeed and torchrun set."""
        count, module = self._count(), ["-m"] * self.module
        size = str(count)
        words = [sys.executable, "-u", *module, self.program, *self.options]
        variables = {
            **variables,
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or _port())},
            **{"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "LOCAL_SIZE": size},
            **{"CROSS_RANK": "0", "CROSS_SIZE": "1"},
        }
        ranks = map(str, range(count))
        return [Command(words, {**variables, "RANK": r, "LOCAL_RANK": r}) for r in ranks]

    def _count(self) -> int:
        if self.hosts:
            return sum(self.num_processes or host.slots for host in self.hosts)
        return self.num_processes or launch.device_count() or _WITHOUT_DEVICES

    def _given_options(self) -> set[str]:
        return {option.split("=")[0] for option in self.launcher_options}

    def _options_of_one_host(self) -> list[str]:
        if is_this_host_alone(self.hosts):
            # DeepSpeed would log in to this host, though it starts the ranks without.
            return ["--no_ssh_check", "--master_addr", "127.0.0.1"]
        # DeepSpeed would take a single host for this one, whatever its name.
        return ["--force_multi"] if len(self.hosts) == 1 else []

    def _by_pdsh(self) -> bool:
        """Whether DeepSpeed passes the program and its options as one text to remote shells."""
        remote = bool(self.hosts) and not is_this_host_alone(self.hosts)
        return remote and "--launcher" not in self._given_options()


def _port() -> int:
    """Return ``MASTER_PORT``, if it is set, else a free port.

    Raises:
        LaunchError: It is no port.
    """
    given = os.environ.get("MASTER_PORT")
    if not given:
        return free_port()
    if not (given.isascii() and given.isdecimal() and 0 < int(given[:6]) < _PORTS):
        remedy = "Give a number from 1 to 65535, or unset it"
        raise LaunchError("MASTER_PORT", given, "this is no port", remedy)
    return int(given)


def split_options(text: str) -> list[str]:
    """Return the words of ``--launcher-args``.

    Raises:
        ConfigError: A quote is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        reason = f"its quotes are not closed ({error})"
        raise ConfigError("--launcher-args", text, reason, "Close them") from None


def _as_pdsh_takes(word: str) -> str:
    """Quote a word for DeepSpeed, pdsh and the remote shell, which then reads it unchanged.

    DeepSpeed puts words with a blank in double quotes and escapes double quotes in them.
    """
    quoted = re.sub(r"[\\$`]", r"\\\g<0>", word) if " " in word else shlex.quote(word)
    return _through_pdsh(quoted)


def _in_double_quotes(value: str) -> str:
    """Return a value for the double quotes in which DeepSpeed puts unusual values."""
    return _through_pdsh(re.sub(r'[\\"$`]', r"\\\g<0>", value))


def _through_pdsh(text: str) -> str:
    """Escape the %h, %n, %u and %% that pdsh replaces."""
    return text.replace("%", "%%")


def write_environment(file: str, variables: Mapping[str, str], *, pdsh: bool = True) -> None:
    """Write the variables that DeepSpeed exports on other hosts; the user's own file wins.

    Values of several lines are left out.
    """
    name = variables.get(_ENVIRONMENT_FILE, ".deepspeed_env")
    lines = [
        f"{name}={_in_double_quotes(variables[name]) if pdsh else variables[name]}"
        for name in sorted(variables)
        if name.startswith(_PASSED_ON) and name != _ENVIRONMENT_FILE and "\n" not in variables[name]
    ]
    for folder in (Path.home(), Path()):  # in DeepSpeed's order
        if (folder / name).is_file():
            lines += (folder / name).read_text("utf-8-sig", "surrogateescape").splitlines()
    text = "".join(f"{line}\n" for line in lines if "=" in line)
    Path(file).write_text(text, "utf-8", "surrogateescape")


Nproc = Annotated[
    int | None,
    typer.Option(
        "--nproc", min=1, help="Processes on each host. (Default: slots, or one per GPU, or 2.)"
    ),
]
Hostfile = Annotated[Path | None, typer.Option(help="DeepSpeed hostfile: run on its hosts.")]
LauncherArguments = Annotated[
    str, typer.Option(help="More options of deepspeed, as one quoted text.")
]
PrintCommand = Annotated[
    bool, typer.Option("--print-command", help="Show the command of deepspeed, and leave.")
]


def launch_script(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="Python script, with its options after it.")],
    nproc: Nproc = None,
    hostfile: Hostfile = None,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a Python module.")
    ] = False,
    launcher_args: LauncherArguments = "",
    replicas: Annotated[
        int | None,
        typer.Option(
            min=2, help="Replicas of local steps that come and go, of NPROC processes each."
        ),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="How often each of the REPLICAS starts again, or this job if it is the replica "
            "WAVEMARE_REPLICA. (Default: 100, and 0.)",
        ),
    ] = None,
    print_command: PrintCommand = False,
) -> None:
    """Run a script as several ranks; the first error is the last line, with the right exit code.

    For example: wavemare launch --nproc 4 train.py --epochs 3

    With --replicas, torchft's lighthouse runs as well, and a replica that fails starts again. With
    --max-restarts, so does a job that is one of several machines' replicas.

    Unlike the launchers themselves it fails if the hostfile is wrong or a rank is killed.
    """
    # The script may exist on the other hosts alone.
    elsewhere = module or print_command or hostfile is not None
    if script.startswith("-") or not (elsewhere or Path(script).is_file()):
        reason = "there is no such file or option"
        raise LaunchError("SCRIPT", script, reason, "Name a Python script, or a module with -m")
    restarts = max_restarts
    if restarts is None:
        restarts = 0 if replicas is None else _RESTARTS
    job = Job(
        program=script,
        options=context.args,
        module=module,
        num_processes=nproc,
        hosts=read_hosts(hostfile),
        hostfile=hostfile,
        launcher_options=split_options(launcher_args),
        max_restarts=restarts,
    )
    if replicas is None and max_restarts is not None and REPLICA not in os.environ:
        reason = "only replicas start again by themselves"
        remedy = "Use torchrun --max-restarts, or set WAVEMARE_REPLICA if this is a replica"
        raise ConfigError("--max-restarts", max_restarts, reason, remedy)
    if replicas is not None:
        raise typer.Exit(job.run_replicas(replicas))
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
