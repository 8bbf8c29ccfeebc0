# SPDX-License-Identifier: Apache-2.0
"""What every bad input must lead to: one typed error with key, value, reason and remedy."""

import sys

import pytest

from wavemare.errors import WavemareError

LONGEST_MESSAGE = 1500


def check_message(error, kind, key, said):
    """Check an error: its class, its key, the parts of its message, and that nothing is missing."""
    message = str(error)
    assert type(error) is kind, message
    assert error.key == key, message
    for part in said:
        assert part in message, message
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

    def check(act, kind, key, *said):
        try:
            act()
        except WavemareError as error:
            error.__traceback__ = error.__context__ = None  # their frames hold open files
            check_message(error, kind, key, said)
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
