# SPDX-License-Identifier: Apache-2.0
"""Silencing other libraries."""

import logging
import os
import sys
import types

import pytest

from wavemare.observe.quiet import quiet_libraries


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """Begin without settings of the user, and put DeepSpeed's logger back."""
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]})
    logger = logging.getLogger("DeepSpeed")
    filters, level = list(logger.filters), logger.level
    yield
    logger.filters[:] = filters
    logger.setLevel(level)


def test_deepspeed_says_errors_alone_even_if_it_sets_its_level_later():
    logger = logging.getLogger("DeepSpeed")
    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logger.addHandler(handler)
    try:
        quiet_libraries()
        filters = list(logger.filters)
        quiet_libraries()
        assert logger.filters == filters  # no more of them by each call
        logger.setLevel(logging.DEBUG)
        for level in ("debug", "info", "warning", "error"):
            getattr(logger, level)(level)
    finally:
        logger.removeHandler(handler)
    assert seen == ["error"]


def test_loaded_libraries_are_told(monkeypatch):
    told = []
    module = types.SimpleNamespace(
        set_verbosity_error=lambda: told.append("verbosity"),
        disable_progress_bar=lambda: told.append("bar"),
    )
    monkeypatch.setitem(sys.modules, "transformers.utils.logging", module)
    os.environ["TRANSFORMERS_VERBOSITY"] = "debug"
    quiet_libraries()
    assert told == ["verbosity", "bar"]
    assert os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] == "1"
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "debug"  # the user's
