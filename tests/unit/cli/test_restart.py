# SPDX-License-Identifier: Apache-2.0
"""When a job is started again, where, and what its ranks are told of it."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from wavemare.cli.checks.hostfile import Host
from wavemare.cli.restart import run_with_restarts
from wavemare.engine.launch.restart import COUNT, STARTED, job_started, restart_count
from wavemare.recipes.arguments import JobArguments
from wavemare.recipes.restart import adapt_accumulation, resume_after_restart


@dataclass(frozen=True)
class FakeJob:
    codes: list[int]
    hosts: tuple[Host, ...] = ()
    hostfile: Path | None = None
    attempts: list[dict[str, object]] = field(default_factory=list)

    def run(self, signals):
        names = [host.name for host in self.hosts]
        listed = self.hostfile.read_text() if self.hostfile else None
        self.attempts.append(
            {"count": os.environ[COUNT], "started": os.environ[STARTED], "hosts": names}
            | ({"file": listed} if listed else {})
        )
        code = self.codes.pop(0)
        signals += [code - 1000] if code > 1000 else []  # while the ranks end in some way
        return 1 if code > 1000 else code


@pytest.mark.parametrize(
    ("codes", "restarts", "result", "attempts"),
    [
        ([0], 3, 0, 1),
        ([137, 0], 3, 0, 2),
        ([124, 1, 0], 3, 0, 3),
        ([1, 1, 1, 1], 3, 1, 4),
        ([2], 3, 2, 1),  # a mistake of the user is not made again
        ([127], 3, 127, 1),
        ([1002], 3, 1, 1),  # Ctrl-C
        ([137, 1015], 3, 1, 2),  # a restart, then SIGTERM
        ([143, 0], 3, 0, 2),  # somebody else has ended the ranks
    ],
)
def test_a_job_is_started_again_if_that_may_help(codes, restarts, result, attempts, capfd):
    job = FakeJob(list(codes))
    assert run_with_restarts(job, restarts) == result
    assert len(job.attempts) == attempts
    assert [each["count"] for each in job.attempts] == [str(n) for n in range(attempts)]
    assert len({each["started"] for each in job.attempts}) == 1
    assert capfd.readouterr().err.count(f"of {restarts}") == attempts - 1
    assert COUNT not in os.environ


def test_hosts_that_are_gone_are_left_out(capfd):
    hosts = tuple(Host(name, 2, 1) for name in ("a", "b", "c"))
    job = FakeJob([137, 0], hosts)
    assert run_with_restarts(job, 1, answers=lambda host: host.name != "b") == 0
    assert [each["hosts"] for each in job.attempts] == [["a", "b", "c"], ["a", "c"]]
    assert job.attempts[1]["file"] == "a slots=2\nc slots=2\n"
    assert "left out, as it cannot be logged in to: b" in capfd.readouterr().err


@pytest.mark.parametrize("options", [{}, {"answers": lambda host: False}])
def test_a_job_stays_where_it_is_without_ssh_or_answers(monkeypatch, tmp_path, options):
    monkeypatch.setenv("PATH", str(tmp_path))
    job = FakeJob([137, 0], (Host("a", 1, 1), Host("b", 1, 2)))
    assert run_with_restarts(job, 1, **options) == 0
    assert [each["hosts"] for each in job.attempts] == [["a", "b"]] * 2


def test_the_attempt_is_read_from_either_launcher():
    assert restart_count({}) == 0
    assert restart_count({COUNT: "2"}) == 2
    assert restart_count({"TORCHELASTIC_RESTART_COUNT": "3"}) == 3
    assert restart_count({COUNT: "x"}) == 0
    assert job_started({STARTED: "1000.5"}) == 999.5


@pytest.mark.parametrize(
    ("count", "age", "resumes"), [("1", -50, True), ("0", -50, False), ("1", 50, False)]
)
def test_only_checkpoints_of_the_same_job_are_resumed(tmp_path, monkeypatch, count, age, resumes):
    latest = tmp_path / "checkpoints" / "latest"
    latest.parent.mkdir()
    monkeypatch.setenv(COUNT, count)
    arguments = JobArguments(deepspeed_config="x.json", output=str(tmp_path))
    assert not resume_after_restart(arguments).resume  # before the first checkpoint
    latest.write_text("step-000010")
    monkeypatch.setenv(STARTED, str(latest.stat().st_mtime + age))
    found = resume_after_restart(arguments)
    assert found == replace(arguments, resume=resumes)
    assert found.megatron is arguments.megatron


def test_the_batch_is_accumulated_over_fewer_ranks():
    sizes = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}
    config = {**sizes, "gradient_accumulation_steps": 2}
    adapt_accumulation(config, 3)  # 16 cannot be shared by 3: refused elsewhere
    assert config == {**sizes, "gradient_accumulation_steps": 2}
    adapt_accumulation(config, 1)
    assert config == sizes
