# SPDX-License-Identifier: Apache-2.0
"""The main job as ``make train`` runs it: minutes long, so it stands under ``make test-all``."""

import json

import pytest


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_the_default_run_ends_below_the_unigram_entropy(command, tmp_path):
    command("wavemare", "train", "gpt", "--output", tmp_path / "run", timeout=1400).check()
    results = json.loads((tmp_path / "run" / "summary.json").read_text())["results"]
    assert results["held_out_loss"] < results["unigram cross-entropy"]
    assert results["bigram cross-entropy"] < results["unigram cross-entropy"]
