# SPDX-License-Identifier: Apache-2.0
"""What a run shows of itself below its progress line, in words."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import shorten

from wavemare.observe.formats import format_bytes

__all__ = ["live_facts", "numbered"]

_CALLS = "sparse_calls_"


def live_facts(
    metrics: Mapping[str, float],
    *,
    memory_bytes: int | None = None,
    warnings: int = 0,
    latest: str = "",
) -> dict[str, str]:
    """Return the newest figures by subject; subjects that a run does not have are left out.

    Args:
        metrics: What the engine's ``step_metrics`` tells.
        memory_bytes: Of this rank; None if it is not known.
        warnings: How many there were on this rank.
        latest: The text of the latest one.
    """
    facts = {"pipeline": _pipeline(metrics), "collective": _collective(metrics)}
    if memory_bytes is not None:
        facts["memory"] = f"{format_bytes(memory_bytes)} on rank 0"
    if warnings:
        facts["warnings"] = f"{warnings}, the latest: {shorten(latest, 80)}"
    return {subject: text for subject, text in facts.items() if text}


def numbered(metrics: Mapping[str, float], name: str) -> dict[int, float]:
    """Return the values of ``NAME_0``, ``NAME_1``, ... by their number, in its order."""
    found = {
        int(key.removeprefix(f"{name}_")): value
        for key, value in metrics.items()
        if key.startswith(f"{name}_") and key.removeprefix(f"{name}_").isdecimal()
    }
    return dict(sorted(found.items()))


def _pipeline(metrics: Mapping[str, float]) -> str:
    parts = []
    if "bubble" in metrics:
        explained = metrics.get("bubble_predicted")
        share = "" if explained is None else f" ({explained:.0%} by unevenness)"
        parts.append(f"idle {metrics['bubble']:.0%}{share}")
    stale = numbered(metrics, "staleness")
    if stale:
        parts.append(f"staleness {' '.join(f'{value:.3g}' for value in stale.values())}")
    return ", ".join(parts)


def _collective(metrics: Mapping[str, float]) -> str:
    parts = []
    if "sparse_density" in metrics:
        parts.append(f"density {metrics['sparse_density']:.2%}")
    for way in ("up", "down"):
        if f"sparse_bytes_{way}" in metrics:
            parts.append(f"{way} {format_bytes(metrics[f'sparse_bytes_{way}'])}")
    parts += [
        f"{key.removeprefix(_CALLS)} x{count:.0f}"
        for key, count in sorted(metrics.items())
        if key.startswith(_CALLS)
    ]
    return ", ".join(parts)
