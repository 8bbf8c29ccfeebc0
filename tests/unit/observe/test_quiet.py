# SPDX-License-Identifier: Apache-2.0
"""Silencing other libraries."""

import logging
import sys
import types
from collections.abc import Iterator

import pytest

from wavemare.observe import quiet
from wavemare.observe.quiet import quiet_environment, quiet_libraries


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    environment = {k: v for k, v in quiet.os.environ.items() if k not in quiet._VARIABLES}
    environment.pop("WAVEMARE_VERBOSE", None)
    monkeypatch.setattr(quiet.os, "environ", environment)
    logger = logging.getLogger("DeepSpeed")
    filters, level = list(logger.filters), logger.level
    yield
    logger.filters[:] = filters
    logger.setLevel(level)


def test_deepspeed_says_errors_alone_even_if_it_sets_its_level_later() -> None:
    logger = logging.getLogger("DeepSpeed")
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        quiet_libraries()
        quiet_libraries()
        logger.setLevel(logging.DEBUG)
        for level in ("debug", "info", "warning", "error"):
            getattr(logger, level)(level)
    finally:
        logger.removeHandler(handler)
    assert seen == ["error"]
    assert logger.filters.count(quiet._errors_only) == 1


def test_libraries_that_are_there_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    module = types.SimpleNamespace(
        set_verbosity_error=lambda: told.append("verbosity"),
        disable_progress_bar=lambda: told.append("bar"),
    )
    monkeypatch.setitem(sys.modules, "transformers.utils.logging", module)
    quiet_libraries()
    assert told == ["verbosity", "bar"]
    assert quiet.os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] == "1"


def test_user_settings_win(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet.os.environ["TRANSFORMERS_VERBOSITY"] = "debug"
    quiet_libraries()
    assert quiet.os.environ["TRANSFORMERS_VERBOSITY"] == "debug"


def test_verbose_changes_nothing() -> None:
    quiet.os.environ["WAVEMARE_VERBOSE"] = "1"
    before = dict(quiet.os.environ)
    filters = list(logging.getLogger("DeepSpeed").filters)
    quiet_libraries()
    assert quiet_environment() == {}
    assert quiet.os.environ == before
    assert logging.getLogger("DeepSpeed").filters == filters
