# SPDX-License-Identifier: Apache-2.0
"""Each pair of features is refused by name, or a test trains it."""

import json
import tomllib
from itertools import combinations
from pathlib import Path

import pytest

from wavemare.engine.config.resolve import check_config
from wavemare.errors import ConfigError

TABLE = tomllib.loads(Path(__file__).with_name("pairs.toml").read_text())
FEATURES = {name: json.loads(text) for name, text in TABLE["features"].items()}
RANKS = Path(__file__).parents[2] / "multiproc"
# One of a kind is chosen: these are no pairs.
KINDS = [{"ZeRO 1", "ZeRO 2", "ZeRO 3"}, {"1F1B", "ZB-H1", "V", "PipeMare"}, {"bf16", "ZeRO 2"}]
KINDS.append({"bf16", "ZeRO 3"})
PAIRS = [pair for pair in combinations(FEATURES, 2) if not any(set(pair) <= k for k in KINDS)]


def joined(first, second):
    """Return both configurations in one."""
    result = {**first, **second}
    for key in first.keys() & second.keys():
        if isinstance(first[key], dict):
            result[key] = joined(first[key], second[key])
    return result


@pytest.mark.parametrize("pair", PAIRS, ids=", ".join)
def test_a_pair_is_trained_by_a_test_or_refused(pair):
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
    config = joined(config, joined(*(FEATURES[name] for name in pair)))
    test = TABLE["works"].get(", ".join(pair))
    if test is None:
        with pytest.raises(ConfigError) as caught:
            check_config(config, world_size=8)
        assert caught.value.remedy
    else:
        check_config(config, world_size=8)
        file, name = test.split("::")
        assert f"def {name}(" in (RANKS / file).read_text()


def test_no_line_names_another_pair():
    assert set(TABLE["works"]) <= {", ".join(pair) for pair in PAIRS}
