# SPDX-License-Identifier: Apache-2.0
"""Numbers, sizes and durations as a person reads them."""

from __future__ import annotations

import math

__all__ = ["format_bytes", "format_count", "format_duration"]

_THOUSANDS = ("", "k", "M", "G", "T", "P")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def format_count(number: float) -> str:
    """Return a number with three significant digits: ``950``, ``12.3k``, ``1.24M``."""
    return _scaled(number, 1000, _THOUSANDS, separator="")


def format_bytes(number: float) -> str:
    """Return a size in bytes with a binary unit: ``512 B``, ``1.20 GiB``."""
    return _scaled(number, 1024, _BINARY, separator=" ")


def format_duration(seconds: float) -> str:
    """Return a duration by its two largest units: ``0.4s``, ``42s``, ``1m 05s``, ``2h 03m``."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 9.95:  # noqa: PLR2004
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole}s"
    if whole < _HOUR:
        return f"{whole // _MINUTE}m {whole % _MINUTE:02d}s"
    if whole < _DAY:
        return f"{whole // _HOUR}h {whole % _HOUR // _MINUTE:02d}m"
    return f"{whole // _DAY}d {whole % _DAY // _HOUR:02d}h"


def _scaled(number: float, base: int, units: tuple[str, ...], *, separator: str) -> str:
    if not math.isfinite(number):
        return "?"
    size, power = abs(number), 0
    # 999.5 would be printed as 1000: it belongs to the next unit.
    while size >= 999.5 and power < len(units) - 1:  # noqa: PLR2004
        size /= base
        power += 1
    whole = power == 0 and float(number).is_integer()
    digits = 0 if whole else max(0, 2 - (len(str(int(size))) - 1))
    sign = "-" if number < 0 else ""
    return f"{sign}{size:.{digits}f}{separator}{units[power]}"
