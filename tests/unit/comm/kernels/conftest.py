# SPDX-License-Identifier: Apache-2.0
"""Lets the tests import the cases that they share with programs."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "programs"))
