# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys

import pytest

from wavemare import data

PROGRAM = """
import sys
import wavemare.data
wavemare.data.resolve(None)
wavemare.data.TokenStore
print(sorted({"torch", "transformers", "datasets", "tokenizers"} & set(sys.modules)))
"""


def test_the_package_is_cheap_to_import() -> None:
    run = [sys.executable, "-c", PROGRAM]
    assert subprocess.run(run, check=True, capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize("name", data.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(data, name).__name__ == name
    assert name in dir(data)


def test_other_names_do_not_exist() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        data.nothing  # noqa: B018
