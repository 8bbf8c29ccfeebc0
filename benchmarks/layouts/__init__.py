# SPDX-License-Identifier: Apache-2.0
"""``benchmarks layouts``: predicted beside measured steps, on emulated clusters of unlike devices.

Read `run` first. Passes sleep, so that two cores run eight ranks; messages and links are real.
"""
