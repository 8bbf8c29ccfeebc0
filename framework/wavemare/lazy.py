# SPDX-License-Identifier: Apache-2.0
"""Names that are looked up late: those of a package at first use, and those of another object."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


class Proxy:
    """Stands for another object, whose attributes it has beside its own."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def at_first_use(package: str, home: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's ``__getattr__``.

    Args:
        package: Its full name.
        home: The module below it that has each name.
    """

    def find(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{home[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return find
