# SPDX-License-Identifier: Apache-2.0
"""A network of one rank."""

import sys
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parent), str(Path(__file__).parent / "kernels" / "programs")]
from networks import Alone


@pytest.fixture
def alone():
    return Alone()
