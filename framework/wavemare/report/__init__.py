# SPDX-License-Identifier: Apache-2.0
"""A run, or a comparison of runs, as one HTML file that needs nothing else.

In: the folder of a run. Out: a page. Read `runs.py` first, then `sections.py`.
"""

from wavemare.report.runs import RunFacts, read_run
from wavemare.report.sections import run_page

__all__ = ["RunFacts", "read_run", "run_page"]
