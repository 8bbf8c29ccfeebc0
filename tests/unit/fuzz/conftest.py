# SPDX-License-Identifier: Apache-2.0
"""How many examples are drawn: the same few for each change, many others at night."""

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.append(str(Path(__file__).parent))  # of fuzz_strategies

COMMON = settings(
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("fuzz", COMMON, max_examples=40, derandomize=True)
settings.register_profile("fuzz at night", COMMON, max_examples=2_000)
