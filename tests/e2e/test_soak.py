# SPDX-License-Identifier: Apache-2.0
"""Three minutes of training under faults; the long version is ``wavemare bench soak``."""

import json

import pytest


@pytest.mark.nightly
@pytest.mark.world_size(2)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("system", ["pipemare", "sparse"])
def test_training_survives_pauses_deaths_and_a_slow_link(command, tmp_path, system):
    options = ["--systems", system, "--minutes", 1.2, "--warmup", 10, "--limit", 0.05]
    options += ["--reference-steps", 120]
    answer = tmp_path / "soak.json"
    command("wavemare", "bench", "soak", *options, "--json", answer, timeout=1100).check()
    (row,) = json.loads(answer.read_text())["rows"]
    assert row["faults"]["kill"] == 1
    assert row["faults"]["pause"] >= 1
    assert row["repeated_steps"] > 0
    assert row["reference_steps"] > 100
    assert row["last_loss"] < row["first_loss"]
