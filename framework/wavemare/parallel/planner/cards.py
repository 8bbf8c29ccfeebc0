# SPDX-License-Identifier: Apache-2.0
"""Public peak numbers of well-known cards, for clusters that nobody has measured yet."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CARDS", "Card"]


class Card(NamedTuple):
    """A card as its data sheet has it.

    Args:
        fp32: Dense TFLOP/s without tensor cores.
        fp16: Dense TFLOP/s with fp32 sums, on tensor cores where there are some.
        bf16: The same for bf16; that of fp32 where the card has none.
        memory_gib: Its memory.
        memory_gb_s: Its memory's bandwidth, in 1e9 bytes/s.
    """

    fp32: float
    fp16: float
    bf16: float
    memory_gib: float
    memory_gb_s: float

    def tflops(self, dtype: str) -> float:
        """Return the peak for a dtype: fp32, fp16 or bf16."""
        return {"fp32": self.fp32, "fp16": self.fp16, "bf16": self.bf16}[dtype]


CARDS = {
    "P40": Card(11.8, 11.8, 11.8, 24, 346),
    "P100": Card(9.3, 18.7, 9.3, 16, 732),
    "P100-SXM2": Card(10.6, 21.2, 10.6, 16, 732),
    "V100": Card(15.7, 125, 15.7, 16, 900),
    "V100-32": Card(15.7, 125, 15.7, 32, 900),
    "V100-PCIE": Card(14.0, 112, 14.0, 16, 900),
    "T4": Card(8.1, 65, 8.1, 16, 320),
    "RTX2080TI": Card(13.4, 53.8, 13.4, 11, 616),
    "RTX3090": Card(35.6, 71, 71, 24, 936),
    "RTX4090": Card(82.6, 165, 165, 24, 1008),
    "A10": Card(31.2, 125, 125, 24, 600),
    "A40": Card(37.4, 150, 150, 48, 696),
    "A6000": Card(38.7, 155, 155, 48, 768),
    "A100-40": Card(19.5, 312, 312, 40, 1555),
    "A100-80": Card(19.5, 312, 312, 80, 2039),
    "L4": Card(30.3, 121, 121, 24, 300),
    "L40": Card(90.5, 181, 181, 48, 864),
    "L40S": Card(91.6, 362, 362, 48, 864),
    "H100": Card(67, 989, 989, 80, 3350),
    "H100-PCIE": Card(51, 756, 756, 80, 2000),
    "H200": Card(67, 989, 989, 141, 4800),
}
"""By name. The P100 is the PCIe card, the V100, A100, H100 and H200 those on SXM boards."""
