# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules as data. Imports no torch.

In: numbers of stages and micro-batches. Out: for each rank a list of actions that a checker has
proved complete and free of deadlock. Read `plan.py` first, then `schedules.py`.
"""
