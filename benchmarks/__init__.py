# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: systems side by side in one run, on the same work. Read `request` and `run` first.

Run them from a checkout: ``python -m benchmarks NAME``. In: a request, whose fields are the options
of a benchmark. Out: rows. All systems live in the same processes and take turns, so a slow minute
of the machine slows all of them; but the layouts of ``planner --parts choice`` run one after the
other.
"""
