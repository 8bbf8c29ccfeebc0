# SPDX-License-Identifier: Apache-2.0
"""There are enough cases, and no two of them are the same."""

import importlib.util
from pathlib import Path

import pytest

LEAST = 150
ROW = type(pytest.param())


def tables():
    """Yield the tables of all files of this folder: name and rows."""
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        if file.name == Path(__file__).name:
            continue
        specification = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        for name, value in vars(module).items():
            if name.isupper() and isinstance(value, list) and isinstance(value[0], ROW):
                yield f"{file.stem}.{name}", value


def test_there_are_at_least_as_many_cases_as_are_promised():
    counts = {name: len(rows) for name, rows in tables()}
    assert sum(counts.values()) >= LEAST, counts
    assert len(counts) >= 10


def test_each_case_has_a_name_of_its_own_and_an_input_of_its_own():
    for name, rows in tables():
        identities = [row.id for row in rows]
        assert all(identities), name
        assert len(set(identities)) == len(rows), name
        inputs = [repr(row.values) for row in rows]
        assert len(set(inputs)) == len(rows), name
