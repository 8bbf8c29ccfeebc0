# SPDX-License-Identifier: Apache-2.0
"""The advice for slow links: closed forms beside events, and what is printed."""

import json
import math
from itertools import product
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from support.message_twin import bytes_sent
from support.refusals import refuses
from wavemare.cli import app
from wavemare.engine.local_steps.codec import Code
from wavemare.errors import PlanError
from wavemare.parallel.planner.local_steps import (
    Failures,
    Measured,
    SlowLink,
    advise,
    best,
    measured,
    nearest,
    penalty,
)

RESULTS = Path(__file__).parents[3] / "docs" / "results"


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


@pytest.mark.parametrize("mbit", [20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000])
def test_the_advice_hides_messages_and_shows_what_was_measured(mbit):
    link = SlowLink(parameters=124_439_808, replicas=4, mbit=mbit, step_s=1.0)
    advice = advise(link)
    overlap = advice.every // 4
    assert link.local(advice.every, 4, overlap, advice.code) == pytest.approx(1.0)
    assert advice.period_s == pytest.approx(advice.every)
    shown = [line for line in str(advice).splitlines() if line.startswith("  ")]
    assert bool(shown) == advice.pays == (mbit < 10_000)
    for row in advice.losses:
        assert row in measured()
        assert row.message == str(advice.code.bits)
    if advice.pays:
        assert shown[: len(advice.losses)] == [f"  {row}" for row in advice.losses]
        text = "\n".join(shown)
        near = [row for row in advice.losses if 2 / 3 <= row.every / advice.every <= 1.5]
        assert (f'not measured: "every": {advice.every}' in text) == (not near)


def row(**values):
    given = {"optimizer": "AdamW", "every": 32, "message": "32", "fragments": 1, "outer": "1/0.5"}
    given |= {"replicas": 4, "parameters": 10, "training": 100, "losses": (1.0,)}
    return Measured(**{**given, **values, "gaps": tuple(values["gaps"])})


def test_messages_are_compared_within_a_series_each_with_its_best_outer_optimizer():
    exact = row(gaps=[0.10, 0.12])
    worse = row(gaps=[0.30], outer="1/0")
    sparse = row(gaps=[0.13], message="64of4096x2", outer="1/0")
    assert list(best([worse, exact])) == [exact]
    assert penalty("64of4096x2", [exact, worse, sparse]) == pytest.approx(0.02)
    assert penalty("2", [exact, worse, sparse]) is None
    other = row(gaps=[0.05], message="2", parameters=20)  # nothing to compare it with
    assert penalty("2", [exact, other]) is None
    muon = [row(gaps=[gap], optimizer="Muon", message=m) for m, gap in (("32", 0.02), ("2", 0.05))]
    assert penalty("2", [exact, row(gaps=[0.11], message="2"), *muon]) == pytest.approx(0.03)


def test_the_nearest_period_counts_by_its_ratio():
    rows = [row(gaps=[0.1], every=every) for every in (8, 32, 128)]
    for every, expected in ((12, 8), (20, 32), (60, 32), (70, 128), (1000, 128)):
        assert [each.every for each in nearest(every, Code(32), rows)] == [expected]
    assert nearest(32, Code(4), rows) == ()


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
    assert "98.4% if all replicas go back" in text  # a minute of each hour
    assert "99.2% if replicas come and go" in text  # two, the second for its exchange, of four
    assert "goodput" not in plan("--mbit", "200")


def test_numbers_that_cannot_be_are_refused():
    with refuses(PlanError, "restart_s", -1):
        Failures(per_day=1, restart_s=-1, checkpoint_s=1)
    with refuses(PlanError, "replicas", 1):
        SlowLink(parameters=1, replicas=1, mbit=1, step_s=1)
    with refuses(PlanError, "mbit", 0):
        SlowLink(parameters=1, replicas=2, mbit=0, step_s=1)


def test_goodput_of_replicas_that_come_and_go_is_that_of_one_that_is_played():
    random = Random(1)
    for per_day, restart_s, period_s in ((288, 60, 7), (24, 60, 600), (1440, 20, 7), (288, 0, 30)):
        rate, exchanges, kept = per_day / 86_400 / 4, 0, 0
        for _ in range(20_000):  # lives, each of which begins at an exchange
            life = random.expovariate(rate)
            kept += int(life / period_s)
            exchanges += math.ceil((life + restart_s) / period_s)
        failures = Failures(per_day=per_day, restart_s=restart_s, checkpoint_s=0)
        found = failures.elastic_goodput(4, period_s)
        assert found == pytest.approx(kept / exchanges, rel=0.02)


def test_goodput_agrees_with_the_kills_that_were_measured():
    """The formula has no figure for survivors that the machine slows down: that is measured."""
    result = json.loads((RESULTS / "slow-links-elastic.json").read_text())
    rows = {row["system"]: row for row in result["rows"]}
    calm, killed = rows["elastic"], rows["elastic-killed"]
    request = result["request"]
    period_s = request["every"] * killed["median_s"]
    restart_s = killed["back_s"] - period_s / 2 - killed["median_s"]  # without the wait for others
    failures = Failures(per_day=86_400 / request["kill_every"], restart_s=restart_s, checkpoint_s=0)
    found = failures.elastic_goodput(request["replicas"], period_s) * killed["progress"]
    assert calm["median_s"] / killed["median_s"] == pytest.approx(killed["progress"])
    assert found == pytest.approx(killed["goodput"], rel=0.02)
