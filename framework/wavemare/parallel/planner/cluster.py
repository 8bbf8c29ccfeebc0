# SPDX-License-Identifier: Apache-2.0
"""Devices and the links between them: measured by a probe, described by a file or a short text."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from wavemare.errors import ConfigError, PlanError, did_you_mean
from wavemare.files import atomic_write_text, read_json
from wavemare.section import Section

DTYPES = ("fp32", "fp16", "bf16")
VERSION = 1
EFFICIENCY = 0.5
OVERHEAD_S = 4e-4
"""Of a block's passes on a card of the table: some hundred kernels of a few microseconds."""
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Device:
    """What one rank computes with.

    Args:
        type: Name of the kind of device; devices of one type are alike in all but the node.
        tflops: 1e12 floating-point operations per second, dense, of the dtype that is used.
        efficiency: Which part of them the model's products reach, above 0 and up to 1.
        memory_gib: In 2**30 bytes.
        memory_gb_s: Bandwidth of its memory, in 1e9 bytes/s.
        node: Name of the machine that it is in.
        overhead_s: Seconds of a block's forward and backward pass that do not depend on the batch.
    """

    type: str
    tflops: float
    memory_gib: float
    memory_gb_s: float
    node: str = "0"
    efficiency: float = EFFICIENCY
    overhead_s: float = 0.0

    @property
    def rate(self) -> float:
        """Floating-point operations per second that the model reaches."""
        return self.tflops * self.efficiency * 1e12

    @property
    def memory_bytes(self) -> float:
        """Its memory."""
        return self.memory_gib * _GIB


@dataclass(frozen=True)
class Link:
    """A message of n bytes takes ``alpha_s + n / bytes_s``.

    Args:
        alpha_s: Latency, in seconds.
        bytes_s: Bandwidth, in bytes per second.
    """

    alpha_s: float
    bytes_s: float

    def seconds(self, size: float) -> float:
        """Return the time of a message of so many bytes."""
        return self.alpha_s + size / self.bytes_s

    def shared(self, count: int) -> Link:
        """Return what each of so many groups has of it that use it at the same time."""
        return Link(self.alpha_s, self.bytes_s / count)


WITHIN = Link(10e-6, 20e9)
BETWEEN = Link(30e-6, 2.5e9)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices, in the order in which ranks would come, and links.

    Args:
        devices: One for each rank.
        within: Between devices of a node.
        between: Between nodes.
        pairs: Links of pairs of nodes that differ from these, by the two names in order; a node
            twice for the link within it.
        assumed: What nobody measured or gave, in words.
        measured: Where, when and with what a probe measured it.

    Raises:
        PlanError: Devices of one type are unlike.
    """

    devices: tuple[Device, ...]
    within: Link = WITHIN
    between: Link = BETWEEN
    pairs: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    assumed: tuple[str, ...] = field(default=(), compare=False)
    measured: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        first: dict[str, Device] = {}
        for device in self.devices:
            known = first.setdefault(device.type, device)
            if replace(device, node=known.node, memory_gib=known.memory_gib) != known:
                reason = "devices of this type differ in more than node and memory"
                raise PlanError("devices.type", device.type, reason, "Give them different types")

    @cached_property
    def types(self) -> tuple[str, ...]:
        """Names of the types, in the order of their first device."""
        return tuple(dict.fromkeys(device.type for device in self.devices))

    @cached_property
    def kinds(self) -> tuple[Device, ...]:
        """A device of each type: the one with the least memory."""
        return tuple(
            min((d for d in self.devices if d.type == name), key=lambda d: d.memory_gib)
            for name in self.types
        )

    def link(self, first: str, second: str) -> Link:
        """Return the link between two nodes, or within one."""
        own = self.pairs.get((min(first, second), max(first, second)))
        return own or (self.within if first == second else self.between)

    def of_devices(self, chosen: Sequence[int]) -> Cluster:
        """Return the cluster of some of the devices, in their order."""
        return replace(self, devices=tuple(self.devices[index] for index in chosen))

    def slowest_link(self, nodes: Iterable[str], *, single: bool = False) -> Link:
        """Return the highest latency and the lowest bandwidth among several nodes.

        Args:
            nodes: Their names, once for each device.
            single: Whether each node has but one of the devices, so that none shares a node.
        """
        names = sorted(set(nodes))
        pairs = list(combinations(names, 2))
        if not pairs or not single:
            pairs += [(name, name) for name in names]
        links = [self.link(*pair) for pair in pairs]
        return Link(max(link.alpha_s for link in links), min(link.bytes_s for link in links))

    def to_json(self) -> str:
        """Return the cluster as the text of a file."""
        values = {
            "version": VERSION,
            "devices": [asdict(device) for device in self.devices],
            "links": {
                "within": asdict(self.within),
                "between": asdict(self.between),
                "pairs": [{"nodes": n, **asdict(own)} for n, own in sorted(self.pairs.items())],
            },
            "measured": self.measured,
        }
        return json.dumps(values, indent=2) + "\n"

    def save(self, file: str | Path) -> None:
        """Write the file that `read_cluster` reads."""
        atomic_write_text(file, self.to_json())


class Card(NamedTuple):
    """A card as its data sheet has it.

    Args:
        fp32: Dense TFLOP/s without tensor cores.
        fp16: Dense TFLOP/s with fp32 sums, on tensor cores where there are some.
        bf16: The same for bf16; that of fp32 where the card has none.
        memory_gib: Its memory.
        memory_gb_s: Its memory's bandwidth, in 1e9 bytes/s.
        link_gb_s: Bandwidth to another card of the machine in one direction, in 1e9 bytes/s: half
            of NVLink's total, or of 16 lanes of PCIe where there is none.
    """

    fp32: float
    fp16: float
    bf16: float
    memory_gib: float
    memory_gb_s: float
    link_gb_s: float


CARDS = {
    "P40": Card(11.8, 11.8, 11.8, 24, 346, 16),
    "P100": Card(9.3, 18.7, 9.3, 16, 732, 16),
    "P100-SXM2": Card(10.6, 21.2, 10.6, 16, 732, 80),
    "V100": Card(15.7, 125, 15.7, 16, 900, 150),
    "V100-32": Card(15.7, 125, 15.7, 32, 900, 150),
    "V100-PCIE": Card(14.0, 112, 14.0, 16, 900, 16),
    "T4": Card(8.1, 65, 8.1, 16, 320, 16),
    "RTX2080TI": Card(13.4, 53.8, 13.4, 11, 616, 16),
    "RTX3090": Card(35.6, 71, 71, 24, 936, 32),
    "RTX4090": Card(82.6, 165, 165, 24, 1008, 32),
    "A10": Card(31.2, 125, 125, 24, 600, 32),
    "A40": Card(37.4, 150, 150, 48, 696, 32),
    "A6000": Card(38.7, 155, 155, 48, 768, 32),
    "A100-40": Card(19.5, 312, 312, 40, 1555, 300),
    "A100-80": Card(19.5, 312, 312, 80, 2039, 300),
    "L4": Card(30.3, 121, 121, 24, 300, 32),
    "L40": Card(90.5, 181, 181, 48, 864, 32),
    "L40S": Card(91.6, 362, 362, 48, 864, 32),
    "H100": Card(67, 989, 989, 80, 3350, 450),
    "H100-PCIE": Card(51, 756, 756, 80, 2000, 64),
    "H200": Card(67, 989, 989, 141, 4800, 450),
}
"""By name. The P100 is the PCIe card, the V100, A100, H100 and H200 those on SXM boards."""


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


class _PairItem(_LinkItem):
    nodes: list[str] = Field(min_length=2, max_length=2)


class _Links(Section):
    within: _LinkItem = _LinkItem()
    between: _LinkItem | None = None
    pairs: list[_PairItem] = Field(default_factory=list)


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
        values = read_json(file, PlanError, "--cluster", "Name a file, or correct it")
        return parse_cluster(values, dtype)
    return _from_text(str(source), dtype)


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
    assumed: list[str] = []
    for place, item in enumerate(content.devices):
        key = f"cluster.devices[{place}]"
        _check_size(f"{key}.count", item.count, len(devices) + item.count)
        _check_units(f"{key}.", item)
        devices += [_device(key, item, dtype, assumed)] * item.count
    for name, link in (("within", content.links.within), ("between", content.links.between)):
        if link is not None:
            _check_units(f"cluster.links.{name}.", link)
    links, nodes = content.links, dict.fromkeys(device.node for device in devices)
    pairs = _pairs(links, list(nodes))
    if "within" not in links.model_fields_set:
        names = [n for n in nodes if (n, n) not in pairs and _is_shared(devices, n)]
        if names:
            assumed.append(f"links within nodes: {_told(WITHIN)}")
    if links.between is None and len(nodes) > 1 and not pairs:
        assumed.append(f"links between nodes: {_told(BETWEEN)}")
    between = links.between or _LinkItem()
    return Cluster(
        devices=tuple(devices),
        within=replace(WITHIN, **links.within.model_dump(exclude_unset=True)),
        between=replace(BETWEEN, **between.model_dump(exclude_unset=True)),
        pairs=pairs,
        assumed=tuple(assumed),
        measured=content.measured,
    )


_UNITS = {
    "tflops": (1e6, "it counts 1e12 operations per second", "Give 125 for 125 TFLOP/s"),
    "memory_gib": (1e6, "it counts 2^30 bytes", "Give 16 for 16 GiB"),
    "memory_gb_s": (1e6, "it counts 1e9 bytes per second", "Give 900 for 900 GB/s"),
    "bytes_s": (1e15, "it counts bytes per second", "Give 2.5e9 for 20 Gbit/s"),
    "alpha_s": (3600.0, "it counts seconds", "Give 3e-5 for 30 microseconds"),
    "overhead_s": (3600.0, "it counts seconds", "Give 4e-4 for 0.4 milliseconds"),
}
"""The most that a number may be: above it, its unit has been mistaken."""


def _check_units(prefix: str, item: Section) -> None:
    """Refuse numbers that no device and no link has.

    Raises:
        PlanError: One of them.
    """
    for name in item.model_fields_set & _UNITS.keys():
        most, unit, remedy = _UNITS[name]
        value = getattr(item, name)
        if value > most:
            raise PlanError(f"{prefix}{name}", value, f"nothing has so much: {unit}", remedy)


def _is_shared(devices: Sequence[Device], node: str) -> bool:
    return sum(device.node == node for device in devices) > 1


def _told(link: Link) -> str:
    return f"{link.bytes_s / 1e9:g} GB/s, {link.alpha_s * 1e6:g} us"


def _pairs(links: _Links, nodes: Sequence[str]) -> dict[tuple[str, str], Link]:
    """Return the links of pairs of nodes.

    Raises:
        PlanError: A pair names no node, or is given twice; or pairs leave one out.
    """
    found: dict[tuple[str, str], Link] = {}
    for place, item in enumerate(links.pairs):
        first, second = sorted(item.nodes)
        key = f"cluster.links.pairs[{place}]"
        _check_units(f"{key}.", item)
        for name in (first, second):
            if name not in nodes:
                reason = "no device is in this node"
                raise PlanError(f"{key}.nodes", name, reason, did_you_mean(name, nodes))
        if (first, second) in found:
            reason = "the link of these nodes is given twice"
            raise PlanError(f"{key}.nodes", [first, second], reason, "Give it once")
        found[first, second] = Link(item.alpha_s, item.bytes_s)
    given = any(first != second for first, second in found)
    missing = [p for p in combinations(sorted(nodes), 2) if p not in found]
    if given and links.between is None and missing:
        names = " and ".join(missing[0])
        reason = f"of {len(missing)} pairs of nodes there is no link, such as that of {names}"
        raise PlanError("cluster.links", None, reason, "Give it in pairs, or all others as between")
    return found


def _device(key: str, item: _DeviceItem, dtype: str, assumed: list[str]) -> Device:
    """Return a device of an item of the file; the table has the numbers that it lacks."""
    values = item.model_dump(exclude={"count"}, exclude_unset=True)
    missing = {"tflops", "memory_gib", "memory_gb_s"} - values.keys()
    if missing:
        known = _card(f"{key}.type", item.type, dtype, "0")
        told = f"{key}: {', '.join(sorted(missing))} from public peak numbers"
        logger.warning("planner: %s", told)
        assumed.append(told)
        values |= {name: getattr(known, name) for name in missing}
    if "efficiency" not in values:
        assumed.append(f"{key}: an efficiency of {EFFICIENCY:g}")
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
        "measure the cluster to rely on a layout",
        text,
        EFFICIENCY,
    )
    within = {d.node: Link(WITHIN.alpha_s, CARDS[d.type].link_gb_s * 1e9) for d in devices}
    slowest = min(within.values(), key=lambda link: link.bytes_s)
    rates = {f"{CARDS[d.type].link_gb_s:g} GB/s ({d.type})" for d in devices}
    assumed = [
        f"{dtype} peaks of the cards at an efficiency of {EFFICIENCY:g}",
        f"an overhead of {OVERHEAD_S * 1e3:g} ms per block",
    ]
    if any(_is_shared(devices, node) for node in within):
        assumed.append(f"links within nodes: {', '.join(sorted(rates))}")
    if nodes > 1:
        assumed.append(f"links between nodes: {_told(BETWEEN)}")
    pairs = {(node, node): link for node, link in within.items() if link != slowest}
    return Cluster(devices=tuple(devices), within=slowest, pairs=pairs, assumed=tuple(assumed))


def _card(key: str, name: str, dtype: str, node: str) -> Device:
    card = CARDS.get(name.upper())
    if card is None:
        reason = "the built-in table has no such card"
        raise PlanError(key, name, reason, did_you_mean(name.upper(), CARDS))
    return Device(
        type=name.upper(),
        tflops=getattr(card, dtype),
        memory_gib=card.memory_gib,
        memory_gb_s=card.memory_gb_s,
        node=node,
        overhead_s=OVERHEAD_S,
    )


def _check_size(key: str, value: object, devices: int) -> None:
    if devices > _MOST_DEVICES:
        reason = f"these are {devices} devices"
        raise PlanError(key, value, reason, f"Give at most {_MOST_DEVICES} in all")
