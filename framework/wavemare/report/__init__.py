# SPDX-License-Identifier: Apache-2.0
"""A run, a comparison of runs or a plan as one HTML file that needs nothing else."""

from wavemare.report.parallelism import plan_page
from wavemare.report.runs import RunFacts, read_run
from wavemare.report.sections import run_page

__all__ = ["RunFacts", "plan_page", "read_run", "run_page"]
