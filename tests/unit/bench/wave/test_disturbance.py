# SPDX-License-Identifier: Apache-2.0
"""Steps that other programs disturb are told from those that they leave alone."""

from typing import Any

import pytest
import torch.distributed as dist

from wavemare.bench.wave import disturbance
from wavemare.bench.wave.disturbance import Patience, Usage, others_share


def test_what_the_ranks_use_is_no_disturbance() -> None:
    before, after = Usage(0.0, 100.0, 0.0), Usage(2.0, 103.8, 1.8)
    assert others_share(before, after, own_s=3.6, cores=2) == pytest.approx(0.05)
    # Clocks of processes are finer than the machine's.
    assert others_share(before, after, own_s=4.0, cores=2) == 0.0


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Usage]:
    """What the only rank of a machine with two cores sees, one after the other."""
    rows: list[Usage] = []
    monkeypatch.setattr(disturbance.Usage, "now", classmethod(lambda cls: rows.pop(0)))
    monkeypatch.setattr(disturbance.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(disturbance.psutil, "cpu_count", lambda: 2)
    for name in ("all_reduce", "barrier"):
        monkeypatch.setattr(dist, name, lambda *arguments, **options: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    return rows


def test_a_disturbed_step_is_repeated_when_the_machine_is_idle(looks: Any) -> None:
    step = [Usage(0.0, 0.0, 0.0), Usage(1.0, 1.5, 1.0)]
    busy, idle = Usage(2.0, 2.5, 1.0), Usage(3.0, 2.5, 1.0)
    looks += [*step, step[1], busy, busy, idle]
    patience = Patience(1000)
    patience.begin()
    assert not patience.accepts()
    assert looks == []
    looks += [Usage(3.0, 2.5, 1.0), Usage(4.0, 3.5, 2.0)]
    patience.begin()
    assert patience.accepts()
    assert (patience.repeated, patience.disturbed) == (1, 0)


def test_without_patience_a_disturbed_step_counts(looks: Any) -> None:
    looks += [Usage(0.0, 0.0, 0.0), Usage(1.0, 1.5, 1.0)]
    patience = Patience(0)
    patience.begin()
    assert patience.accepts()
    assert (patience.repeated, patience.disturbed) == (0, 1)
