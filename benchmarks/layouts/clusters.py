# SPDX-License-Identifier: Apache-2.0
"""The emulated clusters: devices of unlike speeds on hosts with unlike links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wavemare.parallel.planner.cluster import Cluster, Device, Link
from wavemare.parallel.planner.predict import RESERVE

_STATE = 16
"""Bytes of a weight in fp32, its gradient, and Adam's state."""
_ROOMY = 1e6
"""Memory and its bandwidth, which bound nothing here."""


@dataclass(frozen=True)
class Emulated:
    """A cluster that one machine emulates.

    Args:
        hosts: For each host the speeds of its devices, relative to a slow one.
        mbit: For each host the speed of its link to the switch in Mbit/s; None where there is one
            host.
        holds: The part of the model, with gradients and optimizer state, for which a device is told
            to have memory. The others hold all of it.
    """

    hosts: tuple[tuple[float, ...], ...]
    mbit: tuple[float, ...] | None = None
    holds: float | None = None

    @property
    def ranks_per_host(self) -> int:
        """Processes on each host; those without a device end at once."""
        return max(map(len, self.hosts))

    @property
    def processes(self) -> list[int]:
        """The process, counted host by host, that is each device."""
        most = self.ranks_per_host
        return [h * most + d for h, own in enumerate(self.hosts) for d in range(len(own))]

    @property
    def speeds(self) -> list[float]:
        """The speed of each device."""
        return [speed for own in self.hosts for speed in own]

    def host(self, device: int) -> int:
        """Return the host of a device."""
        return self.processes[device] // self.ranks_per_host

    def describe(
        self,
        slow_tflops: float,
        links: Mapping[tuple[str, str], Link],
        parameters: int,
        overhead_s: float,
    ) -> Cluster:
        """Return the cluster as the planner knows it.

        Args:
            slow_tflops: Of a device of speed 1.
            links: Between and within nodes, measured.
            parameters: Of the model.
            overhead_s: Of a block's passes of a micro-batch, whatever its samples.
        """
        whole = RESERVE * parameters * _STATE
        memory = _ROOMY if self.holds is None else self.holds * whole / 2**30
        devices = tuple(
            Device(
                type=f"{speed:g}",
                tflops=speed * slow_tflops,
                efficiency=1.0,
                memory_gib=memory,
                memory_gb_s=_ROOMY,
                node=f"node{self.host(index)}",
                overhead_s=overhead_s,
            )
            for index, speed in enumerate(self.speeds)
        )
        return Cluster(devices=devices, pairs=dict(links))


_SMALL = 0.75
"""A device that holds no whole model: pipelines are needed."""


def _one_host(*speeds: float, holds: float | None = None) -> Emulated:
    return Emulated((speeds,), holds=holds)


def _hosts(hosts: Sequence[Sequence[float]], *mbit: float, holds: float | None = None) -> Emulated:
    given = mbit if len(mbit) == len(hosts) else mbit * len(hosts)
    return Emulated(tuple(map(tuple, hosts)), given, holds)


CLUSTERS: Mapping[str, Emulated] = {
    "2 like": _one_host(1, 1),
    "2:1": _one_host(2, 1),
    "2:1:1 small": _one_host(2, 1, 1, holds=_SMALL),
    "3 fast 1 slow small": _one_host(2, 2, 2, 1, holds=_SMALL),
    "1 fast 3 slow": _one_host(3, 1, 1, 1),
    "4 fast 1 very slow small": _one_host(2, 2, 2, 2, 0.2, holds=_SMALL),
    "2 hosts of 2 like": _hosts([(1, 1), (1, 1)], 200),
    "2 hosts by type": _hosts([(2, 2), (1, 1)], 200),
    "2 hosts of a mix": _hosts([(2, 1), (2, 1)], 100),
    "3 hosts one slow link": _hosts([(1, 1), (1, 1), (1, 1)], 400, 400, 50),
    "4 hosts unlike links": _hosts([(2,), (2,), (1,), (1,)], 400, 400, 100, 50),
    "6 on 2 hosts 5 fast small": _hosts([(2, 2, 2), (2, 2, 1)], 300, holds=_SMALL),
    "6 4 fast small": _one_host(2, 2, 2, 2, 1, 1, holds=_SMALL),
    "8 7 fast small": _one_host(2, 2, 2, 2, 2, 2, 2, 1, holds=_SMALL),
    "8 on 2 hosts by type": _hosts([(2, 2, 2, 2), (1, 1, 1, 1)], 200),
    "8 on 4 hosts unlike links small": _hosts(
        [(2, 2), (2, 1), (2, 1), (1, 1)], 400, 400, 200, 100, holds=_SMALL
    ),
}
"""By name."""
