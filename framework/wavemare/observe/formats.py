# SPDX-License-Identifier: Apache-2.0
"""Numbers, sizes and durations as a person reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping

__all__ = [
    "format_byte_parts",
    "format_bytes",
    "format_count",
    "format_duration",
    "format_progress",
]

_THOUSANDS = ("", "k", "M", "G", "T", "P")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def format_count(number: float) -> str:
    """Return a number with three significant digits: ``950``, ``12.3k``, ``1.24M``."""
    return _scaled(number, 1000, _THOUSANDS, separator="")


def format_bytes(number: float) -> str:
    """Return a size in bytes with a binary unit: ``512 B``, ``1.20 GiB``."""
    return _scaled(number, 1024, _BINARY, separator=" ")


def format_byte_parts(parts: Mapping[str, int]) -> str:
    """Return a sum of sizes and its parts in one unit: ``1.2 GiB (weights 0.9, gradients 0.3)``."""
    total = sum(parts.values())
    power = 0
    while total / 1024**power >= 1000 and power < len(_BINARY) - 1:  # noqa: PLR2004
        power += 1
    terms = ", ".join(f"{name} {size / 1024**power:.1f}" for name, size in parts.items())
    return f"{total / 1024**power:.1f} {_BINARY[power]} ({terms})"


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


def format_progress(
    step: int,
    total: int,
    *,
    loss: float | None,
    learning_rate: float | None,
    tokens_per_second: float | None,
    seconds_left: float | None,
) -> str:
    """Return one line on a running training, at most 80 columns wide.

    Args:
        step: Optimizer steps done.
        total: Optimizer steps in all.
        loss: Mean loss of the step; None before the first one is known.
        learning_rate: The optimizer's rate; None if there is none.
        tokens_per_second: Over all ranks; None until it has been measured.
        seconds_left: Until the last step; None until it has been measured.
    """
    width = len(str(total))
    parts = [f"step {step:{width}d}/{total}"]
    parts.append("loss -" if loss is None else f"loss {loss:.4f}")
    if learning_rate is not None:
        parts.append(f"lr {learning_rate:.2e}")
    if tokens_per_second is not None:
        parts.append(f"{format_count(tokens_per_second)} tokens/s")
    if seconds_left is not None and step < total:
        parts.append(f"{format_duration(seconds_left)} left")
    return "  ".join(parts)


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
