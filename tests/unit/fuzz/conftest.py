# SPDX-License-Identifier: Apache-2.0
"""How many examples are drawn: the same few for each change, many others at night."""

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

FOLDER = Path(__file__).parent
sys.path.append(str(FOLDER))  # of fuzz_strategies


def pytest_configure(config):
    night = config.option.markexpr == "nightly"
    settings.register_profile(
        "fuzz",
        database=None,
        deadline=None,
        derandomize=not night,
        max_examples=2_000 if night else 40,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


@pytest.hookimpl(tryfirst=True)  # before marks choose
def pytest_collection_modifyitems(config, items):
    for item in items:
        if config.option.markexpr == "nightly" and FOLDER in item.path.parents:
            item.add_marker("nightly")
