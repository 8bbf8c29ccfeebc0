# SPDX-License-Identifier: Apache-2.0
"""What a test asks of a refusal: its class, its key, and its value. The wording is free."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from wavemare.errors import WavemareError

ANY: Any = object()
"""A value that a test does not look at."""


@contextmanager
def refuses(
    kind: type[WavemareError] | tuple[type[WavemareError], ...], key: str, value: Any = ANY
) -> Iterator[pytest.ExceptionInfo[WavemareError]]:
    """Expect an error of this kind that names this key and value, with a reason and a remedy.

    Args:
        kind: The class of the error, or several.
        key: The key that it names.
        value: The value that it names, or `ANY`.

    Yields:
        What has caught the error, as `pytest.raises` does.
    """
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert error.key == key, error
    assert value is ANY or error.value == value, error
    assert error.reason, error
    assert error.remedy, error
