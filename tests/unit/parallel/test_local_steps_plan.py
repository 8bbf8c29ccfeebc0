# SPDX-License-Identifier: Apache-2.0
"""The advice for slow links: closed forms beside events, and what is printed."""

from itertools import product
from random import Random

import pytest
from typer.testing import CliRunner

from support.message_twin import bytes_sent
from support.refusals import refuses
from wavemare.cli import app
from wavemare.engine.local_steps.codec import Code
from wavemare.errors import PlanError
from wavemare.parallel.planner.local_steps import Failures, SlowLink, advise


def by_events(link, every, fragments, overlap, code, steps=4000):
    """Seconds of a step per second of computation, by playing each message."""
    length = link.messages(code) / fragments
    now = free = 0.0
    due = []
    for step in range(steps):
        now += 1
        for part in range(fragments):
            if (step + part * every // fragments) % every == 0:
                free = max(now, free) + length
                due.append((step + overlap, free))
        while due and due[0][0] <= step:
            now = max(now, due.pop(0)[1])
    return now / steps


@pytest.mark.parametrize("mbit", [20, 200, 2000])
def test_closed_forms_agree_with_events(mbit):
    link = SlowLink(parameters=20_000_000, replicas=4, mbit=mbit, step_s=1.0)
    codes = Code(32), Code(4), Code(2)
    for every, fragments, share, code in product((8, 32), (1, 4), (0, 0.5, 1), codes):
        overlap = int(every / fragments * share)
        expected = by_events(link, every, fragments, overlap, code)
        assert link.local(every, fragments, overlap, code) == pytest.approx(expected, rel=0.02)


def plan(*options):
    words = ["layout", "local-steps", "--model", "gpt2", "--replicas", "4", "--step-seconds", "1"]
    return CliRunner().invoke(app, [*words, *options], catch_exceptions=False).stdout


def test_a_slow_link_gets_a_period_that_hides_its_messages():
    text = plan("--mbit", "200", "--no-zero")
    assert "45.1x with fragments" in plan("--mbit", "200")  # ZeRO gathers: half as much again
    assert "r = 29.87" in text  # 2 * 3 / 4 * 4 bytes * 124.4 M weights / 25 MB/s
    assert '"every": 60, "fragments": 4, "overlap": 15}' in text
    assert "30.2x with fragments" in text
    assert "1187 MiB" in text
    assert "16 % of the loss" in text
    assert '"bits": 4' in plan("--mbit", "100")
    assert '"every": 80, "fragments": 4, "overlap": 20, "bits": 4' in plan("--mbit", "20")


@pytest.mark.parametrize("replicas", [2, 4, 64])
def test_messages_of_few_bits_do_not_grow_with_the_number_of_replicas(replicas):
    link = SlowLink(parameters=26_214_400, replicas=replicas, mbit=100, step_s=1.0)
    for code in (Code(8), Code(4), Code(2)):
        sent = bytes_sent(26_214_400, replicas, 0, code.bits)
        assert link.messages(code) == pytest.approx(sent / 12.5e6, rel=0.02)


def test_a_fast_link_is_advised_against():
    assert plan("--mbit", "20000").endswith(
        "use ordinary data parallelism: local steps would gain too little\n"
    )
    # Half a step more is not worth half as many steps more.
    link = SlowLink(parameters=20_000_000, replicas=2, mbit=1000, step_s=0.65, zero=False)
    assert link.dense > 1.25
    assert not advise(link).pays


def test_goodput_is_that_of_a_job_that_is_played():
    random = Random(1)
    for per_day, restart_s, checkpoint_s in ((24, 60, 600), (288, 100, 900), (24, 0, 7200)):
        time = kept = 0.0
        for _ in range(20_000):  # checkpoints
            while (until := random.expovariate(per_day / 86_400)) < checkpoint_s:
                time += until + restart_s
            time, kept = time + checkpoint_s, kept + checkpoint_s
        failures = Failures(per_day=per_day, restart_s=restart_s, checkpoint_s=checkpoint_s)
        assert failures.goodput == pytest.approx(kept / time, rel=0.02)
    text = plan("--mbit", "200", "--failures-per-day", "24", "--checkpoint-seconds", "0")
    assert "goodput: 98.4%" in text  # a minute of each hour
    assert "goodput" not in plan("--mbit", "200")


def test_numbers_that_cannot_be_are_refused():
    with refuses(PlanError, "restart_s", -1):
        Failures(per_day=1, restart_s=-1, checkpoint_s=1)
    with refuses(PlanError, "replicas", 1):
        SlowLink(parameters=1, replicas=1, mbit=1, step_s=1)
    with refuses(PlanError, "mbit", 0):
        SlowLink(parameters=1, replicas=2, mbit=0, step_s=1)
