# SPDX-License-Identifier: Apache-2.0
"""Ends a run whose ranks only wait for each other, and names the rank that holds it up.

Engines tell `progress`; `watcher` counts how long this rank waits, asks the other ranks and ends
the run. Read `watcher.py` first.
"""
