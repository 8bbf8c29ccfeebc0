# SPDX-License-Identifier: Apache-2.0
"""What every bad input must lead to: one typed error with key, value, reason and remedy.

Tables have the mistakes that people make; hypothesis draws others (``test_any_*.py``): the same few
for each change, many more at night.
"""

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from wavemare.errors import WavemareError

FOLDER = Path(__file__).parent
sys.path.append(str(FOLDER))  # of fuzz_strategies

LONGEST_MESSAGE = 1500


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
        if config.option.markexpr == "nightly" and item.path.match(f"{FOLDER}/test_any_*.py"):
            item.add_marker("nightly")


def check_message(error, kind, key):
    """Check an error: its class, its key, and that nothing is missing; the wording is free."""
    message = str(error)
    assert type(error) is kind, message
    assert error.key == key, message
    assert error.reason, message
    assert error.remedy, message
    assert not error.reason.endswith("."), message
    assert not error.remedy.endswith("."), message
    assert error.exit_code == 2
    assert message.startswith(f"{key} = "), message
    assert len(repr(error.value)) > 300 or repr(error.value) in message, message
    assert len(message) < LONGEST_MESSAGE, message
    assert "<" not in message or " at 0x" not in message, message  # an object's address


@pytest.fixture
def refused():
    """Call something with bad input and check its error."""

    def check(act, kind, key):
        try:
            act()
        except WavemareError as error:
            error.__traceback__ = error.__context__ = None  # their frames hold open files
            check_message(error, kind, key)
        else:
            pytest.fail("nothing was refused")

    return check


@pytest.fixture
def ended(monkeypatch, capsys):
    """Run a main function on a command line, and return what it says when it ends with code 2."""

    def run(main, *words):
        monkeypatch.setattr(sys, "argv", ["wavemare", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        output = capsys.readouterr()
        said = output.err or output.out  # usage may be told on either
        assert end.value.code == 2, said
        assert "Traceback" not in said
        return said

    return run


@pytest.fixture
def write(tmp_path):
    """Write a file below the test's folder, and return its path."""

    def put(name, content=""):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    return put
