# SPDX-License-Identifier: Apache-2.0
"""Runs plans on a simulated clock. Imports no torch.

In: a plan and the cost of each action. Out: when each action runs, and how busy each rank is.
Read `clock.py` first.
"""
