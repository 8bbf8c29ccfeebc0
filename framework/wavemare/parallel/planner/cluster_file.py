# SPDX-License-Identifier: Apache-2.0
"""Clusters as files, and as a short text that names cards of the built-in table."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

from wavemare.errors import PlanError, did_you_mean
from wavemare.json_text import parse_json
from wavemare.parallel.planner.cluster import (
    BETWEEN,
    CARDS,
    DTYPES,
    EFFICIENCY,
    OVERHEAD_S,
    VERSION,
    WITHIN,
    Cluster,
    Device,
    Link,
)

__all__ = ["parse_cluster", "read_cluster"]

logger = logging.getLogger("wavemare")

_SHORT = re.compile(r"(?:(\d{1,9})x)?(\d{1,9})x(.+)", re.IGNORECASE | re.ASCII)
_LINK_KEYS = {"alpha_s", "bytes_s"}
_PAIR = 2
_MOST_DEVICES = 65536
_SMALLEST, _LARGEST = 1e-30, 1e30  # times made of these neither overflow nor vanish


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
    _check_keys("cluster", values, {"version", "devices", "links", "measured"}, {"devices"})
    version = values.get("version", VERSION)
    if version != VERSION:
        reason = f"this program reads version {VERSION}"
        raise PlanError("version", version, reason, "Describe or measure the cluster again")
    listed = values["devices"]
    if not isinstance(listed, list) or not listed:
        raise PlanError("devices", listed, "it is no list of devices", "List one or more")
    devices: list[Device] = []
    for place, item in enumerate(listed):
        alike, count = _devices(place, item, dtype)
        _check_size(f"devices[{place}].count", count, len(devices) + count)
        devices += [alike] * count
    links = values.get("links", {})
    _check_keys("links", links, {"within", "between", "pairs"}, set())
    pairs = {}
    listed = links.get("pairs", [])
    if not isinstance(listed, list):
        raise PlanError("links.pairs", listed, "it is no list", "Write [{...}, ...]")
    for place, item in enumerate(listed):
        key = f"links.pairs[{place}]"
        _check_keys(key, item, {"nodes", *_LINK_KEYS}, {"nodes", *_LINK_KEYS})
        nodes = item["nodes"]
        known = {device.node for device in devices}
        is_pair = isinstance(nodes, list) and len(nodes) == _PAIR
        if not is_pair or not all(isinstance(node, str) and node in known for node in nodes):
            reason = "it is no pair of the nodes of the devices"
            raise PlanError(f"{key}.nodes", nodes, reason, "Give two names of nodes")
        low, high = sorted(nodes)
        pairs[low, high] = _link(key, {k: v for k, v in item.items() if k != "nodes"}, WITHIN)
    return Cluster(
        devices=tuple(devices),
        within=_link("links.within", links.get("within", {}), WITHIN),
        between=_link("links.between", links.get("between", {}), BETWEEN),
        pairs=pairs,
        measured=values.get("measured"),
    )


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


def _devices(place: int, item: Any, dtype: str) -> tuple[Device, int]:
    """Return the device that an item of the file describes, and how many there are of it."""
    key = f"devices[{place}]"
    names = set(Device.__dataclass_fields__)
    _check_keys(key, item, {"count", *names}, {"type"})
    values = dict(item)
    count = values.pop("count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise PlanError(f"{key}.count", count, "it is no whole number of at least 1", "Give one")
    for name in ("type", "node"):
        if not isinstance(values.get(name, ""), str):
            raise PlanError(f"{key}.{name}", values[name], "it is no text", "Put it in quotes")
    numbers = names - {"type", "node"}
    for name in numbers & values.keys():
        zero_is_fine = name == "overhead_s"
        values[name] = _number(f"{key}.{name}", values[name], zero_is_fine=zero_is_fine)
    if values.get("efficiency", 1.0) > 1:
        reason = "a device does not reach more than its peak"
        raise PlanError(f"{key}.efficiency", values["efficiency"], reason, "Give at most 1")
    missing = {"tflops", "memory_gib", "memory_gb_s"} - values.keys()
    if missing:
        known = _card(f"{key}.type", values["type"], dtype, "0")
        logger.warning("planner: %s: %s from public peak numbers", key, ", ".join(sorted(missing)))
        values |= {name: getattr(known, name) for name in missing}
    return Device(**values), count


def _link(key: str, values: Any, default: Link) -> Link:
    _check_keys(key, values, _LINK_KEYS, set())
    alpha_s = _number(f"{key}.alpha_s", values.get("alpha_s", default.alpha_s), zero_is_fine=True)
    return Link(alpha_s, _number(f"{key}.bytes_s", values.get("bytes_s", default.bytes_s)))


def _number(key: str, value: Any, *, zero_is_fine: bool = False) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (_SMALLEST <= value <= _LARGEST or (value == 0 and zero_is_fine)):
        reason = f"it is no finite number {'of at least' if zero_is_fine else 'above'} 0"
        remedy = f"Give such a number, from {_SMALLEST:g} to {_LARGEST:g}"
        raise PlanError(key, value, reason, remedy)
    return float(value)


def _check_keys(key: str, values: Any, valid: set[str], required: set[str]) -> None:
    if not isinstance(values, dict):
        raise PlanError(key, values, "it is no mapping", f"Give {', '.join(sorted(valid))}")
    for name in values:
        if name not in valid:
            reason = "this key does not exist"
            raise PlanError(f"{key}.{name}", values[name], reason, did_you_mean(name, valid))
    for name in sorted(required - values.keys()):
        raise PlanError(f"{key}.{name}", None, "the key is missing", "Give it")
