# SPDX-License-Identifier: Apache-2.0
"""Clusters as files, and as a short text that names cards of the built-in table."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from wavemare.errors import ConfigError, PlanError, did_you_mean
from wavemare.files import parse_json
from wavemare.parallel.planner.cluster import (
    BETWEEN,
    CARDS,
    DTYPES,
    EFFICIENCY,
    OVERHEAD_S,
    WITHIN,
    Cluster,
    Device,
)
from wavemare.section import Section

logger = logging.getLogger("wavemare")

_SHORT = re.compile(r"(?:(\d{1,9})x)?(\d{1,9})x(.+)", re.IGNORECASE | re.ASCII)
_MOST_DEVICES = 65536
# Times made of these neither overflow nor vanish.
_Positive = Annotated[float, Field(ge=1e-30, le=1e30)]
_NotNegative = Annotated[float, Field(ge=0, le=1e30)]


class _DeviceItem(Section):
    """Devices that are alike; the fields are those of `Device`, and their number."""

    type: str
    count: int = Field(default=1, ge=1)
    node: str = "0"
    tflops: _Positive = 1.0
    efficiency: Annotated[float, Field(ge=1e-30, le=1)] = EFFICIENCY
    memory_gib: _Positive = 1.0
    memory_gb_s: _Positive = 1.0
    overhead_s: _NotNegative = 0.0


class _LinkItem(Section):
    alpha_s: _NotNegative = WITHIN.alpha_s
    bytes_s: _Positive = WITHIN.bytes_s


class _Links(Section):
    within: _LinkItem = _LinkItem()
    between: _LinkItem = _LinkItem()


class _ClusterFile(Section):
    version: Literal[1] = 1
    devices: list[_DeviceItem] = Field(min_length=1)
    links: _Links = _Links()
    measured: dict[str, Any] | None = None


def read_cluster(source: str | Path | Cluster, dtype: str = "fp32") -> Cluster:
    """Return a cluster from a file, or from a text such as ``8xV100,2x4xP100``.

    Args:
        source: A JSON file; or items ``COUNTxTYPE`` (devices of one node) or
            ``NODESxCOUNTxTYPE`` of cards from the built-in table.
        dtype: What computes: fp32, fp16 or bf16. It chooses from the table.

    Raises:
        PlanError: Naming the key that cannot be used.
    """
    if isinstance(source, Cluster):
        return source
    if not isinstance(source, str | os.PathLike):
        reason = "it is neither a cluster nor a file nor a text"
        raise PlanError("cluster", source, reason, "Give one, such as 8xV100,8xP100")
    if dtype not in DTYPES:
        raise PlanError("dtype", dtype, "there is no such dtype", did_you_mean(dtype, DTYPES))
    file = Path(source)
    if file.suffix == ".json" or os.path.isfile(file):  # a long text is no error
        return _from_file(file, dtype)
    return _from_text(str(source), dtype)


def _from_file(file: Path, dtype: str) -> Cluster:
    try:
        values = parse_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        reason = f"it cannot be read ({error.strerror})"
        raise PlanError("--cluster", str(file), reason, "Name a file") from error
    except ValueError as error:
        reason = f"it cannot be read ({error})"
        raise PlanError("--cluster", str(file), reason, "Correct it") from error
    return parse_cluster(values, dtype)


def parse_cluster(values: Any, dtype: str = "fp32") -> Cluster:
    """Return a cluster from a parsed file.

    Raises:
        PlanError: Naming the key that cannot be used.
    """
    if not isinstance(values, dict):
        raise PlanError("cluster", values, "it is no mapping", "Write {...}")
    try:
        content = _ClusterFile.parse(values, "cluster")
    except ConfigError as error:
        raise PlanError(error.key, error.value, error.reason, error.remedy) from None
    devices: list[Device] = []
    for place, item in enumerate(content.devices):
        key = f"cluster.devices[{place}]"
        _check_size(f"{key}.count", item.count, len(devices) + item.count)
        devices += [_device(key, item, dtype)] * item.count
    return Cluster(
        devices=tuple(devices),
        within=replace(WITHIN, **content.links.within.model_dump(exclude_unset=True)),
        between=replace(BETWEEN, **content.links.between.model_dump(exclude_unset=True)),
        measured=content.measured,
    )


def _device(key: str, item: _DeviceItem, dtype: str) -> Device:
    """Return a device of an item of the file; the table has the numbers that it lacks."""
    values = item.model_dump(exclude={"count"}, exclude_unset=True)
    missing = {"tflops", "memory_gib", "memory_gb_s"} - values.keys()
    if missing:
        known = _card(f"{key}.type", item.type, dtype, "0")
        logger.warning("planner: %s: %s from public peak numbers", key, ", ".join(sorted(missing)))
        values |= {name: getattr(known, name) for name in missing}
    return Device(**values)


def _from_text(text: str, dtype: str) -> Cluster:
    devices: list[Device] = []
    nodes = 0
    for item in text.split(","):
        match = _SHORT.fullmatch(item.strip())
        if match is None:
            reason = f"{item.strip()[:40]!r} is neither a file nor COUNTxTYPE nor NODESxCOUNTxTYPE"
            raise PlanError("--cluster", text, reason, "Give a file, or such as 8xV100,8xP100")
        machines, count, name = int(match[1] or 1), int(match[2]), match[3]
        if machines < 1 or count < 1:
            raise PlanError("--cluster", text, f"{item!r} has no device", "Count from 1")
        _check_size("--cluster", text, len(devices) + machines * count)
        for _ in range(machines):
            devices += [_card("--cluster", name, dtype, str(nodes))] * count
            nodes += 1
    logger.warning(
        "planner: %s from public peak numbers at an efficiency of %s and assumed links: "
        "measure the cluster to rely on a plan",
        text,
        EFFICIENCY,
    )
    return Cluster(devices=tuple(devices))


def _card(key: str, name: str, dtype: str, node: str) -> Device:
    card = CARDS.get(name.upper())
    if card is None:
        reason = "the built-in table has no such card"
        raise PlanError(key, name, reason, did_you_mean(name.upper(), CARDS))
    return Device(
        type=name.upper(),
        tflops=card.tflops(dtype),
        memory_gib=card.memory_gib,
        memory_gb_s=card.memory_gb_s,
        node=node,
        overhead_s=OVERHEAD_S,
    )


def _check_size(key: str, value: object, devices: int) -> None:
    if devices > _MOST_DEVICES:
        reason = f"these are {devices} devices"
        raise PlanError(key, value, reason, f"Give at most {_MOST_DEVICES} in all")
