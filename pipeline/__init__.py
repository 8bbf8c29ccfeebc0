# SPDX-License-Identifier: Apache-2.0
"""Pipelines and waves as data: plans, their checks and pictures; staleness and what mends it.

In: numbers of stages and micro-batches. Out: plans, which the engines run. Read `plan/plan.py`
first.
"""

if __name__ == "pipeline":  # a second import would duplicate its classes
    raise ImportError("'pipeline' is part of wavemare: import 'wavemare.pipeline' instead")
