# SPDX-License-Identifier: Apache-2.0
"""What memory a rank's data takes does not grow as the text does."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))
from data_memory import measure

MOST_PER_TOKEN = 60
"""Bytes: the tokens themselves, their text, which is mapped, and different pairs of tokens."""


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [
        "rows",
        pytest.param("file", marks=pytest.mark.nightly),
        pytest.param("chats", marks=pytest.mark.nightly),
    ],
)
def test_four_times_the_text_takes_little_more_memory(tmp_path, kind):
    """Encodings or Python objects of all tokens would be 100 bytes for each, and more."""
    found = [
        measure(kind, tokens, tmp_path / str(tokens), names=("build",))["build"]
        for tokens in (700_000, 2_800_000)
    ]
    (few, small), (many, large) = (each.values() for each in found)
    assert many > 3.9 * few
    assert large - small < MOST_PER_TOKEN * (many - few)
