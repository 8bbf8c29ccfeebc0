# SPDX-License-Identifier: Apache-2.0
"""Detects numbers that are not finite, ranks that hang, and requests to stop.

In: gradients, the progress of each rank, signals. Out: a skipped step, a diagnosis, a clean end.
Read `numbers.py` first, then `board.py` and `watchdog.py`.
"""
